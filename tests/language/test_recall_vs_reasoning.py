"""The noisy recall task, its transformer, training, and one gradient step: identities, references, and what the paper finds."""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from assay.language import (
    NoisyRecall,
    RecallTransformer,
    evaluate_recall,
    gradient_margins,
    recall_loss,
    recall_metrics,
    recall_probes,
    train_recall,
    truncated,
)
from assay.language.recall_vs_reasoning.margins import last_recall
from assay.language.recall_vs_reasoning.task import RecallBatch, occurrences

TEXT = "she sells sea shells on the sea shore; the shells she sells are surely seashells! " * 8


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def flat(n, **settings):
    return NoisyRecall(torch.full((n,), 1 / n), torch.full((n, n), 1 / n), **settings)


# -- the task -----------------------------------------------------------------------------------------------------------


def test_statistics_are_those_of_the_text():
    task = NoisyRecall.from_text(TEXT, floor=1e-12)
    place = {c: i for i, c in enumerate(sorted(set(TEXT)))}
    assert task.characters == "".join(place)
    follow = [b for a, b in itertools.pairwise(TEXT) if a == "h"]
    for letter in "eos":
        assert task.bigram[place["h"], place[letter]] == pytest.approx(follow.count(letter) / len(follow), abs=1e-9)
    assert task.unigram[place["s"]] == pytest.approx(TEXT.count("s") / len(TEXT))
    assert task.decode(task.triggers) == "s"
    assert torch.allclose(task.bigram.sum(1), torch.ones(task.vocab, dtype=torch.double))


def test_a_last_character_that_nothing_follows_has_a_row():
    task = NoisyRecall.from_text("aaabcabcabz", noise_token=2, n_triggers=1)
    assert torch.allclose(task.bigram[-1], torch.full((4,), 0.25, dtype=torch.double))


@pytest.mark.parametrize("fixed", [True, False])
def test_every_step_follows_the_rule(fixed):
    """Each transition after a trigger is its answer or noise; every other one is possible under the bigrams."""
    n = 7
    generator = np.random.default_rng(0)
    bigram = torch.tensor(generator.dirichlet(np.ones(n), n)) * (torch.arange(n) != 5)  # nothing leads to 5 but answers
    bigram = bigram / bigram.sum(1, keepdim=True)
    task = NoisyRecall(
        torch.full((n,), 1 / n), bigram, n_triggers=2, noise_token=6, alpha=0.4, seq_len=50, fixed_triggers=fixed
    )
    batch = task.sample(64, seeded())
    noise = total = 0
    for row in range(64):
        triggers, answers = batch.triggers[row].tolist(), batch.answer[row].tolist()
        assert 6 not in triggers
        counts: dict[int, int] = {}
        for t, (now, following) in enumerate(zip(batch.inputs[row].tolist(), batch.labels[row].tolist(), strict=True)):
            if now not in triggers:
                assert batch.occurrence[row, t] == 0
                assert batch.expected[row, t] == -1
                assert following != 5
                continue
            answer = answers[triggers.index(now)]
            counts[now] = counts.get(now, 0) + 1
            assert batch.occurrence[row, t] == counts[now]
            assert batch.expected[row, t] == answer
            assert following in (answer, 6)
            if answer != 6:
                noise, total = noise + (following == 6), total + 1
    assert noise / total == pytest.approx(0.4, abs=4 * (0.24 / total) ** 0.5)
    assert (len(batch.triggers.unique(dim=0)) == 1) == fixed


def test_transitions_have_the_frequencies_of_the_bigrams():
    task = NoisyRecall.from_text(TEXT, alpha=0.3, seq_len=100)
    batch = task.sample(3000, seeded(1))
    free = batch.occurrence == 0
    counts = torch.bincount(batch.inputs[free] * task.vocab + batch.labels[free], minlength=task.vocab**2)
    counts = counts.reshape(task.vocab, task.vocab).double()
    visits = counts.sum(1, keepdim=True)
    excess = (counts - visits * task.bigram) / (visits * task.bigram * (1 - task.bigram)).sqrt().clamp(min=1)
    assert excess.abs().max() < 5  # standard deviations of a binomial


