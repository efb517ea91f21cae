"""Syre around the optimizers people use: identities at θ₀ = 0, state, copies, schedules, scaling, bad input."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn

from assay.optim import SOAP, Syre, draw_anchors


def mlp(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def matrices(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)).to(dtype)


X = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randn(20, 3, generator=torch.Generator().manual_seed(2))


def loss_of(model):
    return (model(X.to(next(model.parameters()).dtype)) - Y).square().mean()


def train(model, optimizer, steps=6, schedule=None):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        if schedule:
            schedule.step()
    return weights(model)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


MAKERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd-maximize": lambda ps: torch.optim.SGD(ps, 0.01, momentum=0.9, weight_decay=0.1, maximize=True),
    "adam": lambda ps: torch.optim.Adam(ps, 0.01, weight_decay=0.1),
    "adamw": lambda ps: torch.optim.AdamW(ps, 0.01, weight_decay=0.1),
    "adamw-for-loop": lambda ps: torch.optim.AdamW(ps, 0.01, weight_decay=0.1, foreach=False),
    "adamw-foreach": lambda ps: torch.optim.AdamW(ps, 0.01, weight_decay=0.1, foreach=True),
    "adamw-fused": lambda ps: torch.optim.AdamW(ps, 0.01, weight_decay=0.1, fused=True),
    "adamw-tensor-lr": lambda ps: torch.optim.AdamW(ps, torch.tensor(0.01), weight_decay=0.1, foreach=False),
    "adamw-amsgrad-maximize": lambda ps: torch.optim.AdamW(ps, 0.01, weight_decay=0.1, amsgrad=True, maximize=True),
    "nadam": lambda ps: torch.optim.NAdam(ps, 0.01, weight_decay=0.1),
    "radam-decoupled": lambda ps: torch.optim.RAdam(ps, 0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 0.01, weight_decay=0.1),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, 0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS.keys())
def test_with_every_anchor_at_zero_it_is_the_optimizer_to_the_last_bit(maker):
    model, reference = mlp(), mlp()
    optimizer = maker(model.parameters())
    Syre(optimizer, exclude=list(model.parameters()))
    assert torch.equal(train(model, optimizer), train(reference, maker(reference.parameters())))


def test_adafactor_measures_its_weights_before_it_decays_them_and_so_is_close_only():
    model, reference = mlp(), mlp()
    optimizers = [torch.optim.Adafactor(m.parameters(), 0.01, weight_decay=0.1) for m in (model, reference)]
    Syre(optimizers[0], exclude="*")
    torch.testing.assert_close(train(model, optimizers[0]), train(reference, optimizers[1]), rtol=0, atol=1e-4)


def test_muon_to_the_last_bit():
    model, reference = matrices(), matrices()
    optimizers = [torch.optim.Muon(m.parameters(), 0.02, weight_decay=0.3) for m in (model, reference)]
    Syre(optimizers[0], exclude="*")
    assert torch.equal(train(model, optimizers[0]), train(reference, optimizers[1]))


@pytest.mark.parametrize("steps", [1, 2, 12])
def test_soap_decays_last_and_not_in_the_call_that_only_measures(steps):
    model, reference = mlp(), mlp()
    optimizers = [SOAP(m.parameters(), 0.01, weight_decay=0.3, precondition_frequency=3) for m in (model, reference)]
    Syre(optimizers[0], exclude="*")
    assert torch.equal(train(model, optimizers[0], steps), train(reference, optimizers[1], steps))


def test_soap_does_not_decay_what_it_sits_out():
    p = nn.Parameter(torch.ones(3, 3))
    optimizer = SOAP([p], weight_decay=0.5)
    Syre(optimizer, add_to_init=False)
    for grad in (torch.eye(3), torch.eye(3)):
        p.grad = grad
        optimizer.step()
    before = p.detach().clone()
    p.grad = torch.full((3, 3), float("nan"))
    with pytest.warns(RuntimeWarning, match="not finite"):
        optimizer.step()
    assert torch.equal(p, before)


def test_pytorch_optimizers_adamw_and_soap():
    peer = pytest.importorskip("pytorch_optimizer")
    for make in (
        lambda ps: (
            peer.AdamW(ps, 0.01, weight_decay=0.1) if hasattr(peer, "AdamW") else peer.AdaBelief(ps, 0.01, weight_decay=0.1)
        ),
        lambda ps: peer.Lion(ps, 0.01, weight_decay=0.1, weight_decouple=True),
        lambda ps: peer.Lion(ps, 0.01, weight_decay=0.1, weight_decouple=False),
    ):
        model, reference = mlp(), mlp()
        optimizer = make(model.parameters())
        Syre(optimizer, exclude="*")
        torch.testing.assert_close(
            train(model, optimizer), train(reference, make(reference.parameters())), rtol=1e-6, atol=1e-6
        )


def test_heavyball_which_takes_gradients_away():
    peer = pytest.importorskip("heavyball")
    peer.utils.compile_mode = None
    model, reference = mlp(), mlp()
    optimizers = [peer.AdamW(m.parameters(), 0.01, weight_decay=0.1) for m in (model, reference)]
    syre = Syre(optimizers[0], exclude="*")
    torch.testing.assert_close(train(model, optimizers[0]), train(reference, optimizers[1]), rtol=1e-5, atol=1e-5)
    syre.remove()
    Syre(optimizers[0], sigma=1.0, add_to_init=False, decay_last=True)  # after a step its gradients are gone
    before = weights(model)
    loss_of(model).backward()
    optimizers[0].step()
    assert not torch.equal(weights(model), before)


def effect_missed(kind, **options):
    """How far Syre with anchors at 0 is from the optimizer's own decay, as a share of what that decay does.

    On a loss whose gradients do not depend on the weights: a difference is then the decay's own and does not grow.
    """
    ends = []
    for decay, wrap in ((0.3, True), (0.3, False), (0.0, False)):
        model = mlp()
        optimizer = kind(model.parameters(), weight_decay=decay, **options)
        if wrap:
            Syre(optimizer, exclude=list(model.parameters()))
        torch.manual_seed(0)
        for _ in range(4):
            optimizer.zero_grad()
            sum((p * torch.randn_like(p)).sum() for p in model.parameters()).backward()
            optimizer.step()
        ends.append(weights(model))
    wrapped, own, without = ends
    return ((wrapped - own).norm() / (own - without).norm()).item()


def test_a_decay_that_does_not_follow_the_learning_rate():
    peer = pytest.importorskip("pytorch_optimizer")
    assert effect_missed(peer.Lion, fixed_decay=True) < 0.01
    assert effect_missed(peer.AdaBelief, lr=1e-3, fixed_decay=True) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("package", ["pytorch_optimizer", "heavyball"])
def test_every_optimizer_of_a_package_is_followed_or_refused(package):
    """Off by less than what SOAP's first call, which both packages do not decay in, makes of four steps."""
    peer = pytest.importorskip(package)
    if package == "heavyball":
        peer.utils.compile_mode = None
    followed, missed = [], {}
    for name, kind in vars(peer).items():
        if not (inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)):
            continue
        try:
            far = effect_missed(kind, lr=1e-3)
        except (TypeError, ValueError, RuntimeError, AttributeError, ImportError):  # refused, or not made for this use
            continue
        followed.append(name)
        if far >= 0.5:  # NaN: neither has moved yet
            missed[name] = far
    assert len(followed) > 20
    assert not missed


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("pytorch_optimizer.Prodigy", {}, "at a learning rate that it adapts by itself"),
        ("pytorch_optimizer.Adan", {}, "by a rule of its own"),
        ("heavyball.AdamW", {"warmup_steps": 3}, "at a learning rate that it warms up by itself"),
        ("heavyball.AdamW", {"cautious_weight_decay": True}, "only where it agrees with the update"),
        ("heavyball.NAdam", {}, "inside its update"),
    ],
)
def test_a_decay_by_a_rule_of_its_own_is_refused_until_told(name, options, message):
    package, _, kind = name.partition(".")
    peer = pytest.importorskip(package)
    optimizer = getattr(peer, kind)(mlp().parameters(), lr=0.01, weight_decay=0.1, **options)
    with pytest.raises(ValueError, match=message):
        Syre(optimizer)
    Syre(optimizer, coupled=False)


