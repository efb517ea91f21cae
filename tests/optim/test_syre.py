"""Syre's mathematics: anchors, the force at symmetric points, the functional forms, the diagnostics."""

import math

import pytest
import torch
from torch import nn

from assay.optim import Syre, draw_anchors, parametrize_syre, symmetry_diagnostics, syre_penalty
from assay.optim.syre.anchors import BLOCK, anchor_std, draw, draw_spread, generator


def mlp(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def data(dtype=torch.float64):
    g = torch.Generator().manual_seed(1)
    return torch.randn(20, 6, generator=g, dtype=dtype), torch.randn(20, 3, generator=g, dtype=dtype)


def train(model, optimizer, steps, x, y):
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# -- anchors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "fan_in"), [((30, 50), 50), ((20, 4, 3, 3), 36), ((64,), 64), ((), 1)])
def test_anchors_have_a_variance_of_one_over_fan_in(shape, fan_in):
    x = torch.stack([draw(seed, "w", shape, anchor_std(shape, 0.5)) for seed in range(200)])
    assert x.std().item() == pytest.approx(0.5 / math.sqrt(fan_in), rel=0.15 if shape == () else 0.03)
    assert abs(x.mean().item()) < 5 * 0.5 / math.sqrt(fan_in * x.numel())


def test_anchors_are_normal_and_differ_between_keys_and_seeds():
    x = draw(0, "a", (200_000,), 1.0).double()
    assert (x**4).mean().item() == pytest.approx(3, rel=0.05)
    assert (x**3).mean().abs().item() < 0.05
    for other in (draw(1, "a", (200_000,), 1.0), draw(0, "b", (200_000,), 1.0)):
        assert abs(torch.corrcoef(torch.stack([x, other.double()]))[0, 1].item()) < 0.01


def test_anchors_longer_than_a_block_do_not_repeat():
    x = draw(0, "a", (3 * BLOCK + 5,), 1.0)
    assert x.unique().numel() > 0.95 * x.numel()
    assert torch.equal(x[:BLOCK], draw(0, "a", (BLOCK,), 1.0))


def test_spreads_lie_around_one():
    D = draw_spread(0, "a", (50_000,), 0.2)
    assert D.min() >= 0.8
    assert D.max() <= 1.2
    assert D.std().item() == pytest.approx(0.2 / math.sqrt(3), rel=0.02)


def test_the_global_generator_is_left_alone():
    model, other = mlp(), mlp(1)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1)
    Syre(optimizer)
    train(model, optimizer, 2, *data())
    draw_anchors(model.named_parameters())
    parametrize_syre(other)
    assert torch.equal(torch.rand(4), expected)


def test_generators_of_close_names_are_unlike():
    assert len({generator(seed, key).initial_seed() for seed in range(20) for key in map(str, range(20))}) == 400