def test_official_generator_has_the_same_shares():
    """leichen2018/ATTN_vs_MLP, ihead_data.py, on 256 sequences of 96 characters with pydoc's statistics, k=3, noise 0.3:
    0.172 of the positions are recall positions and 0.297 of the triggers are followed by the noise token."""
    pytest.importorskip("pydoc_data.topics")
    from assay.data import load_text

    task = NoisyRecall.from_text(load_text("pydoc"), n_triggers=3, alpha=0.3, seq_len=96)
    batch = task.sample(2000, seeded())
    assert batch.recall.float().mean() == pytest.approx(0.172, abs=0.01)
    assert (batch.labels[batch.occurrence >= 1] == 2).float().mean() == pytest.approx(0.30, abs=0.02)


def test_occurrences_by_counting():
    tokens = torch.randint(0, 5, (6, 40), generator=seeded())
    triggers = torch.tensor([[1, 3]]).expand(6, 2)
    found = occurrences(tokens, triggers)
    for row, t in np.ndindex(6, 40):
        token = int(tokens[row, t])
        expected = int((tokens[row, : t + 1] == token).sum()) if token in (1, 3) else 0
        assert found[row, t] == expected


def test_the_same_seed_gives_the_same_sequences_and_clean_ones_no_noise():
    task = flat(20, seq_len=60, n_triggers=3, noise_token=9)
    assert torch.equal(task.sample(5, seeded()).tokens, task.sample(5, seeded()).tokens)
    clean = task.clean()
    assert clean.alpha == 0
    assert torch.equal(clean.triggers, task.triggers)
    batch = clean.sample(50, seeded())
    assert torch.equal(batch.labels[batch.recall], batch.expected[batch.recall])
    assert torch.equal(batch.to("cpu").tokens, batch.tokens)


def test_probability_zero_is_never_drawn():
    bigram = torch.eye(8).roll(1, 1)  # i leads to i + 1
    task = NoisyRecall(torch.full((8,), 0.125), bigram, seq_len=30, noise_token=7)
    batch = task.sample(200, seeded())
    free = batch.occurrence == 0
    assert torch.equal(batch.labels[free], (batch.inputs[free] + 1) % 8)


