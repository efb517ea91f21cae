"""The rivals that SOAP's study measures it by, and the pieces of the study that compute something."""

import copy

import pytest
import torch
from torch import nn

from assay.optim import SOAP
from assay.optim.soap import study
from assay.optim.soap.byte_lm import ByteLM
from assay.optim.soap.rivals import FrozenSecondMoment, Shampoo, UnsortedSecondMoment, inverse_root


def run(kind, steps, shape=(4, 4), scale=lambda step: 1.0, **options):
    p = nn.Parameter(torch.ones(shape, dtype=torch.float64))
    optimizer = kind([p], lr=0.01, **options)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        p.grad = scale(step) * torch.randn(shape, generator=generator, dtype=torch.float64)
        optimizer.step()
    return p.detach(), optimizer


def test_a_frozen_second_moment_is_live_until_the_first_refresh():
    for steps, same in ((6, True), (7, False)):  # the first call measures, the sixth after it uses the frozen copy
        frozen, _ = run(FrozenSecondMoment, steps, precondition_frequency=5)
        whole, _ = run(SOAP, steps, precondition_frequency=5)
        assert torch.equal(frozen, whole) is same


def test_a_frozen_second_moment_does_not_see_that_gradients_grew():
    """Gradients a thousand times larger after the refresh: SOAP's step stays of order lr, the frozen one's does not."""
    moves = {}
    for kind in (SOAP, FrozenSecondMoment):
        before, _ = run(kind, 6, precondition_frequency=5)
        after, optimizer = run(kind, 7, scale=lambda step: 1e3 if step == 6 else 1.0, precondition_frequency=5)
        moves[kind] = (after - before).abs().max()
        (state,) = optimizer.state.values()
        assert state["exp_avg_sq"].max() > 1e3  # it goes on tracking either way
    assert moves[SOAP] < 0.1
    assert moves[FrozenSecondMoment] > 10 * moves[SOAP]


def test_an_unsorted_second_moment_differs_by_the_permutation_only():
    whole, unsorted = (run(kind, 4, shape=(6, 6), precondition_frequency=3)[1] for kind in (SOAP, UnsortedSecondMoment))
    (a,), (b,) = whole.state.values(), unsorted.state.values()
    assert torch.equal(a["bases"][0], b["bases"][0])
    assert not torch.equal(a["exp_avg_sq"], b["exp_avg_sq"])
    assert torch.equal(a["exp_avg_sq"].flatten().sort().values, b["exp_avg_sq"].flatten().sort().values)


@pytest.mark.parametrize("exponent", [0.25, 0.5, 1.0])
def test_inverse_root_undoes_the_power(exponent):
    A = torch.randn(2, 5, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    S = A @ A.mT
    root = inverse_root(S, exponent)
    power = torch.linalg.matrix_power(root, round(1 / exponent))
    torch.testing.assert_close(power @ S, torch.eye(5, dtype=torch.float64).expand(2, 5, 5), rtol=0, atol=1e-5)


@pytest.mark.parametrize("exponent", [0.25, 0.5])
def test_shampoos_step_has_its_own_direction_and_adams_length(exponent):
    """One step from zero: direction L^-p G R^-p, which for p=1/4 is the polar factor; Adam's first step is lr · sign(G)."""
    G = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))
    p.grad = G
    Shampoo([p], lr=0.1, eps=1e-30, weight_decay=0.0, exponent=exponent).step()
    U, s, Wt = torch.linalg.svd(G)
    direction = (U * s ** (1 - 4 * exponent)) @ Wt
    torch.testing.assert_close(p.detach(), -0.1 * 4 * direction / direction.norm(), rtol=1e-5, atol=1e-7)


def test_shampoo_leaves_vectors_to_adamw():
    ours, _ = run(Shampoo, 9, shape=(5,), weight_decay=0.1)
    theirs, _ = run(torch.optim.AdamW, 9, shape=(5,), weight_decay=0.1, betas=(0.95, 0.95))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


def test_hidden_matrices_are_neither_embeddings_nor_the_head():
    model = ByteLM(vocabulary=11, width=8, layers=2, heads=2, context=4)
    hidden = study.hidden_matrices(model)
    assert len(hidden) == 12
    assert all(p is not model.head.weight and p is not model.symbols.weight for p in hidden)
    matrices, rest = study.muon(model, study.study.scale("smoke"))
    assert sum(len(o.param_groups[0]["params"]) for o in (matrices, rest)) == len(list(model.parameters()))


def test_the_network_does_not_look_ahead():
    model = ByteLM(vocabulary=11, width=8, layers=2, heads=2, context=6)
    ids = torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    a, b = model(ids), model(changed)
    torch.testing.assert_close(a[:, :4], b[:, :4])
    assert not torch.allclose(a[:, 4:], b[:, 4:])
    with pytest.raises(ValueError, match="heads must divide width, got 3 heads and width 8"):
        ByteLM(vocabulary=11, width=8, layers=1, heads=3, context=4)


def test_the_schedule_rises_and_falls_to_a_tenth():
    values = [study.warmup_then_cosine(step, steps=100, warmup=0.1) for step in range(101)]
    assert values.index(max(values)) == 10
    assert values[10] == pytest.approx(1)
    assert values[100] == pytest.approx(0.1)
    assert values[:11] == sorted(values[:11])
    assert values[10:] == sorted(values[10:], reverse=True)


def test_own_text_and_too_little_of_it(tmp_path):
    config = study.study.scale("smoke")
    notes = tmp_path / "notes.txt"
    notes.write_text("Größe und Maß. " * 60, encoding="utf-8")
    case = study.text_case(config.model_copy(update={"corpus": str(notes)}))
    assert torch.isfinite(case.loss(copy.deepcopy(case.model), case.batches[0]))
    assert len(torch.cat(case.validation)) == config.windows
    notes.write_text("too short")
    with pytest.raises(ValueError, match="has 9 bytes; it takes at least 340"):
        study.text_case(config.model_copy(update={"corpus": str(notes)}))


def test_training_and_validation_text_do_not_overlap(tmp_path):
    """Each byte of the corpus names the tenth it lies in: validation holds the last only, training the others."""
    config = study.study.scale("smoke").model_copy(update={"steps": 200, "corpus": str(tmp_path / "tenths.txt")})
    (tmp_path / "tenths.txt").write_text("".join(str(i) * 500 for i in range(10)))
    case = study.text_case(config)
    assert torch.cat(case.validation).unique().tolist() == [9]
    assert torch.cat(case.batches).unique().tolist() == list(range(9))