# -- the pull -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d_spread", [0.0, 0.3])
@pytest.mark.parametrize("store", ["seed", "tensor"])
def test_a_coupled_step_is_gradient_descent_on_the_regularised_loss(store, d_spread):
    """Against autograd on ℓ(w) + γ Σ D (w - θ₀)², momentum included."""
    x, y = data()
    model, reference = mlp(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.2)
    syre = Syre(optimizer, sigma=1.0, store=store, d_spread=d_spread, add_to_init=False)
    anchors = {name: syre.anchor(p) for name, p in model.named_parameters()}
    spreads = {name: syre.spread(p) for name, p in model.named_parameters()}
    plain = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9)
    for _ in range(5):
        plain.zero_grad()
        loss = (reference(x) - y).square().mean()
        (loss + syre_penalty(reference.named_parameters(), anchors, 0.1, spreads)).backward()
        plain.step()
    expected = torch.cat([p.detach().flatten() for p in reference.parameters()])
    torch.testing.assert_close(train(model, optimizer, 5, x, y), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("d_spread", [0.0, 0.3])
def test_a_decoupled_step_without_gradient_walks_to_the_anchor(d_spread):
    p = nn.Parameter(torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    start = p.detach().clone()
    optimizer = torch.optim.AdamW([p], lr=0.1, weight_decay=0.5)
    syre = Syre(optimizer, sigma=1.0, d_spread=d_spread, add_to_init=False)
    p.grad = torch.zeros_like(p)
    for _ in range(7):
        optimizer.step()
    expected = syre.anchor(p) + (1 - 0.05 * syre.spread(p).double()) ** 7 * (start - syre.anchor(p))
    torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-12)


def test_theta_form_and_w_form_are_one():
    """Training θ of ℓ(θ + θ₀) with plain decay is training w with decay towards θ₀."""
    x, y = data()
    literal = parametrize_syre(mlp(), sigma=0.7, seed=5)
    optimizer = torch.optim.SGD(literal.parameters(), 0.1, momentum=0.9, weight_decay=0.2)
    train(literal, optimizer, 6, x, y)
    model = mlp()
    wrapped = torch.optim.SGD(model.named_parameters(), 0.1, momentum=0.9, weight_decay=0.2)
    Syre(wrapped, sigma=0.7, seed=5)
    train(model, wrapped, 6, x, y)
    torch.testing.assert_close(literal(x), model(x), rtol=0, atol=1e-10)


def test_at_the_symmetric_point_only_syre_feels_a_force():
    """y = Σ u w x at u = w = 0: the gradient vanishes and so does plain decay; Syre's is 2γ|θ₀| in each coordinate."""
    x, y = data()
    for anchored in (False, True):
        u, w = (nn.Parameter(torch.zeros(6, dtype=torch.float64)) for _ in range(2))
        optimizer = torch.optim.SGD([u, w], 1.0, weight_decay=0.2)
        if anchored:
            syre = Syre(optimizer, add_to_init=False)
        ((x @ (u * w)) - y[:, 0]).square().mean().backward()
        optimizer.step()
        for p in (u, w):
            if anchored:
                torch.testing.assert_close(p.detach(), 0.2 * syre.anchor(p))
                assert (p != 0).all()
            else:
                assert not p.any()


def test_plain_decay_keeps_twins_together_and_syre_parts_them():
    """Two hidden units that are equal stay so under any gradient method; with anchors they do not."""
    x, y = data()
    apart = {}
    for name in ("plain", "syre"):
        model = mlp()
        with torch.no_grad():
            model[0].weight[1], model[0].bias[1] = model[0].weight[0].clone(), model[0].bias[0].clone()
            model[2].weight[:, 1] = model[2].weight[:, 0].clone()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1)
        if name == "syre":
            Syre(optimizer, sigma=0.1, add_to_init=False)
        train(model, optimizer, 50, x, y)
        apart[name] = (model[0].weight[1] - model[0].weight[0]).norm().item()
    assert apart["plain"] < 1e-12
    assert apart["syre"] > 1e-3


def test_a_shift_alone_changes_nothing():
    """Proposition 1: ℓ(θ + θ₀) trained without decay is ℓ trained from another start."""
    x, y = data()
    shifted = parametrize_syre(mlp(), sigma=1.0, add_to_init=False)
    m = mlp()
    train(shifted, torch.optim.SGD(shifted.parameters(), 0.1), 5, x, y)
    train(m, torch.optim.SGD(m.parameters(), 0.1), 5, x, y)
    torch.testing.assert_close(shifted(x), m(x), rtol=0, atol=1e-12)


# -- functional forms ---------------------------------------------------------------------------------------------------


def test_penalty_gradient():
    w = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    theta0, D = torch.full((3, 4), 0.3, dtype=torch.float64), torch.linspace(0.9, 1.1, 12, dtype=torch.float64).view(3, 4)
    assert torch.autograd.gradcheck(lambda w: syre_penalty({"w": w}, {"w": theta0}, 0.7, {"w": D}), (w,))
    syre_penalty({"w": w}, {"w": theta0}, 0.7, {"w": D}).backward()
    torch.testing.assert_close(w.grad, 1.4 * D * (w.detach() - theta0))


def test_penalty_method_is_the_function():
    model = mlp()
    syre = Syre(torch.optim.SGD(model.named_parameters(), 0.1, weight_decay=0.4), sigma=1.0)
    anchors = draw_anchors(model.named_parameters(), 1.0)
    expected = syre_penalty(model.named_parameters(), anchors, 0.2).item()
    assert syre.penalty().item() == pytest.approx(expected, rel=1e-6)