GOOD = {"unigram": torch.full((4,), 0.25), "bigram": torch.full((4, 4), 0.25)}
MISTAKES = {
    "unigram must": {"unigram": torch.eye(4)},
    "unigram: it must sum to 1": {"unigram": torch.ones(4)},
    "bigram: each row must sum to 1": {"bigram": torch.full((4, 4), 0.3)},
    "bigram must hold finite": {"bigram": torch.full((4, 4), float("nan"))},
    "bigram must be": {"bigram": torch.full((5, 5), 0.2)},
    "none negative": {"unigram": torch.tensor([1.5, -0.5, 0, 0])},
    "n_triggers must be in": {"n_triggers": 4},
    "n_triggers must be below": {"fixed_triggers": False, "unigram": torch.tensor([0.5, 0.5, 0, 0]), "n_triggers": 2},
    "noise_token must": {"noise_token": 4},
    "noise_token 0 is one": {"noise_token": 0},
    "alpha must": {"alpha": 1.0},
    "alpha must be in": {"alpha": -0.1},
    "seq_len": {"seq_len": 1},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_wrong_task_is_refused(message):
    with pytest.raises(ValueError, match=message):
        NoisyRecall(**{**GOOD, **MISTAKES[message]})


def test_other_mistakes_are_refused():
    for text, settings, message in (("aaa", {}, "two different"), (TEXT, {"floor": 0.0}, "floor"), ("ab", {}, "noise_token")):
        with pytest.raises(ValueError, match=message):
            NoisyRecall.from_text(text, **settings)
    with pytest.raises(ValueError, match="batch"):
        flat(5).sample(0)
    with pytest.raises(ValueError, match="from_text"):
        flat(5).decode(torch.zeros(2))


# -- the transformer ----------------------------------------------------------------------------------------------------


def by_hand(model, tokens):
    """The paper's equations for one sequence, token by token."""
    h = [model.embed.weight[z] + model.position[t] for t, z in enumerate(tokens)]
    for block in model.blocks:
        attention = block.attention
        new = []
        for t in range(len(h)):
            scores = torch.stack([h[t] @ attention.key.weight @ h[s] / len(h[t]) ** 0.5 for s in range(t + 1)])
            mixed = sum(a * (attention.value.weight @ x) for a, x in zip(scores.softmax(0), h, strict=False))
            new.append(h[t] + attention.out.weight @ mixed)
        if block.ff is not None:
            linear = not hasattr(block.ff, "up")
            new = [x + (block.ff(x) if linear else block.ff.down.weight @ (block.ff.up.weight @ x).relu()) for x in new]
        h = new
    return torch.stack(h) @ model.unembed.weight.T


@pytest.mark.parametrize("ffn", [("mlp", "mlp"), (None, "mlp"), ("mlp", "linear"), (None, None)])
def test_the_forward_is_the_equations(ffn):
    torch.manual_seed(0)
    model = RecallTransformer(11, dim=8, max_len=9, ffn=ffn).double()
    tokens = torch.randint(0, 11, (2, 9))
    for row in range(2):
        assert torch.allclose(model(tokens)[row], by_hand(model, tokens[row].tolist()), atol=1e-10)


def filled(shape, k):
    """Numbers in [-1, 1] that need no random generator."""
    i = torch.arange(torch.Size(shape).numel())
    return ((i * i * 31 + i * 17 + k * 13) % 101 / 50 - 1).reshape(shape).float()


# leichen2018/ATTN_vs_MLP, ihead_basic_model.py, run on the weights of `filled`: logits of the last position.
OFFICIAL = [
    ({}, [0.3332, 0.8621, -1.2836, 0.622, -2.2905, -2.8162, -1.7787]),
    (
        {("blocks.0.attention.out", "blocks.0.attention.value"): 0.2},
        [0.3359, 0.8656, -1.3401, 0.3866, -2.357, -2.6671, -1.7055],
    ),
    ({"blocks.1.ff.up": 0.2}, [0.2584, -0.2317, -0.9738, -0.3395, -1.6966, -1.7943, -1.7983]),
    ({"blocks.1.ff.down": 0.0}, [0.04, -0.1115, -0.8065, -0.355, -1.7526, -1.8901, -1.493]),
    ({"blocks.1.ff": 0.0}, [0.04, -0.1115, -0.8065, -0.355, -1.7526, -1.8901, -1.493]),
    (
        {"blocks.0.attention.out": 0.1, "blocks.0.ff.down": 0.1},
        [0.0807, 0.5013, -0.3474, 1.0223, -1.2604, -1.5215, -0.991],
    ),
]


@pytest.mark.parametrize(("cut", "expected"), OFFICIAL)
def test_logits_are_those_of_the_official_model(cut, expected):
    model = RecallTransformer(7, dim=10, max_len=8)
    order = [model.embed.weight, model.position, model.unembed.weight]
    for block in model.blocks:
        attention, ff = block.attention, block.ff
        order += [attention.key.weight, attention.value.weight, attention.out.weight, ff.up.weight, ff.down.weight]
    with torch.no_grad():
        for k, weight in enumerate(order):
            weight.copy_(filled(weight.shape, k) * (1 if k < 2 else 0.4))
        with truncated(model, cut):
            found = model(torch.tensor([[1, 5, 2, 6, 3, 5, 0, 4]]))[0, -1]
    assert found.tolist() == pytest.approx(expected, abs=2e-4)


def test_attention_weights_are_those_of_the_forward():
    torch.manual_seed(0)
    model = RecallTransformer(11, dim=8, max_len=9)
    tokens = torch.randint(0, 11, (2, 9))
    h = model.embedded(tokens)
    for block, weights in zip(model.blocks, model.attention_weights(tokens), strict=True):
        assert torch.allclose(block.attention(h), block.attention.out(weights @ block.attention.value(h)), atol=1e-5)
        h = block(h)


def test_a_block_without_residual_passes_attention_alone():
    torch.manual_seed(0)
    model = RecallTransformer(11, dim=8, max_len=9, ffn=(None, None))
    tokens = torch.randint(0, 11, (1, 9))
    h = model.blocks[0](model.embedded(tokens))
    model.blocks[1].residual = False
    assert torch.allclose(model(tokens), model.unembed(model.blocks[1].attention(h)), atol=1e-6)


def test_what_is_trained_and_what_users_of_modules_expect():
    torch.manual_seed(0)
    model = RecallTransformer(11, dim=8, max_len=9)
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all(name.startswith("blocks.") for name in names)
    assert len(names) == 10
    assert all(p.requires_grad for p in RecallTransformer(11, dim=8, max_len=9, freeze_embeddings=False).parameters())
    other = RecallTransformer(11, dim=8, max_len=9)
    other.load_state_dict(model.state_dict())
    tokens = torch.randint(0, 11, (2, 7))
    assert torch.equal(other(tokens), model(tokens))
    assert torch.equal(copy.deepcopy(model)(tokens), model(tokens))
    for wrong in ({"vocab": 1}, {"vocab": 5, "dim": 0}, {"vocab": 5, "ffn": ("mlp",)}, {"vocab": 5, "ffn": ("mlp", "gelu")}):
        with pytest.raises(ValueError, match="must be"):
            RecallTransformer(**wrong)
    with pytest.raises(ValueError, match="at most 9"):
        model(torch.zeros(1, 10, dtype=torch.long))


# -- metrics and training -----------------------------------------------------------------------------------------------


def hand_batch():
    """Trigger 4, answer 1, noise 2: recall positions are 2 (noise follows) and 4 (the answer follows)."""
    tokens = torch.tensor([[4, 1, 4, 2, 4, 1]])
    return RecallBatch(tokens, occurrences(tokens[:, :-1], torch.tensor([[4]])), torch.tensor([[1]]), torch.tensor([[4]]), 2)


def test_metrics_by_hand():
    batch = hand_batch()
    assert batch.recall.tolist() == [[False, False, True, False, True]]
    p = torch.full((1, 5, 5), 0.2)
    p[0, 2] = torch.tensor([0.1, 0.6, 0.2, 0.05, 0.05])
    p[0, 4] = torch.tensor([0.1, 0.3, 0.4, 0.1, 0.1])
    found = recall_metrics(p.log(), batch)
    expected = {"p_noise": 0.3, "p_answer": 0.45, "accuracy": 0.5, "loss": -float(np.log(0.2) + np.log(0.3)) / 2}
    assert found == pytest.approx(expected, abs=1e-6)


def test_answers_that_are_noise_or_the_trigger_are_left_out_of_the_probabilities():
    batch = hand_batch()
    for answer in (2, 4):
        other = RecallBatch(batch.tokens, batch.occurrence, torch.tensor([[answer]]), batch.triggers, 2)
        assert other.recall.any()
        assert not other.distinct.any()
        with pytest.raises(ValueError, match="neither the trigger nor the noise"):
            recall_metrics(torch.zeros(1, 5, 5), other)


def test_the_loss_ignores_first_occurrences():
    batch = hand_batch()
    logits = torch.randn(1, 5, 5, requires_grad=True, generator=None)
    recall_loss(logits, batch).backward()
    assert (logits.grad.abs().sum(-1) > 0).tolist() == [[False, False, True, False, True]]
    single = RecallBatch(batch.tokens[:, :3], batch.occurrence[:, :2], batch.answer, batch.triggers, 2)
    with pytest.raises(ValueError, match="no trigger occurs twice"):
        recall_loss(torch.zeros(1, 2, 5), single)


@pytest.mark.slow
def test_the_noise_lives_in_the_last_feed_forward():
    """The paper's finding at the smallest size that shows it: one model, ablated, never two models compared."""
    torch.manual_seed(0)
    task = flat(16, seq_len=48)
    model = RecallTransformer(16, dim=64, max_len=48)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 3e-3)
    ablations = {"drop_F2": {"blocks.1.ff": 0.0}, "drop_F1": {"blocks.0.ff": 0.0}}
    history = train_recall(
        model, task, 220, optimizer, batch=48, eval_every=20, ablations=ablations, probes=True, generator=seeded()
    )
    end = history[-1]
    assert end["p_noise"] == pytest.approx(0.5, abs=0.15)
    assert end["drop_F2/p_noise"] < 0.5 * end["p_noise"]
    assert end["drop_F2/accuracy"] > end["accuracy"] + 0.2
    assert end["drop_F1/accuracy"] < end["accuracy"] + 0.05
    assert end["finds_answer"] > 0.8
    noise_first = next(e["step"] for e in history if e["p_noise"] > 0.35)
    answer_later = next(e["step"] for e in history if e["p_answer"] > 0.3)
    assert noise_first < answer_later