@pytest.mark.parametrize("name", ["sgd", "adamw", "adamw-fused", "adamw-tensor-lr"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_stores_give_the_same_numbers(name, dtype):
    results = []
    for store in ("seed", "tensor"):
        model = mlp(dtype)
        optimizer = MAKERS[name](model.parameters())
        Syre(optimizer, sigma=1.0, store=store, d_spread=0.0)
        results.append(train(model, optimizer))
    torch.testing.assert_close(*results, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)
    plain = mlp(dtype)
    assert not torch.equal(results[0], train(plain, MAKERS[name](plain.parameters())))


@pytest.mark.parametrize("store", ["seed", "tensor"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_large_and_oddly_laid_out_parameters(store, layout):
    """More than one block of draws, and memory that is not in order: against the formula on the whole tensor."""
    start = torch.randn(300, 500, generator=torch.Generator().manual_seed(0))
    p = nn.Parameter(start.clone() if layout == "contiguous" else start.t().contiguous().t())
    for make, expected in (
        (lambda: torch.optim.AdamW([p], lr=0.1, weight_decay=0.5), lambda w, a: w - 0.05 * (w - a)),
        (lambda: torch.optim.SGD([p], lr=0.1, weight_decay=0.5), lambda w, a: w - 0.05 * (w - a)),
    ):
        optimizer = make()
        syre = Syre(optimizer, sigma=1.0, store=store, add_to_init=False)
        before, p.grad = p.detach().clone(), torch.zeros_like(p)
        optimizer.step()
        torch.testing.assert_close(p.detach(), expected(before, syre.anchor(p)), rtol=0, atol=1e-6)
        assert not p.grad.any()  # the user's own gradient is back
        syre.remove()


def test_add_to_init_adds_the_anchor_once():
    model, reference = mlp(), mlp()
    syre = Syre(MAKERS["adamw"](model.parameters()), sigma=1.0)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p - q, syre.anchor(p), rtol=0, atol=1e-6)


def test_anchors_follow_names_where_the_optimizer_knows_them():
    model = mlp()
    optimizer = torch.optim.AdamW(reversed(list(model.named_parameters())), weight_decay=0.1)
    syre = Syre(optimizer, sigma=1.0, add_to_init=False)
    for name, anchor in draw_anchors(model.named_parameters(), 1.0).items():
        assert torch.equal(syre.anchor(model.get_parameter(name)), anchor)


# -- groups -------------------------------------------------------------------------------------------------------------


def test_groups_without_decay_stay_without():
    model = mlp()
    biases = [p for p in model.parameters() if p.ndim == 1]
    rest = [p for p in model.parameters() if p.ndim > 1]
    before = [b.detach().clone() for b in biases]
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": biases, "weight_decay": 0.0}], lr=0.1, weight_decay=0.1)
    syre = Syre(optimizer, sigma=1.0, weight_decay=0.4)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0, 0]
    assert [g["syre_weight_decay"] for g in optimizer.param_groups] == [0.4, 0.0]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(biases, before, strict=True))
    with pytest.raises(ValueError, match="no anchor for this parameter"):
        syre.anchor(biases[0])
    syre.remove()
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.4, 0.0]


