"""Torch forecasters that vmap cannot run, self-influence by conjugate gradients, and what stays fixed after fit."""

import copy
import warnings

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression
from torch import nn

from assay.explain import TimeInf
from assay.explain.timeinf import blackbox
from assay.explain.timeinf.blackbox import train
from assay.explain.timeinf.blocks import Blocks
from assay.explain.timeinf.forecaster import Forecaster


def wave(T=120, D=1, seed=0):
    rng = np.random.default_rng(seed)
    return np.sin(np.arange(T)[:, None] / (3 + np.arange(D))) + 0.3 * rng.normal(size=(T, D))


def perceptron(m=4, D=1, hidden=5):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(m * D, hidden), nn.Tanh(), nn.Linear(hidden, D)).double()


class Cell(nn.Module):
    """A recurrent cell stepped by hand: vmap has no rule for the state it makes for itself."""

    def __init__(self, cell=nn.LSTMCell, D=1):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = cell(D, 3).double(), nn.Linear(3, D).double()

    def forward(self, x):
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class Branch(nn.Module):
    """One of two forecasters, by the sign of the lags it is given together."""

    def __init__(self, D=1):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4 * D, D).double(), nn.Linear(4 * D, D).double()

    def forward(self, x):
        x = x.flatten(1)
        return self.up(x) if x.mean() > 0 else self.down(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = nn.RNN(1, 3, batch_first=True).double(), nn.Linear(3, 1).double()

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])


class Mixing(Recurrent):
    """Centred by the other blocks of the batch; recurrent, so that vmap, which would hide that, is not tried."""

    def forward(self, x):
        return super().forward(x) + (x[:, -1] - x[:, -1].mean(0))


def by_definition(module, z, damping):
    """Self-influence of blocks from one backward pass a block and channel, each block alone in its batch."""
    frozen, n, D = copy.deepcopy(module).eval(), len(z) - 4, z.shape[1]
    J, r = [], []
    for b in range(n):
        out = frozen(torch.tensor(z[None, b : b + 4]))[0]
        for d in range(D):
            rows = torch.autograd.grad(
                out[d], list(frozen.parameters()), retain_graph=True, allow_unused=True, materialize_grads=True
            )
            J.append(torch.cat([row.flatten() for row in rows]).numpy())
        r.append(z[b + 4] - out.detach().numpy())
    J = np.array(J).reshape(n, D, -1)
    g = np.einsum("bdp,bd->bp", J, np.array(r))
    H = np.einsum("bdp,bdq->pq", J, J) / n + damping * np.eye(J.shape[2])
    return np.einsum("bp,bp->b", g, np.linalg.solve(H, g.T).T) / n


@pytest.mark.parametrize("D", [1, 2])
@pytest.mark.parametrize(
    ("make", "way", "reason"),
    [
        (lambda D: Cell(nn.LSTMCell, D), "batched", "vmap cannot run this model.*over 16 blocks"),
        (lambda D: Cell(nn.GRUCell, D), "batched", "vmap cannot run this model.*over 16 blocks"),
        (Branch, "looped", r"vmap cannot run this model.*\.item\(\).*a backward pass a block"),
    ],
    ids=["lstm-cell", "gru-cell", "branch"],
)
def test_what_vmap_cannot_run_falls_back_with_one_warning(make, way, reason, D):
    module, z = make(D), wave(60, D)
    with pytest.warns(UserWarning, match=reason) as caught:
        detector = TimeInf(4, module, damping=0.05).fit(z)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = detector.self_influence("block")
        detector.influence_on(z)
    assert detector.attribution_.forecaster.way == way
    np.testing.assert_allclose(values, by_definition(module, z, 0.05), rtol=1e-8)


def test_a_forecast_that_depends_on_its_batch_is_taken_block_by_block():
    module, z = Mixing(), wave(60)
    with pytest.warns(UserWarning, match="changes with the other blocks of its batch"):
        detector = TimeInf(4, module, damping=0.05).fit(z)
    np.testing.assert_allclose(detector.self_influence("block"), by_definition(module, z, 0.05), rtol=1e-8)


@pytest.mark.parametrize("D", [1, 2])
def test_all_ways_give_the_same_jacobians(D):
    blocks = Blocks([wave(70, D)], 4)
    found = {}
    for way in ("vmap", "batched", "looped"):
        forecaster = Forecaster(perceptron(D=D), blocks, double=False)
        assert forecaster.way == "vmap"
        forecaster.way = way
        chunks = list(forecaster.jacobians(blocks))
        assert [where.stop for where, _, _ in chunks][-1] == blocks.n
        found[way] = [torch.cat(parts) for parts in list(zip(*chunks, strict=True))[1:]]
    for way in ("batched", "looped"):
        for ours, reference in zip(found[way], found["vmap"], strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-13)


def test_what_vmap_can_run_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = TimeInf(4, perceptron()).fit(wave()).self_influence()
    assert np.isfinite(values).all()