def test_training_is_reproducible_and_ablations_leave_it_alone():
    def run(ablations):
        torch.manual_seed(3)
        model = RecallTransformer(9, dim=8, max_len=20)
        history = train_recall(
            model, flat(9, seq_len=20), 6, batch=8, eval_every=2, ablations=ablations, generator=seeded()
        )  # fmt: skip
        return model, history

    plain, history = run(None)
    watched, seen = run({"cut": {"blocks.1.ff.up": 0.5, ("blocks.0.attention.out", "blocks.0.attention.value"): 0.2}})
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))
    assert [entry["step"] for entry in history] == [2, 4, 6]
    assert [entry["loss"] for entry in history] == [entry["loss"] for entry in seen]
    assert all(entry["cut/loss"] != entry["loss"] for entry in seen)


def test_probes_on_a_model_built_to_pass_them():
    torch.manual_seed(0)
    model = RecallTransformer(12, dim=96, max_len=24, ffn=(None, None)).double()
    task = flat(12, seq_len=24)
    batch = task.clean().sample(64, seeded())
    one, two = model.attentions()
    E, P, d = model.embed.weight, model.position, 96
    with torch.no_grad():
        E.copy_(torch.linalg.qr(torch.randn(d, d, dtype=torch.double)).Q[:12] * 10)
        P.copy_(torch.linalg.qr(torch.randn(d, d, dtype=torch.double)).Q[:24] * 10)
        one.key.weight.copy_(sum(torch.outer(P[t], P[t - 1]) for t in range(1, 24)))  # look at the token before
        one.value.weight.copy_(torch.eye(d))
        rotation = torch.linalg.qr(torch.randn(d, d, dtype=torch.double)).Q
        one.out.weight.copy_(rotation)
        two.key.weight.copy_(E.T @ E @ rotation.T)  # a token matches the copy of itself
        two.value.weight.copy_(torch.eye(d))
        two.out.weight.copy_(torch.eye(d))
        model.unembed.weight.copy_(E)
    found = recall_probes(model, batch)
    assert found["previous_token"] == 1
    assert found["key_memory"] == 1
    assert found["out_memory"] == 1
    assert found["finds_answer"] > 0.9