def test_excluded_parameters_keep_ordinary_decay():
    model = mlp()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1, weight_decay=0.5)
    syre = Syre(optimizer, sigma=1.0, exclude="*.bias")
    before = model[0].bias.detach().clone()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(model[0].bias.detach(), 0.95 * before)
    assert not syre.anchor(model[0].bias).any()
    assert syre.anchor(model[0].weight).any()


def test_a_pattern_that_excludes_nothing_is_refused():
    model = mlp()
    with pytest.raises(ValueError, match=r"exclude='\*\.bias' matches no parameter; it knows parameters by number only"):
        Syre(torch.optim.AdamW(model.parameters(), weight_decay=0.1), exclude="*.bias")
    optimizer = torch.optim.AdamW(model.named_parameters(), weight_decay=0.1)
    with pytest.raises(ValueError, match=r"exclude='norm\.\*' matches no parameter; names: 0\.weight, 0\.bias"):
        Syre(optimizer, exclude=("*.bias", "norm.*"))
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


def test_a_parameter_put_in_anothers_place_decays():
    old, new = (nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = torch.optim.AdamW([old], lr=0.1, weight_decay=0.5)
    syre = Syre(optimizer, sigma=1.0)
    optimizer.param_groups[0]["params"] = [new]
    new.grad = torch.zeros(4)
    optimizer.step()
    torch.testing.assert_close(new.detach(), 1 - 0.05 * (1 - syre.anchor(new)))


def test_a_group_added_later_is_adopted_and_does_not_decay_twice():
    first, later = (nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = torch.optim.AdamW([first], lr=0.1, weight_decay=0.5)
    syre = Syre(optimizer, sigma=1.0)
    optimizer.add_param_group({"params": [later]})
    later.grad = torch.zeros(4)
    optimizer.step()
    torch.testing.assert_close(later.detach(), 1 - 0.05 * (1 - syre.anchor(later)))
    assert not torch.equal(syre.anchor(later), syre.anchor(first))
    another = nn.Parameter(torch.ones(4))
    optimizer.add_param_group({"params": [another]})
    syre.adopt(add_to_init=True)
    torch.testing.assert_close(another.detach(), 1 + syre.anchor(another))
    assert torch.equal(first.detach(), 1 + syre.anchor(first))


def test_frozen_and_unused_parameters_do_not_move():
    model = mlp()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    optimizer = MAKERS["sgd"](model.parameters())
    syre = Syre(optimizer, sigma=1.0)
    unused = model[2].weight.detach().clone()
    for p in model.parameters():
        p.grad = None if p is model[2].weight or not p.requires_grad else torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(model[0].weight, before)
    assert torch.equal(model[2].weight, unused)
    model[0].weight.requires_grad_(True)
    train(model, optimizer, 1)
    assert not torch.equal(model[0].weight, before)
    assert syre.anchor(model[0].weight).any()


def test_tied_weights_have_one_anchor_and_decay_once():
    a, b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    b.weight = a.weight
    model = nn.Sequential(a, b)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    syre = Syre(optimizer, sigma=1.0)
    before = a.weight.detach().clone()
    a.weight.grad = torch.zeros(4, 4)
    optimizer.step()
    torch.testing.assert_close(b.weight.detach(), before - 0.05 * (before - syre.anchor(b.weight)))


# -- the step -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sgd", "adamw", "soap"])
@pytest.mark.parametrize("keyword", [True, False])
def test_a_closure_is_the_step_without_one(name, keyword):
    make = {**MAKERS, "soap": lambda ps: SOAP(ps, 0.01, weight_decay=0.3)}[name]
    plain, model = mlp(), mlp()
    optimizers = [make(m.parameters()) for m in (plain, model)]
    for optimizer in optimizers:
        Syre(optimizer, sigma=1.0)

    def closure():
        optimizers[1].zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    for _ in range(5):
        loss = optimizers[1].step(closure=closure) if keyword else optimizers[1].step(closure)
        assert loss.item() > 0
    assert torch.equal(train(plain, optimizers[0], 5), weights(model))


@pytest.mark.parametrize("zero_to_none", [True, False])
def test_lbfgs_finds_the_minimum_of_the_regularised_loss(zero_to_none):
    """Least squares with γ‖w - θ₀‖²: the minimum is known."""
    A, b = X.double(), Y[:, :1].double()
    w = nn.Parameter(torch.zeros(6, 1, dtype=torch.float64))
    optimizer = torch.optim.LBFGS([w], max_iter=50, line_search_fn="strong_wolfe", tolerance_grad=1e-12, tolerance_change=0)
    syre = Syre(optimizer, sigma=1.0, weight_decay=0.6)

    def closure():
        optimizer.zero_grad(set_to_none=zero_to_none)
        loss = 0.5 * (A @ w - b).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    theta0 = syre.anchor(w)
    exact = torch.linalg.solve(A.T @ A + 0.6 * torch.eye(6, dtype=torch.float64), A.T @ b + 0.6 * theta0)
    torch.testing.assert_close(w.detach(), exact, rtol=0, atol=1e-8)


def test_the_users_gradients_are_given_back():
    model = mlp()
    optimizer = MAKERS["adam"](model.parameters())
    Syre(optimizer, sigma=1.0)
    loss_of(model).backward()
    grads = [p.grad for p in model.parameters()]
    copies = [g.clone() for g in grads]
    optimizer.step()
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(grads, copies, strict=True))


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_step_that_the_scaler_skips_does_not_decay(name):
    model = mlp()
    optimizer = MAKERS[name](model.parameters())
    Syre(optimizer, sigma=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = weights(model)
    scaler.scale(loss_of(model) * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weights(model), before)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_a_fused_optimizer_that_unscales_by_itself(kind):
    """It skips a step and divides by the scale inside its kernel, behind the hooks."""
    weights_of = {}
    for scaled in (False, True):
        model = mlp()
        optimizer = kind(model.parameters(), 0.01, weight_decay=0.1, fused=True)
        Syre(optimizer, sigma=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaled)
        for bad in (False, True, False):
            if bad and not scaled:
                continue
            optimizer.zero_grad()
            scaler.scale(loss_of(model) * (float("inf") if bad else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
        weights_of[scaled] = weights(model)
    torch.testing.assert_close(weights_of[True], weights_of[False], rtol=1e-4, atol=1e-5)


def test_schedules_change_the_pull():
    p = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([p], lr=0.1, weight_decay=0.5)
    syre = Syre(optimizer, sigma=1.0, add_to_init=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: [1.0, 0.5, 0.0][min(step, 2)])
    expected = p.detach().clone()
    for rate in (0.05, 0.025, 0.0):
        p.grad = torch.zeros(4)
        optimizer.step()
        schedule.step()
        expected -= rate * (expected - syre.anchor(p))
        torch.testing.assert_close(p.detach(), expected)


def test_clipping_does_not_reach_the_pull():
    p = nn.Parameter(torch.full((4,), 100.0))
    optimizer = torch.optim.SGD([p], lr=0.1, weight_decay=0.5)
    syre = Syre(optimizer, sigma=1.0, add_to_init=False)
    p.grad = torch.zeros(4)
    torch.nn.utils.clip_grad_norm_([p], 1e-6)
    optimizer.step()
    torch.testing.assert_close(p.detach(), 100 - 0.05 * (100 - syre.anchor(p)))


@pytest.mark.slow
def test_a_compiled_module_trains_alike():
    plain, model = mlp(), mlp()
    optimizers = [MAKERS["adamw"](m.parameters()) for m in (plain, model)]
    for optimizer in optimizers:
        Syre(optimizer, sigma=1.0)
    compiled = torch.compile(model, backend="aot_eager")
    train(compiled, optimizers[1])
    torch.testing.assert_close(weights(model), train(plain, optimizers[0]))


def test_bf16_is_rounded_once_and_anchors_are_rounded_draws():
    p = nn.Parameter(torch.linspace(1, 2, 64).bfloat16())
    optimizer = torch.optim.AdamW([p], lr=1.0, weight_decay=0.1)
    syre = Syre(optimizer, sigma=1.0, add_to_init=False)
    anchor = draw_anchors({"0": p}, 1.0)["0"]
    assert torch.equal(syre.anchor(p), anchor)
    before, p.grad = p.detach().float(), torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(p.detach(), (before * 0.9 + 0.1 * anchor.float()).bfloat16())


# -- state --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved", ["seed", "tensor"])
@pytest.mark.parametrize("loaded", ["seed", "tensor"])
@pytest.mark.parametrize("maker", [MAKERS["sgd"], MAKERS["adamw"]], ids=["sgd", "adamw"])
def test_a_run_that_is_saved_and_resumed_is_the_run(saved, loaded, maker):
    model = mlp()
    optimizer = maker(model.parameters())
    syre = Syre(optimizer, sigma=1.0, seed=7, d_spread=0.2, store=saved)
    train(model, optimizer, 3)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), syre.state_dict()], file)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    expected = train(model, optimizer, 3)
    fresh = mlp()
    resumed = maker(fresh.parameters())
    other = Syre(resumed, sigma=0.3, seed=1, store=loaded)
    for part, state in zip((fresh, resumed, other), states, strict=True):
        part.load_state_dict(state)
    torch.testing.assert_close(train(fresh, resumed, 3), expected, rtol=0, atol=1e-6)
    assert (other.sigma, other.seed, other.d_spread) == (1.0, 7, 0.2)


def test_saved_anchors_are_matched_by_name():
    model = mlp()
    named = list(model.named_parameters())
    syre = Syre(torch.optim.AdamW(named, weight_decay=0.1), sigma=1.0, store="tensor", add_to_init=False)
    other_model = mlp()
    reordered = list(reversed(list(other_model.named_parameters())))
    other = Syre(torch.optim.AdamW(reordered, weight_decay=0.1), sigma=1.0, seed=3, add_to_init=False)
    other.load_state_dict(syre.state_dict())
    for name, p in named:
        assert torch.equal(syre.anchor(p), other.anchor(other_model.get_parameter(name)))


def test_a_state_that_does_not_fit_is_refused():
    syre = Syre(MAKERS["adamw"](mlp().parameters()))
    state = syre.state_dict()
    with pytest.raises(ValueError, match="the state has 2 parameters, the optimizer 6"):
        syre.load_state_dict({**state, "params": state["params"][:2]})
    state["params"][0] = {**state["params"][0], "shape": (1, 1)}
    with pytest.raises(ValueError, match=r"has shape \(1, 1\) in the state, \(16, 6\) here"):
        syre.load_state_dict(state)


@pytest.mark.parametrize("store", ["seed", "tensor"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_go_on_by_themselves(store, how):
    model = mlp()
    optimizer = MAKERS["adamw"](model.parameters())
    syre = Syre(optimizer, sigma=1.0, store=store)
    train(model, optimizer, 2)
    pair = (model, syre)
    twin_model, twin = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    before = weights(model)
    after = train(twin_model, twin.optimizer, 3)
    assert torch.equal(weights(model), before)
    assert torch.equal(after, train(model, optimizer, 3))
    assert torch.equal(twin.anchor(twin_model[0].weight), syre.anchor(model[0].weight))


def test_remove_gives_the_optimizer_back():
    model, reference = mlp(), mlp()
    optimizer = MAKERS["adamw"](model.parameters())
    Syre(optimizer, add_to_init=False).remove()
    assert torch.equal(train(model, optimizer), train(reference, MAKERS["adamw"](reference.parameters())))
    syre = Syre(optimizer)  # and it can be wrapped anew
    added = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [added]})
    syre.remove()
    syre.remove()
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.1]


