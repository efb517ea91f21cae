"""The mathematics of mean-field Langevin dynamics: gradients, geometry, temperature, the effective dimension."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import beta as beta_law
from scipy.stats import kstest, norm

from assay.optim import (
    MeanFieldLangevin,
    MeanFieldLangevinRegressor,
    MeanFieldNet,
    Sphere,
    effective_dimension,
    estimate_effective_dimension,
)
from assay.optim.mean_field_langevin import closed_form
from assay.optim.mean_field_langevin.activation import Activation
from assay.optim.mean_field_langevin.closed_form import ClosedForm, largest_eigenvalue
from assay.optim.mean_field_langevin.losses import LOGISTIC, PSEUDO_HUBER, SOFTMAX, SQUARED


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


# -- activations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["smooth_relu", "relu", "tanh", torch.sin])
@pytest.mark.parametrize("iota", [10.0, 0.7, math.inf])
def test_value_and_slope_are_those_of_automatic_differentiation(kind, iota):
    phi = Activation(kind, iota=iota)
    z = (3 * randn(400)).requires_grad_()
    value, slope = phi.with_slope(z.detach())
    expected = phi(z)
    torch.testing.assert_close(value, expected.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(slope, torch.autograd.grad(expected.sum(), z)[0], rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(phi, randn(5, seed=1).requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_smooth_relu_keeps_its_bounds_and_turns_into_relu(dtype):
    z = torch.linspace(-30, 30, 2001, dtype=dtype)
    value, slope = Activation(kappa=5, iota=10).with_slope(z)
    rounding = 50 * torch.finfo(dtype).eps
    assert value.min() >= -rounding
    assert value.max() <= 10 + rounding
    assert slope.min() >= -rounding
    assert slope.max() <= 1 + rounding
    assert (slope.diff() / z.diff()).abs().max() <= 5  # |φ''| ≤ κ
    sharp = Activation(kappa=1e4, iota=1e3)(z)
    torch.testing.assert_close(sharp, z.relu(), rtol=0, atol=1e-4)
    assert Activation(iota=4.0)(torch.tensor(50.0)).item() == pytest.approx(4)


def test_a_slope_is_memory_of_its_own():
    """The derivative of z ↦ z is one number that all elements share, until it is copied."""
    form, W, x, y = ClosedForm(Activation(torch.nn.Identity()), 4.0), randn(1, 6, 2, 5), randn(9, 5), randn(9, seed=2)
    drift = form.drift(W, x, y, torch.full((9,), 1 / 9, dtype=torch.float64), SQUARED)[1]
    linear = 4 * (W[0, :, 0] - W[0, :, 1]).mean(0)
    torch.testing.assert_close(drift[0, 0, 0], 4 * ((x @ linear - y) @ x / 9))
    for kappa in (math.inf, math.nan, "sharp"):
        with pytest.raises(ValueError, match="kappa must be positive and finite"):
            Activation(kappa=kappa)


# -- the closed form ----------------------------------------------------------------------------------------------------


def targets(loss, K, n):
    if loss is SOFTMAX:
        return torch.eye(K, dtype=torch.float64)[:, torch.arange(n) % K]
    return (torch.arange(n) % 2).double() if loss is LOGISTIC else randn(n, seed=7)


@pytest.mark.parametrize("tile", [2**30, 200])
@pytest.mark.parametrize(("loss", "K"), [(SQUARED, 1), (PSEUDO_HUBER, 1), (LOGISTIC, 1), (SOFTMAX, 3)])
@pytest.mark.parametrize("kind", ["smooth_relu", "relu", "tanh", torch.sin])
def test_the_drift_is_m_times_the_gradient(kind, loss, K, tile, monkeypatch):
    monkeypatch.setattr(closed_form, "TILE", tile)  # few bytes: rows in parts
    form, m, n = ClosedForm(Activation(kind), 4.0), 6, 11
    W, x, y = randn(K, m, 2, 5).requires_grad_(), randn(n, 5, seed=1), targets(loss, K, n)
    weight = torch.rand(n, generator=generator(3), dtype=torch.float64)
    weight /= weight.sum()
    value, drift = form.drift(W.detach(), x, y, weight, loss)
    z = torch.einsum("kjsd,nd->nkjs", W, x)
    by_hand = 4.0 / m * (form.activation(z)[..., 0] - form.activation(z)[..., 1]).sum(-1).T  # a sum over particles
    torch.testing.assert_close(form.outputs(W.detach(), x), by_hand.detach())
    losses, residual = loss(by_hand, y)
    objective = losses @ weight
    torch.testing.assert_close(value, objective.detach())
    (gradient,) = torch.autograd.grad(objective, W, retain_graph=True)
    torch.testing.assert_close(drift, m * gradient, rtol=1e-9, atol=1e-12)
    outputs = by_hand.detach().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(loss(outputs, y)[0].sum(), outputs)[0], residual.detach())


def test_the_module_is_the_same_network():
    for outputs in (1, 3):
        net = MeanFieldNet(4, 7, n_outputs=outputs, generator=generator()).double()
        x = randn(9, 4)
        W = net.particles.detach().reshape(7, outputs, 2, 5).movedim(0, 1)
        expected = ClosedForm(Activation(), 4.0).outputs(W, torch.cat([x, torch.ones(9, 1).double()], 1))
        torch.testing.assert_close(net(x), expected[0] if outputs == 1 else expected.T)
    with pytest.raises(ValueError, match=r"x must be \(B, 4\), got shape \(9, 5\)"):
        net(randn(9, 5))
    for width in (0, 2.5):
        with pytest.raises(ValueError, match=f"n_particles must be at least 1 and whole, got {width}"):
            MeanFieldNet(4, width)
    with pytest.raises(ValueError, match="output_scale must be positive"):
        MeanFieldNet(4, 5, output_scale=0)


def test_input_gradients():
    form, W, x = ClosedForm(Activation(), 3.0), randn(2, 6, 2, 5), randn(9, 5, seed=1).requires_grad_()
    for k, outputs in enumerate(form.outputs(W, x)):
        (expected,) = torch.autograd.grad(outputs.sum(), x, retain_graph=True)
        torch.testing.assert_close(form.input_gradients(W, x.detach())[k], expected)


def test_the_loss_is_convex_in_the_measure():
    """The output of two clouds side by side is the mean of their outputs, so J(½μ + ½ν) ≤ ½J(μ) + ½J(ν)."""
    form, x, y = ClosedForm(Activation(), 4.0), randn(20, 4), randn(20, seed=5)
    mu, nu = randn(1, 8, 2, 4, seed=1), randn(1, 8, 2, 4, seed=2)
    both = form.outputs(torch.cat([mu, nu], 1), x)
    torch.testing.assert_close(both, (form.outputs(mu, x) + form.outputs(nu, x)) / 2)
    share = torch.full((20,), 1 / 20, dtype=torch.float64)
    values = [form.drift(W, x, y, share, SQUARED)[0] for W in (torch.cat([mu, nu], 1), mu, nu)]
    assert values[0] < (values[1] + values[2]) / 2


def test_the_largest_eigenvalue_sets_the_step(monkeypatch):
    x, weight = randn(300, 12) * torch.linspace(1, 3, 12).double(), torch.full((300,), 1 / 300, dtype=torch.float64)
    expected = torch.linalg.eigvalsh(x.T @ x / 300)[-1].item()
    assert largest_eigenvalue(x, weight) == pytest.approx(expected, rel=1e-9)
    assert largest_eigenvalue(torch.zeros(3, 2), torch.ones(3)) == 0
    monkeypatch.setattr(closed_form, "DIRECT", 4)
    assert 0.95 * expected < largest_eigenvalue(x, weight) <= expected * (1 + 1e-9)
    assert largest_eigenvalue(torch.zeros(3, 6), torch.ones(3)) == 0
    X = x.numpy()
    fit = MeanFieldLangevinRegressor(5, max_iter=1, fit_intercept=False).fit(X, X[:, 0])
    assert fit.lr_ == pytest.approx(1 / (16 * expected), rel=0.05)


# -- geometry -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("joint_axes", [1, 2])
@pytest.mark.parametrize("retraction", ["exp", "normalize"])
def test_sphere(joint_axes, retraction):
    sphere, axes = Sphere(2.5, joint_axes, retraction), tuple(range(-joint_axes, 0))
    w = sphere.projx(randn(6, 2, 4))
    v = sphere.proju(w, randn(6, 2, 4, seed=1))
    torch.testing.assert_close((w * v).sum(axes), torch.zeros(w.shape[:-joint_axes]).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(sphere.proju(w, v), v)
    there = sphere.expmap(w, v)
    torch.testing.assert_close(torch.linalg.vector_norm(there, dim=axes), torch.full(w.shape[:-joint_axes], 2.5).double())
    assert torch.equal(sphere.expmap(w, torch.zeros_like(w)), w) or retraction == "normalize"
    if retraction == "exp":
        angle = torch.arccos((w * there).sum(axes) / 2.5**2)
        length = torch.linalg.vector_norm(v, dim=axes) / 2.5
        short = length < math.pi
        torch.testing.assert_close(angle[short], length[short])  # the way along the great circle is as long as v
    else:
        small = 1e-3 * v
        gap = (there := Sphere(2.5, joint_axes).expmap(w, small)) - sphere.expmap(w, small)
        assert gap.abs().max() < 1e-8 < (there - w).abs().max()  # of third order in the step
    for bad, message in (({"radius": 0}, "radius"), ({"joint_axes": 0}, "joint_axes"), ({"retraction": "none"}, "retraction")):
        with pytest.raises(ValueError, match=f"{message} must be"):
            Sphere(**bad)


# -- what is sampled ----------------------------------------------------------------------------------------------------


def at_rest(p, steps, lr=0.02, **options):
    """The chain without data: its drift is the weight decay alone."""
    optimizer = MeanFieldLangevin([p], lr=lr, beta=10.0, generator=generator(1), **options)
    for _ in range(steps):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    return p.detach()


def test_without_data_euclidean_particles_sample_the_prior():
    p = torch.nn.Parameter(torch.full((400, 12), 3.0, dtype=torch.float64))
    sample = at_rest(p, 600, weight_decay=1.0)
    variance = (2 * 0.02 / 10) / (1 - (1 - 0.02) ** 2)  # of the discrete chain; 1/(λβ) as η → 0
    assert variance == pytest.approx(0.1, rel=0.02)
    assert kstest(sample.flatten().numpy(), norm(0, variance**0.5).cdf).pvalue > 0.01
    wrong = norm(0, (variance / 2) ** 0.5).cdf  # noise of √(η/β) would have half the variance, and the test would see it
    assert kstest(sample.flatten().numpy(), wrong).pvalue < 1e-6


def test_without_data_particles_on_the_sphere_become_uniform():
    start = torch.zeros(2000, 5, dtype=torch.float64)
    start[:, 0] = 1.0  # all at one pole
    sample = at_rest(torch.nn.Parameter(start.clone()), 400, lr=0.1, manifold=Sphere())
    torch.testing.assert_close(sample.norm(dim=1), torch.ones(2000).double())
    coordinate = beta_law(2, 2, loc=-1, scale=2)  # of a uniform point of S^4: (1 + t)/2 ~ Beta((D - 1)/2, (D - 1)/2), D = 5
    for axis in (0, 3):
        assert kstest(sample[:, axis].numpy(), coordinate.cdf).pvalue > 0.01
    early = at_rest(torch.nn.Parameter(start), 20, manifold=Sphere())
    assert kstest(early[:, 0].numpy(), coordinate.cdf).pvalue < 1e-6


def test_with_a_linear_drift_the_temperature_holds():
    """A particle in the potential ⟨c, w⟩ + λ‖w‖²/2 has mean -c/λ, whatever the number of particles."""
    for m in (50, 500):
        p = torch.nn.Parameter(torch.zeros(m, 4))
        optimizer = MeanFieldLangevin([p], lr=0.05, beta=20.0, weight_decay=1.0, generator=generator())
        for _ in range(300):
            optimizer.zero_grad()
            (2 * p).mean(0).sum().backward()  # a loss that averages over particles: gradients of 2/m
            optimizer.step()
        assert p.mean().item() == pytest.approx(-2, abs=0.1)
        assert p.std().item() == pytest.approx(20**-0.5, rel=0.15)


# -- effective dimension ------------------------------------------------------------------------------------------------


def test_effective_dimension():
    assert effective_dimension(np.eye(12), np.eye(12)[:3]) == pytest.approx(4)  # d/k
    spiked = np.diag([1.0, 1.0] + [0.1] * 28)
    assert effective_dimension(spiked, np.eye(30)[:2]) == pytest.approx(2.4)
    Q = np.linalg.qr(np.random.default_rng(0).normal(size=(30, 30)))[0]
    assert effective_dimension(7 * Q @ spiked @ Q.T, (Q @ np.eye(30)[:, :2]).T) == pytest.approx(2.4)  # no units, no axes


@pytest.mark.parametrize(
    ("cov", "directions", "message"),
    [
        (np.eye(3)[:2], np.eye(3)[:1], r"cov must be \(d, d\)"),
        (np.eye(3), np.eye(4)[:1], r"directions must be \(k, 3\)"),
        (np.eye(3), 2 * np.eye(3)[:1], "orthonormal rows"),
        (np.eye(2), np.ones((2, 2)) / 2**0.5, "orthonormal rows"),
        (np.diag([1.0, -1.0]), np.eye(2)[:1], "positive semi-definite"),
        (np.array([[1.0, 1.0], [0.0, 1.0]]), np.eye(2)[:1], "symmetric"),
        (np.diag([1.0, np.nan]), np.eye(2)[:1], "finite"),
        (np.diag([1.0, 0.0]), np.eye(2)[1:], "infinite"),
    ],
)
def test_effective_dimension_refuses(cov, directions, message):
    with pytest.raises(ValueError, match=message):
        effective_dimension(cov, directions)


def test_estimated_effective_dimension():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 10)) * np.r_[1, 1, np.full(8, 0.3)]
    y = np.tanh(2 * X[:, 0] * X[:, 1])
    model = MeanFieldLangevinRegressor(50, max_iter=400, random_state=0)
    exact = effective_dimension(np.diag(X.var(0)), np.eye(10)[:2])
    assert estimate_effective_dimension(X, y, 2, model=model) == pytest.approx(exact, rel=0.1)
    assert 1 <= model.effective_dimension_ < 3
    with pytest.raises(ValueError, match="method must be 'agop', got 'sir'"):
        estimate_effective_dimension(X, y, 2, "sir")
    with pytest.raises(ValueError, match=r"k must lie in \[1, 10\], got 11"):
        estimate_effective_dimension(X, y, 11)
