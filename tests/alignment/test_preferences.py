"""The problem that the alignment studies share: pairs, metrics, and both cases in small."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from assay.alignment import preference_pairs, preferences
from assay.alignment.preference_pairs import Pair, implicit_accuracy, pair_logps, sampled_pairs, uneven_counts, usable_pairs
from assay.alignment.preferences import distinct2, win_rate
from assay.data import needs


def test_unusable_pairs_are_counted_and_never_shown():
    rows = [("p", " a", " b"), ("p", " a", " a "), ("p", "", " b"), ("p", None, " b"), ("p", " c", " d", True)]
    pairs = usable_pairs(rows)
    assert pairs.skipped == {"identical answers": 1, "empty answer": 1, "missing answer": 1}
    assert pairs.flipped.tolist() == [False, True]
    assert repr(usable_pairs([("swordfish", " a", " b")]).rows[0]).count("swordfish") == 0
    with pytest.raises(ValueError, match="no usable pair among 3"):
        usable_pairs(rows[1:4])


def test_flips_are_exact_and_undone_by_themselves():
    pairs = usable_pairs([("p", f" a{i}", f" b{i}") for i in range(50)])
    flipped = pairs.flip(0.2, seed=1)
    assert flipped.flipped.sum() == 10
    assert all((f.chosen, f.rejected) == ((r.rejected, r.chosen) if f.flipped else (r.chosen, r.rejected))
               for r, f in zip(pairs.rows, flipped.rows, strict=True))  # fmt: skip
    assert flipped.flip(0.2, seed=1).rows == pairs.rows
    with pytest.raises(ValueError, match="between 0 and 1"):
        pairs.flip(1.5, seed=0)


def test_a_data_set_for_trl():
    pytest.importorskip("datasets")
    data = usable_pairs([("p", " a", " b"), ("q", " c", " d")]).dataset()
    assert data.column_names == ["prompt", "chosen", "rejected", "pair_id"]
    assert list(data["pair_id"]) == [0, 1]


def test_win_rate_and_distinct_pairs_by_hand():
    assert win_rate(np.array([[2.0], [0.0]]), np.array([[1.0, 2.0], [0.0, 0.0]])) == pytest.approx((0.75 + 0.5) / 2)
    with pytest.raises(ValueError, match="same prompts, got 1 and 2"):
        win_rate(np.zeros((1, 2)), np.zeros((2, 2)))
    ids, mask = torch.tensor([[5, 6, 5, 6], [5, 6, 9, 9]]), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    assert distinct2(ids, mask) == 2 / 4  # 56, 65, 56 and 56


def test_uneven_coverage():
    counts = uneven_counts(10, seed=3)
    assert sorted(counts) == [1, 1] + [8] * 8
    assert counts != uneven_counts(10, seed=4)


@pytest.mark.slow
def test_the_review_case_in_small():
    needs("reviews")
    case = preferences.review_case(seed=0, steps=15, prompts=12, labels=150, table=30, gold_table=2)
    again = preferences.review_case(seed=0, steps=15, prompts=12, labels=150, table=30, gold_table=0)
    assert case.reference.texts == again.reference.texts
    assert again.gold is None
    assert len(set(case.prompts)) == 12
    assert case.reference.proxy.shape == (12, 30)
    assert case.reference.gold.shape == case.reference.vader.shape == (12, 2)
    assert 0 <= case.proxy_accuracy <= 1
    assert case.gold_accuracy > 0.5
    assert case.heldout_loss < math.log(1500)
    policy, tokenizer = case.sft.load()
    found = preferences.evaluate(policy, case, seed=1, per_prompt=20, gold_per_prompt=1, kl_per_prompt=2)
    assert set(preferences.COMPARE) <= found.keys()
    assert found["kl"] == found["kl_k1"] == found["kl_k3"] == 0
    assert found["proxy_win"] == pytest.approx(0.5, abs=0.08)
    pairs = sampled_pairs(policy, tokenizer, case.prompts, case.proxy, seed=0, per_prompt=5)
    margins = case.proxy([r.prompt + r.chosen for r in pairs.rows]) - case.proxy([r.prompt + r.rejected for r in pairs.rows])
    assert (margins >= 0).all()
    noisy = sampled_pairs(policy, tokenizer, case.prompts, case.proxy, seed=0, per_prompt=20, flips=0.3)
    assert noisy.flipped.mean() == pytest.approx(0.3, abs=0.1)
    noise = sampled_pairs(policy, tokenizer, case.prompts, case.proxy, seed=0, per_prompt=20, bradley_terry=0.0)
    assert noise.flipped.mean() == pytest.approx(0.45, abs=0.12)  # a coin, where scores are not equal
    logps = pair_logps(policy, tokenizer, pairs)
    assert implicit_accuracy(logps, logps) == 0.5
    assert implicit_accuracy(logps._replace(chosen=logps.chosen + 1), logps) == 1
    with pytest.raises(ValueError, match="too few for 12 prompts"):
        preferences.review_case(seed=0, prompts=12, labels=1500)


@pytest.mark.slow
def test_the_harmless_case_in_small():
    needs("preferences")
    case = preference_pairs.harmless_case(seed=0, steps=5, heldout=20, limit=80)
    assert len(case.train) + sum(case.train.skipped.values()) == 60
    assert len(case.test) + sum(case.test.skipped.values()) == 20
    _, tokenizer = case.sft.load()
    longest = [max(len(tokenizer(text)["input_ids"]) for text in row[:3]) for row in case.train.rows]
    assert max(longest) <= 34  # 32, the first token, and a letter that a cut went through
    assert isinstance(case.train.rows[0], Pair)
    with pytest.raises(ValueError, match="heldout must be fewer"):
        preference_pairs.harmless_case(seed=0, heldout=20, limit=20)