@pytest.mark.parametrize("columns", [13, 50, 116])
def test_batches_of_conjugate_gradients_agree_with_the_factor(monkeypatch, columns):
    module, z = perceptron(), wave()
    size = sum(p.numel() for p in module.parameters())
    dense = TimeInf(4, module, hessian="dense", damping=0.05).fit(z)
    iterated = TimeInf(4, module, hessian="cg", damping=0.05).fit(z)
    widths = []
    solve = blackbox.conjugate_gradients
    monkeypatch.setattr(blackbox, "conjugate_gradients", lambda product, V: widths.append(V.shape[1]) or solve(product, V))
    monkeypatch.setattr(blackbox, "SOLVED", columns * size)
    if columns < 116:
        with pytest.warns(UserWarning, match=rf"{-(-116 // columns)} batches of {columns} solves.*hessian='dense'"):
            values = iterated.self_influence("block")
    else:
        values = iterated.self_influence("block")
    assert widths == [columns] * (116 // columns) + [116 % columns] * (116 % columns > 0)  # never more at once
    np.testing.assert_allclose(values, dense.self_influence("block"), rtol=1e-6)


def test_above_the_dense_limit_the_small_chunks_of_a_recurrent_layer_are_solved_together(monkeypatch):
    """Chunks of 16 blocks are right for its backward pass; a solve for each 16 would repeat the passes over all blocks."""
    module, z = Recurrent(), wave()
    monkeypatch.setattr(blackbox, "DENSE_LIMIT", 3)
    detector = TimeInf(4, module, damping=0.05).fit(z)
    assert detector.attribution_.forecaster.way == "batched"
    assert not detector.attribution_.dense
    passes, jacobians = [], Forecaster.jacobians
    monkeypatch.setattr(Forecaster, "jacobians", lambda self, blocks: passes.append(1) or jacobians(self, blocks))
    values = detector.self_influence("block")
    assert len(passes) <= 1 + blackbox.CG_STEPS  # one batch: its gradients, and a pass an iteration
    np.testing.assert_allclose(values, by_definition(module, z, 0.05), rtol=1e-6)


@pytest.mark.parametrize("model", ["linear", "torch", "regressor"])
def test_changes_after_fit_wait_for_the_next_fit(model):
    z, held = wave(), wave(60, seed=1)
    module = {"linear": "linear", "torch": perceptron(), "regressor": LinearRegression()}[model]
    settings = {"n_subsets": 20, "random_state": 0, "contamination": 0.1}
    untouched = TimeInf(4, copy.deepcopy(module), **settings).fit(z.copy())
    detector = TimeInf(4, module, **settings).fit(z)
    detector.set_params(
        block_length=9, membership="lags", scaling="paper", contamination=0.3, mode="loo", ridge=5.0, damping=9.0
    )
    if model == "torch":
        with torch.no_grad():
            for p in module.parameters():
                p.zero_()
    original = z.copy()
    z[:] = 0.0  # nothing has been computed from the fit yet
    np.testing.assert_array_equal(detector.decision_scores_, untouched.decision_scores_)
    np.testing.assert_array_equal(detector.predict(original), untouched.predict(original))
    np.testing.assert_array_equal(detector.influence_on(held), untouched.influence_on(held))
    assert detector.threshold_ == untouched.threshold_
    assert detector.contamination_ == 0.1
    if model != "regressor":
        np.testing.assert_array_equal(detector.predict(held), untouched.predict(held))
    detector.set_params(mode="first_order", block_length=4, membership="all")
    if model != "torch":  # the module takes four lags and no other number
        detector.set_params(block_length=9)
    detector.fit(original)
    assert detector.coverage_.max() == 1 + detector.block_length
    assert detector.contamination_ == 0.3


def test_imputing_is_decided_at_fit():
    z = wave()
    detector = TimeInf(4).fit(z).set_params(impute="linear")
    z[5] = np.nan
    with pytest.raises(ValueError, match="1 NaN"):
        detector.score_samples(z)


@pytest.mark.parametrize("settings", [{}, {"scaling": "paper"}, {"contamination": 0.1}], ids=str)
def test_no_finite_score_is_an_error_that_names_the_series(settings):
    settings |= {"n_subsets": 2, "subset_fraction": 1.0, "random_state": 1}
    detector = TimeInf(1, LinearRegression(), **settings).fit(wave(4))  # both draws hold the same two of the three blocks
    assert np.isnan(detector.score_samples()).all()
    for ask in (detector.predict, detector.decision_function, lambda: detector.threshold_, lambda: detector.labels_):
        with pytest.raises(
            ValueError, match=r"none of the 4 time points of the X that was fitted has a finite score.*n_subsets"
        ):
            ask()


@pytest.mark.parametrize("ridge", [0.0, 1e-2])
def test_training_is_that_of_the_optimizer_class(ridge):
    z, module = wave(), perceptron()
    blocks = Blocks([z], 4)
    ours = train(module, blocks, ridge=ridge, seed=3, epochs=3, lr=1e-2)
    peer = copy.deepcopy(module).train()
    ((_, lags, targets),) = blocks.chunks(blocks.n)
    X, Y = torch.tensor(lags)[:, :, None], torch.tensor(targets)
    optimizer = torch.optim.Adam(peer.parameters(), lr=1e-2, weight_decay=ridge)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        for rows in torch.randperm(len(X), generator=generator).split(32):
            optimizer.zero_grad()
            (0.5 * (Y[rows] - peer(X[rows])).square().sum(1).mean()).backward()
            optimizer.step()
    for a, b in zip(ours.parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
