"""Influence under torch forecasters and under regressors without gradients."""

import copy
import pickle

import numpy as np
import pytest
import torch
from sklearn.ensemble import GradientBoostingRegressor
from sklearn.linear_model import LinearRegression
from sklearn.neighbors import KNeighborsRegressor
from torch import nn

from assay.explain import TimeInf
from assay.explain.timeinf.blackbox import TorchAttribution, conjugate_gradients
from assay.explain.timeinf.blocks import Blocks


def wave(T=200, D=1, seed=0):
    rng = np.random.default_rng(seed)
    return np.sin(np.arange(T)[:, None] / (3 + np.arange(D))) + 0.3 * rng.normal(size=(T, D))


class Flat(nn.Module):
    """Linear autoregression in torch."""

    def __init__(self, m, D):
        super().__init__()
        self.linear = nn.Linear(m * D, D, dtype=torch.float64)

    def forward(self, x):
        return self.linear(x.flatten(1))


class Recurrent(nn.Module):
    def __init__(self, cell=nn.LSTM, hidden=3, dtype=torch.float64, D=1):
        super().__init__()
        self.cell = cell(D, hidden, batch_first=True, dtype=dtype)
        self.head = nn.Linear(hidden, D, dtype=dtype)

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])


class Perceptron(nn.Module):
    def __init__(self, m, D=1, hidden=5):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(m * D, hidden), nn.Tanh(), nn.BatchNorm1d(hidden), nn.Dropout(), nn.Linear(hidden, D)
        ).double()

    def forward(self, x):
        return self.layers(x)


def least_squares(m, D, z):
    module = Flat(m, D)
    X = np.stack([z[b : b + m].ravel() for b in range(len(z) - m)])
    fit = LinearRegression().fit(X, z[m:])
    with torch.no_grad():
        module.linear.weight.copy_(torch.tensor(fit.coef_))
        module.linear.bias.copy_(torch.tensor(fit.intercept_))
    return module


@pytest.mark.parametrize("hessian", ["dense", "cg", "exact"])
@pytest.mark.parametrize("D", [1, 2])
def test_a_linear_module_gives_the_closed_form(hessian, D):
    z, held = wave(D=D), wave(80, D, seed=1)
    z = (z - z.mean(0)) / z.std(0)  # both then work in the same units
    black = TimeInf(4, least_squares(4, D, z), hessian=hessian, damping=0.0).fit(z)
    closed = TimeInf(4).fit(z)
    np.testing.assert_allclose(black.self_influence(), closed.self_influence(), rtol=1e-6)
    np.testing.assert_allclose(black.influence_on(held), closed.influence_on(held), rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(black.score_samples(held), closed.score_samples(held), rtol=1e-6)


@pytest.mark.parametrize(
    "module", [Perceptron(4), Recurrent(), Recurrent(nn.GRU), Recurrent(nn.RNN)], ids=lambda m: type(m).__name__
)
def test_per_block_gradients_by_a_loop(module):
    """The definition: one backward pass a block, Gauss-Newton from per-block Jacobians, one solve."""
    z = wave(60)
    if isinstance(module, Perceptron):
        module.train()(torch.randn(64, 4, 1, dtype=torch.float64))  # running statistics that are not the default
    detector = TimeInf(4, module, damping=0.05, ridge=0.01).fit(z)
    frozen = copy.deepcopy(module).eval()
    rows, residuals = [], []
    for b in range(56):
        out = frozen(torch.tensor(z[None, b : b + 4]))
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(out[0, 0], list(frozen.parameters()))]).numpy())
        residuals.append(z[b + 4, 0] - out.item())
    J, r = np.array(rows), np.array(residuals)
    H = J.T @ J / 56 + 0.06 * np.eye(J.shape[1])
    pairs = (J * r[:, None]) @ np.linalg.solve(H, (J * r[:, None]).T) / 56
    np.testing.assert_allclose(detector.self_influence("block"), np.diag(pairs), rtol=1e-8)
    np.testing.assert_allclose(detector.influence_on(z), pairs.mean(1), rtol=1e-7, atol=1e-13)