def test_parameters_that_a_state_has_no_anchor_for_get_one():
    def wrapped(decay):
        ps = [nn.Parameter(torch.ones(4)) for _ in range(2)]
        optimizer = torch.optim.AdamW([{"params": ps[:1]}, {"params": ps[1:], "weight_decay": decay}], lr=0.1, weight_decay=0.5)
        return ps, optimizer, Syre(optimizer, sigma=1.0, add_to_init=False)

    saved = wrapped(0.0)[2].state_dict()
    (_, p), optimizer, syre = wrapped(0.5)
    syre.load_state_dict(saved)
    p.grad = torch.zeros(4)
    optimizer.step()
    torch.testing.assert_close(p.detach(), 1 - 0.05 * (1 - syre.anchor(p)))


# -- bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sigma": 0}, "sigma must be positive and finite, got 0; 0 would be plain weight decay"),
        ({"sigma": -1.0}, "sigma must be positive"),
        ({"sigma": float("nan")}, "sigma must be positive"),
        ({"scale": "fan_out"}, "scale must be 'fan_in' or 'absolute', got 'fan_out'"),
        ({"d_spread": -0.1}, r"d_spread must lie in \[0, 1\), got -0.1"),
        ({"d_spread": 1.0}, r"d_spread must lie in \[0, 1\), got 1.0"),
        ({"store": "disk"}, "store must be 'seed' or 'tensor', got 'disk'"),
        ({"seed": 1.5}, "seed must be an integer, got 1.5"),
        ({"weight_decay": 0.0}, "weight_decay must be positive and finite, got 0.0; without decay a shift"),
        ({"anchor_dtype": torch.int8}, "anchor_dtype must be floating-point"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Syre(MAKERS["adamw"](mlp().parameters()), **options)


def test_no_decay_anywhere_is_refused_and_an_argument_mends_it():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match="removes no symmetry"):
        Syre(optimizer)
    assert "syre_weight_decay" not in optimizer.param_groups[0]
    Syre(optimizer, weight_decay=0.1)
    assert optimizer.param_groups[0]["syre_weight_decay"] == 0.1