def test_a_run_that_diverges_stops():
    torch.manual_seed(0)
    model = RecallTransformer(9, dim=8, max_len=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e30)
    with pytest.raises(FloatingPointError, match="by step"):
        train_recall(model, flat(9, seq_len=20), 5, optimizer, batch=8)


def test_wrong_training_is_refused():
    model, task = RecallTransformer(9, dim=8, max_len=20), flat(9, seq_len=20)
    for settings, message in (
        ({"steps": 0}, "steps"),
        ({"steps": 1, "batch": 0}, "batch"),
        ({"steps": 1, "eval_every": 0}, "eval_every"),
    ):
        with pytest.raises(ValueError, match=message):
            train_recall(model, task, **settings)
    with pytest.raises(ValueError, match="RecallTransformer"):
        train_recall(torch.nn.Linear(2, 2), task, 1, probes=True)
    with pytest.raises(ValueError, match="at most 20"):
        train_recall(model, flat(9, seq_len=21), 1)
    with pytest.raises(ValueError, match="matches no weight"):
        evaluate_recall(model, task.sample(8, seeded()), {"blocks.2.ff": 0.0})


# -- one gradient step --------------------------------------------------------------------------------------------------


def test_margins_are_those_of_autograd():
    """One step of gradient descent on both matrices from zero, on the batches that the tool draws."""
    task = flat(10, seq_len=30)
    found = gradient_margins(task, 40, batches=2, generator=seeded())
    generator, margins = seeded(), {"ff": [], "attn": []}
    for _ in range(2):
        batch, other = task.sample(40, generator), task.sample(40, generator)
        y, phi = last_recall(batch, 10)
        _, fresh = last_recall(other, 10)
        x = F.one_hot(task.triggers, 10).double().expand(len(y), 10)
        W_V, W_F = (torch.zeros(10, 10, dtype=torch.double, requires_grad=True) for _ in range(2))
        F.cross_entropy(phi @ W_V.T + x @ W_F.T, y).backward()
        for name, logits in (("ff", -x[:1] @ W_F.grad.T), ("attn", -fresh @ W_V.grad.T)):
            others = torch.arange(10) != 2
            margins[name].append((logits[:, 2:3] - logits[:, others]).mean(0))
    for name, rows in margins.items():
        rows = torch.stack(rows)
        assert found[name].mean == pytest.approx(float(rows.mean()), abs=1e-12)
        assert found[name].std == pytest.approx(float(rows.var(0).mean().sqrt()), abs=1e-12)