def test_conjugate_gradients_agree_with_the_factorisation_and_warn_when_they_stop_early():
    module = Recurrent(hidden=4, D=2)
    dense, iterated = (TimeInf(5, module, hessian=h, damping=0.1).fit(wave(90, 2)) for h in ("dense", "cg"))
    np.testing.assert_allclose(iterated.self_influence(), dense.self_influence(), rtol=1e-6)
    H = torch.diag(torch.logspace(-14, 0, 400, dtype=torch.float64))
    with pytest.warns(UserWarning, match="conjugate gradients stopped after 100 steps"):
        conjugate_gradients(lambda V: H @ V, torch.ones(400, 2, dtype=torch.float64))
    assert (conjugate_gradients(lambda V: H @ V, torch.zeros(400, 1, dtype=torch.float64)) == 0).all()


def test_the_exact_hessian_is_that_of_autograd():
    torch.manual_seed(0)
    module, z = Recurrent(hidden=2), wave(40)
    attribution = TorchAttribution(module, Blocks([z], 4), ridge=0.0, damping=5.0, hessian="exact")
    lags = torch.tensor(np.stack([z[b : b + 4] for b in range(36)]))
    names, shapes = zip(*((k, v.shape) for k, v in module.named_parameters()), strict=True)
    flat = torch.cat([v.detach().flatten() for v in module.parameters()])

    def loss(theta):
        parts = theta.split([s.numel() for s in shapes])
        values = {k: p.view(s) for k, p, s in zip(names, parts, shapes, strict=True)}
        out = torch.func.functional_call(module, values, (lags,))
        return 0.5 * (torch.tensor(z[4:]) - out).square().sum() / 36

    H = torch.autograd.functional.hessian(loss, flat) + 5.0 * torch.eye(len(flat), dtype=torch.float64)
    factor = attribution._cholesky
    torch.testing.assert_close(factor @ factor.T, H, rtol=1e-8, atol=1e-10)
    with pytest.raises(ValueError, match=r"not positive definite.*damping"):
        TimeInf(4, module, hessian="exact", damping=0.0).fit(z)


def test_chunked_jacobians_and_float32():
    z = wave(150)
    module = Recurrent(dtype=torch.float32)
    single = TimeInf(6, module, damping=0.01).fit(z).self_influence()
    double = TimeInf(6, copy.deepcopy(module).double(), damping=0.01).fit(z).self_influence()
    np.testing.assert_allclose(single, double, rtol=1e-3, atol=1e-6)


def test_fitting_trains_a_copy_and_is_seeded():
    torch.manual_seed(0)
    z, module = wave(300), Recurrent(hidden=4)
    before = copy.deepcopy(module.state_dict())
    fitted = [TimeInf(5, module, fit_params={"epochs": 3, "lr": 1e-2}, random_state=s).fit(z) for s in (0, 0, 1)]
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    np.testing.assert_array_equal(fitted[0].decision_scores_, fitted[1].decision_scores_)
    assert not np.array_equal(fitted[0].decision_scores_, fitted[2].decision_scores_)

    def mse(detector):
        x = torch.tensor(np.stack([z[b : b + 5] for b in range(295)]) - detector.mean_) / torch.tensor(detector.scale_)
        with torch.no_grad():
            out = detector.attribution_.module(x) * torch.tensor(detector.scale_) + torch.tensor(detector.mean_)
        return (out.numpy() - z[5:]).var()

    assert mse(fitted[0]) < mse(TimeInf(5, module, standardize=True).fit(z))
    twin = pickle.loads(pickle.dumps(fitted[0]))
    np.testing.assert_array_equal(twin.predict(z), fitted[0].predict(z))


def test_a_fitted_module_keeps_its_own_units():
    z = 50 + 10 * wave(200)
    detector = TimeInf(4, least_squares(4, 1, z), damping=0.0).fit(z)
    assert detector.mean_ == 0
    assert detector.scale_ == 1
    closed = TimeInf(4).fit(z)
    np.testing.assert_allclose(detector.self_influence() / closed.self_influence(), z.var(), rtol=1e-6)