def test_what_cannot_be_wrapped():
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([p], weight_decay=0.1)
    Syre(optimizer)
    with pytest.raises(ValueError, match="wrapped already"):
        Syre(optimizer)
    optimizer.param_groups[0]["weight_decay"] = 0.2
    p.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="would decay twice"):
        optimizer.step()
    with pytest.raises(ValueError, match="would decay twice"):
        Syre(copy.deepcopy(optimizer))
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, got int"):
        Syre(3)
    emptied = torch.optim.AdamW([nn.Parameter(torch.ones(2))], weight_decay=0.1)
    emptied.param_groups[0]["params"] = []
    with pytest.raises(ValueError, match="holds no parameters"):
        Syre(emptied)


@pytest.mark.parametrize(
    ("p", "message"),
    [
        (torch.ones(2, 2, dtype=torch.complex64), "real and floating-point, got torch.complex64"),
        (torch.ones(2, dtype=torch.int64), "real and floating-point, got torch.int64"),
        (torch.eye(3).to_sparse(), "dense, got torch.sparse_coo"),
    ],
)
def test_only_dense_real_floating_parameters(p, message):
    with pytest.raises(ValueError, match=message):
        Syre(torch.optim.SGD([p], 0.1, weight_decay=0.1))


def test_sparse_gradients_are_refused_where_decay_is_added_to_them():
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), 0.1, weight_decay=0.1)
    Syre(optimizer)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"cannot be added to a torch.sparse_coo gradient"):
        optimizer.step()


def test_an_optimizer_that_does_not_say_how_it_decays():
    class Own(torch.optim.SGD):
        pass

    Own.__module__ = "mine"
    optimizer = Own([nn.Parameter(torch.ones(2))], 0.1, weight_decay=0.1)
    with pytest.raises(ValueError, match=r"cannot tell how mine\.Own applies weight decay; pass coupled=True"):
        Syre(optimizer)
    Syre(optimizer, coupled=True)