def test_margins_have_the_means_that_theory_gives():
    n, alpha = 50, 0.5
    found = gradient_margins(flat(n, seq_len=96, alpha=alpha), 512, batches=24, generator=seeded())
    assert found["ff"].mean == pytest.approx(alpha, abs=0.02)
    assert 1 / n * alpha < found["attn"].mean < 1.3 / n * alpha  # Σπ² and the trigger, the noise, the answer above it
    # the feed-forward margin is a mean of independent variables of variance about α(1 - α), one a sequence with a recall
    effective = len(last_recall(flat(n, seq_len=96).sample(512, seeded()), n)[0])
    assert found["ff"].std == pytest.approx((alpha * (1 - alpha) / effective) ** 0.5, rel=0.35)
    few = gradient_margins(flat(n, seq_len=96, alpha=alpha), 32, batches=24, generator=seeded())
    assert few["ff"].std == pytest.approx(4 * found["ff"].std, rel=0.35)


def test_contexts_end_at_the_last_recall_position():
    y, phi = last_recall(hand_batch(), 5)
    assert y.tolist() == [1]
    assert torch.allclose(phi, torch.tensor([[0, 0.2, 0.2, 0, 0.6]], dtype=torch.double))
    with pytest.raises(ValueError, match="trigger occurs twice"):
        gradient_margins(flat(40, seq_len=2), 1, generator=seeded())
    for settings, message in (({"m": 0}, "m must"), ({"m": 4, "batches": 1}, "batches")):
        with pytest.raises(ValueError, match=message):
            gradient_margins(flat(5), **settings)