class Wrong(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 1).double()

    def forward(self, x):
        out = self.linear(x.flatten(1))
        return {"detached": out.detach(), "shape": out[:, 0], "nan": out * float("nan"), "tuple": (out,)}[self.kind]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Wrong("detached"), "not differentiable"),
        (Wrong("shape"), r"forecasts \(2, 1\), it returned \(2,\)"),
        (Wrong("tuple"), "it returned tuple"),
        (Wrong("nan"), "not finite"),
        (nn.Flatten(), "no parameter"),
    ],
)
def test_bad_modules_are_named(module, message):
    with pytest.raises(ValueError, match=message):
        TimeInf(4, module).fit(wave(60))


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match="fit_params knows"):
        TimeInf(4, Flat(4, 1), fit_params={"epoch": 3}).fit(wave(60))
    with pytest.raises(ValueError, match="mode='loo' is exact for model='linear' only"):
        TimeInf(4, Flat(4, 1), mode="loo").fit(wave(60))


@pytest.mark.parametrize("D", [1, 2])
def test_subsets_by_brute_force(D):
    z, held = wave(60, D), wave(30, D, seed=1)
    detector = TimeInf(3, KNeighborsRegressor(3), n_subsets=12, random_state=0).fit(z)
    inside, models = detector.attribution_.inside, detector.attribution_.models

    def losses(series):
        series = (series - detector.mean_) / detector.scale_
        X = np.stack([series[b : b + 3].ravel() for b in range(len(series) - 3)])
        return np.array([0.5 * np.square(series[3:] - m.predict(X).reshape(-1, D)).sum(1) for m in models])

    own, other = losses(z), losses(held).mean(1)
    for b in range(57):
        seen = inside[:, b]
        expected = np.nan if seen.all() or not seen.any() else own[~seen, b].mean() - own[seen, b].mean()
        assert detector.self_influence("block")[b] == pytest.approx(expected, nan_ok=True)
        value = np.nan if seen.all() or not seen.any() else other[~seen].mean() - other[seen].mean()
        assert detector.influence_on(held)[b] == pytest.approx(value, nan_ok=True, abs=1e-12)


def test_a_block_without_estimate_is_not_counted():
    detector = TimeInf(3, LinearRegression(), n_subsets=2, random_state=0).fit(wave(60))
    block = detector.self_influence("block")
    assert np.isnan(block).any()
    t = 30
    assert detector.self_influence()[t] == pytest.approx(np.nanmean(block[t - 3 : t + 1]), nan_ok=True)


def test_share_of_draws_that_hold_a_block():
    inside = (
        TimeInf(3, LinearRegression(), n_subsets=100, subset_fraction=0.7, random_state=0).fit(wave(400)).attribution_.inside
    )
    assert inside.mean() == pytest.approx(1 - np.exp(-0.7), abs=0.01)


def test_subsets_approach_the_closed_form_on_a_linear_model():
    """Leaving blocks out of half the draws ranks them as the first-order formula does."""
    from scipy.stats import spearmanr

    z = wave(300)
    z[150] += 6
    many = TimeInf(4, LinearRegression(), n_subsets=400, random_state=0).fit(z)
    assert spearmanr(many.self_influence(), TimeInf(4).fit(z).self_influence())[0] > 0.6
    assert abs(int(np.argmax(many.self_influence())) - 150) <= 4


def test_gradient_free_scores_belong_to_the_training_series():
    z = wave(150)
    detector = TimeInf(5, GradientBoostingRegressor(n_estimators=5), n_subsets=10, random_state=0)
    flags = detector.fit_predict(z)
    np.testing.assert_array_equal(detector.predict(z), flags)
    again = TimeInf(5, GradientBoostingRegressor(n_estimators=5), n_subsets=10, random_state=0).fit(z)
    np.testing.assert_array_equal(again.decision_scores_, detector.decision_scores_)
    with pytest.raises(ValueError, match="fit the new series, or use influence_on"):
        detector.predict(wave(80, seed=2))
    with pytest.raises(ValueError, match="subset_fraction"):
        TimeInf(5, LinearRegression(), subset_fraction=0.01).fit(z)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_same_numbers():
    z = wave(200)
    for module in (Recurrent(), Perceptron(5)):
        here = TimeInf(5, copy.deepcopy(module), damping=0.01).fit(z)
        there = TimeInf(5, copy.deepcopy(module).cuda(), damping=0.01).fit(z)
        np.testing.assert_allclose(there.self_influence(), here.self_influence(), rtol=1e-6)
        np.testing.assert_allclose(there.influence_on(z), here.influence_on(z), rtol=1e-6, atol=1e-12)
