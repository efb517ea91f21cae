"""The pieces of POWER's study that compute something, and its bandit claims, run in full."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from assay.alignment.power import study as s
from assay.alignment.power.rivals import problems
from assay.alignment.power.training import margin_loss
from assay.alignment.preference_pairs import Pair, PairLogps


@pytest.fixture(scope="module")
def bandits():
    """The bandit replicate of the arms that its claims read, at full length."""
    config = s.PowerConfig(num_cpus=1)
    arms = ("sft", "dpo", "simpo", "ipo", "power", "dl", "power-dl", "power-initial")
    outcomes = {arm: SimpleNamespace(metrics=s.on_bandits(s.study.arms[arm], problems(), config)) for arm in arms}
    return outcomes


@pytest.mark.slow
def test_the_bandits_end_where_they_were_measured_to(bandits):
    expected = {
        ("dpo", "A1_C_early"): 0.031, ("dpo", "A1_C"): 0.999, ("simpo", "A1_C_early"): 0.933, ("ipo", "A1_C"): 0.069,
        ("power", "A1_C"): 0.094, ("power", "A1_C_eta1"): 0.019, ("dl", "A1_C"): 0.033, ("sft", "A1_C"): 0.010,
        ("power-dl", "A1_C_eta0.1-gamma0.02"): 0.010, ("dl", "A3_A_early"): 0.467, ("power-dl", "A3_A_early"): 0.501,
        ("dl", "A2_A_early"): 0.729, ("power-initial", "A2_A_eta1"): 0.778, ("power-dl", "A2_A_eta0.01-gamma0.02_early"): 0.039,
        ("simpo", "A3_C_early"): 0.773, ("sft", "A3_B"): 0.619,
    }  # fmt: skip
    seen = {key: bandits[key[0]].metrics[key[1]] for key in expected}
    assert seen == pytest.approx(expected, abs=1.5e-3)


@pytest.mark.slow
def test_every_bandit_claim_can_be_read_and_the_decided_ones_hold(bandits):
    about_bandits = [claim for claim in s.study.claims if not claim.text.startswith(("Harmless", "Reviews"))]
    assert len(about_bandits) > 25
    for claim in about_bandits:
        value = claim.statistic(bandits)
        assert value is not None, claim.text
        assert np.isfinite(float(value)), claim.text
        assert claim.holds is None or float(value) in claim.holds, (claim.text, value)


def test_a_claim_skips_the_replicates_it_is_not_about():
    empty = {name: SimpleNamespace(metrics={}) for name in s.study.arms}
    assert [c.text for c in (*s.study.claims, *s.study.gates) if c.statistic(empty) is not None] == []


def test_own_margins_and_finding_flips():
    logps = PairLogps(torch.tensor([-4.0, -9.0]), torch.tensor([-6.0, -2.0]), torch.tensor([2, 3]), torch.tensor([2, 1]))
    start = PairLogps(torch.tensor([-5.0, -9.0]), torch.tensor([-6.0, -3.0]), torch.tensor([2, 3]), torch.tensor([2, 1]))
    assert s.margins(logps, start, "mean").tolist() == [1.0, -1.0]
    assert s.margins(logps, start, "ratio").tolist() == [1.0, -1.0]
    assert s.auroc(np.array([False, True]), -s.margins(logps, start, "mean")) == 1.0
    assert s.auroc(np.array([True, True]), np.zeros(2)) == 0.5


def test_equal_kl_is_read_off_both_paths():
    def outcome(kl, gold):
        curves = {"kl": (None, np.array(kl)), "gold_win": (None, np.array(gold))}
        return SimpleNamespace(metrics={"gold_win": gold[-1]}, curve=curves.get)

    r = {"power-dl": outcome([1.0, 2.0], [0.6, 0.8]), "simpo": outcome([2.0, 8.0], [0.6, 0.7])}
    gain = s.gold_at_equal_kl("power-dl", "simpo")
    assert gain(r) == pytest.approx(0.8 - 0.6)
    assert gain({**r, "simpo": SimpleNamespace(metrics={})}) is None


@pytest.mark.parametrize("kind", ["smoothed", "chi", "ropo"])
def test_losses_that_trl_lacks(kind):
    ratio = torch.tensor([0.3, -0.2, -0.5, 0.4], dtype=torch.float64)
    z = ratio + ratio.exp() if kind == "chi" else ratio
    p = torch.sigmoid(0.1 * (z[:2] - z[2:]))
    expected = {
        "smoothed": -0.8 * p.log() - 0.2 * (1 - p).log(),
        "chi": -p.log(),
        "ropo": 56 / 225 * (-p.log() + 14 * (1 - p)),
    }[kind]
    torch.testing.assert_close(margin_loss(kind, ratio, 0.1, 0.2), expected)


def test_own_arms_always_train_and_others_only_where_named():
    config = s.study.scale("smoke")
    audit = s.Audit(None, None, None, None)
    assert s.trial(s.study.arms["ipo"], audit, config, SimpleNamespace(arm="ipo")) == {}
    assert s.replicates(config) == ["bandits", "harmless/0", "reviews/0"]
    assert not dataclasses.is_dataclass(s.study.arms["ipo"])
    with pytest.raises(TypeError):  # it goes on to train, on nothing
        s.trial(s.study.arms["ipo"], audit, config, SimpleNamespace(arm="mine", seed=0))


def test_pairs_whose_answer_merges_with_its_prompt_are_left_out_and_counted():
    from assay.models.small_lm import train_tokenizer

    tokenizer = train_tokenizer(["good"] * 50 + ["it is good"] * 50)
    rows = (Pair("it is", " good", " it"), Pair("it is go", "od", " it"), Pair("it is", " it", " good", True))
    kept = s.separable(s.Pairs(rows, {"empty answer": 2}), tokenizer)
    assert kept.rows == (rows[0], rows[2])
    assert kept.skipped == {"empty answer": 2, "answer merges with its prompt": 1}