def test_penalty_bad_input():
    w = torch.ones(2)
    with pytest.raises(ValueError, match="gamma must be"):
        syre_penalty({"w": w}, {"w": w}, -1)
    with pytest.raises(ValueError, match="'v', which is no parameter"):
        syre_penalty({"w": w}, {"v": w}, 1)
    with pytest.raises(ValueError, match=r"the anchor of 'w' has shape \(3,\)"):
        syre_penalty({"w": w}, {"w": torch.ones(3)}, 1)


@pytest.mark.parametrize("add_to_init", [True, False])
def test_parametrization_starts_where_it_says_and_bakes_in(add_to_init):
    x, _ = data()
    plain, net = mlp(), mlp()
    parametrize_syre(net, sigma=1.0, add_to_init=add_to_init, exclude="2.bias")
    anchors = draw_anchors(plain.named_parameters(), 1.0)
    with torch.no_grad():
        for name, p in plain.named_parameters():
            if add_to_init and name != "2.bias":
                p.add_(anchors[name])
    torch.testing.assert_close(net(x), plain(x))
    before = net(x)
    for layer in (net[0], net[2]):
        for name in list(getattr(layer, "parametrizations", {})):
            nn.utils.parametrize.remove_parametrizations(layer, name)
    torch.testing.assert_close(net(x), before)


def test_parametrization_leaves_frozen_weights_alone_and_names_a_pattern_without_match():
    net = mlp()
    net[0].weight.requires_grad_(False)
    before = net[0].weight.clone()
    parametrize_syre(net, sigma=1.0)
    assert torch.equal(net[0].weight, before)
    assert not hasattr(net[0].parametrizations, "weight")
    with pytest.raises(ValueError, match=r"exclude='norm\*' matches no parameter; names: 0\.weight"):
        parametrize_syre(mlp(), exclude="norm*")


def test_parametrized_weights_that_are_shared_stay_shared():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))

    net = parametrize_syre(Tied(), sigma=1.0)
    assert torch.equal(net.a.weight, net.b.weight)
    assert len(list(net.parameters())) == 1
    with pytest.raises(ValueError, match="already"):
        parametrize_syre(net)


# -- diagnostics --------------------------------------------------------------------------------------------------------


def test_diagnostics_against_a_network_whose_rank_is_known():
    """Eight units: three independent, one copy, one negated copy, one sum, one dead, one constant."""
    net = nn.Sequential(nn.Linear(3, 8), nn.Identity(), nn.Linear(8, 2))
    rows = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0], [0, -2, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0]])
    with torch.no_grad():
        net[0].weight.copy_(rows)
        net[0].bias.zero_()
        net[0].bias[7] = 5.0
    x = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    seen = symmetry_diagnostics(net, x)
    assert (seen["units"], seen["numerical_rank"], seen["dead_units"], seen["duplicate_units"]) == (8, 3, 2, 2)
    assert 2 < seen["effective_rank"] <= 3
    assert symmetry_diagnostics(net, x, hook="0") == seen


def test_a_dead_layer_has_rank_0():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    nn.init.constant_(net[0].bias, -100.0)
    seen = symmetry_diagnostics(net, torch.randn(10, 3))
    assert seen == {"units": 4, "numerical_rank": 0, "effective_rank": 0.0, "dead_units": 4, "duplicate_units": 0}


def test_diagnostics_leave_the_network_as_it_was_and_name_bad_input():
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    net[1].eval()
    symmetry_diagnostics(net, torch.randn(5, 3))
    assert net.training
    assert not net[1].training
    assert not net[0]._forward_hooks
    assert not net[2]._forward_pre_hooks
    with pytest.raises(ValueError, match="got 'nowhere'; names: 0, 1, 2"):
        symmetry_diagnostics(net, torch.randn(5, 3), hook="nowhere")
    with pytest.raises(ValueError, match="no linear layer"):
        symmetry_diagnostics(nn.ReLU(), torch.randn(5, 3))
    with pytest.raises(ValueError, match="not finite"):
        symmetry_diagnostics(net, torch.full((5, 3), math.nan))
    for x in (torch.randn(3), torch.randn(1, 3)):
        with pytest.raises(ValueError, match="at least two samples"):
            symmetry_diagnostics(net, x)
    with pytest.raises(ValueError, match="duplicate_at"):
        symmetry_diagnostics(net, torch.randn(5, 3), duplicate_at=0)
