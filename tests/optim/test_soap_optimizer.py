"""SOAP as a torch optimizer: state, precision, copies, groups, closures, compilation and bad input."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

from assay.optim import SOAP


def network(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.LayerNorm(48), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 4)).to(
        dtype
    )


def train(net, optimizer, steps, start=0):
    dtype = next(net.parameters()).dtype
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 1, 6, 6, generator=generator).to(dtype)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x).float(), torch.arange(16) % 4).backward()
        optimizer.step()


def weights(net):
    return [p.detach().clone() for p in net.parameters()]


def reloaded(optimizer, net):
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    other = SOAP(net.parameters())
    other.load_state_dict(torch.load(buffer, weights_only=True))
    return other


OPTIONS = {
    "plain": {},
    "factorized": {"factorized": True},
    "one-sided": {"one_sided": True},
    "merged": {"merge_dims": True, "max_precond_dim": 48},
    "1-D": {"precondition_1d": True},
    "axis too long": {"max_precond_dim": 8},  # leaves None holes in the lists
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_save_and_reload_continue_bit_for_bit(dtype, options):
    net = network(dtype)
    optimizer = SOAP(net.parameters(), 1e-2, precondition_frequency=3, **options)
    train(net, optimizer, 7)
    twin = copy.deepcopy(net)
    other = reloaded(optimizer, twin)
    train(net, optimizer, 7, start=7)
    train(twin, other, 7, start=7)
    assert all(torch.equal(a, b) for a, b in zip(weights(net), weights(twin), strict=True))
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    for state in other.state.values():
        tensors = [x for v in state.values() for x in (v if isinstance(v, list) else [v]) if isinstance(x, torch.Tensor)]
        assert {x.dtype for x in tensors} == {wanted}


def test_loading_does_not_alias_the_source():
    net = network()
    optimizer = SOAP(net.parameters(), precondition_frequency=2)
    train(net, optimizer, 4)
    twin = copy.deepcopy(net)
    other = SOAP(twin.parameters())
    other.load_state_dict(optimizer.state_dict())
    before = copy.deepcopy(optimizer.state_dict()["state"])
    train(twin, other, 4)
    for i, state in optimizer.state_dict()["state"].items():
        assert torch.equal(state["exp_avg_sq"], before[i]["exp_avg_sq"])


def test_hooks_of_the_user_see_and_change_what_is_loaded():
    net = network()
    optimizer = SOAP(net.parameters())
    train(net, optimizer, 3)

    def halve(_, saved):
        return {**saved, "state": {i: {**s, "exp_avg": s["exp_avg"] / 2} for i, s in saved["state"].items()}}

    seen = []
    other = SOAP(net.parameters())
    other.register_load_state_dict_pre_hook(halve)
    other.register_load_state_dict_post_hook(lambda o: seen.append(o.state[net[3].weight]["exp_avg"].clone()))
    other.load_state_dict(optimizer.state_dict())
    assert torch.equal(seen[0], optimizer.state[net[3].weight]["exp_avg"] / 2)
    assert len(other._optimizer_load_state_dict_pre_hooks) == 1  # the hooks that loading needs itself are gone


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"])
def test_copies_are_independent_and_continue_alike(copier):
    net = network()
    optimizer = SOAP(net.parameters(), 1e-2, precondition_frequency=3)
    train(net, optimizer, 5)
    twin, other = copier((net, optimizer))
    train(net, optimizer, 5, start=5)
    after = weights(net)
    train(twin, other, 5, start=5)
    assert all(torch.equal(a, b) for a, b in zip(after, weights(twin), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(after, weights(net), strict=True))


def test_low_precision_follows_float32():
    """bf16 weights with float32 state: the path is that of float32 rounded, not one of its own."""
    nets = [network(torch.float32), network(torch.bfloat16)]
    start = weights(nets[0])
    for net in nets:
        train(net, SOAP(net.parameters(), 1e-2, precondition_frequency=3), 10)
    moved = torch.cat([(a - s).flatten() for a, s in zip(weights(nets[0]), start, strict=True)])
    apart = torch.cat([(a - b.float()).flatten() for a, b in zip(*map(weights, nets), strict=True)])
    assert apart.norm() < 0.5 * moved.norm()


def test_it_trains():
    net = network()
    x = torch.randn(64, 1, 6, 6)
    y = x[:, 0, 2, 1:5].argmax(-1)
    optimizer = SOAP(net.parameters(), 1e-2, precondition_frequency=5)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=150, cycle_momentum=False)
    for _ in range(150):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    assert loss.item() < 0.1


def test_closure_may_call_backward():
    p = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 5.0]]))
    optimizer = SOAP([p])

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert [optimizer.step(closure).item() for _ in range(2)] == [39.0, 39.0]  # the first call only measures
    assert optimizer.step(closure).item() < 39.0


def test_groups_keep_their_own_options():
    a, b, c = (nn.Parameter(torch.ones(3, 3)) for _ in range(3))
    optimizer = SOAP([{"params": [a]}, {"params": [b], "lr": 0.0}], lr=0.1)
    optimizer.add_param_group({"params": [c], "max_precond_dim": 2})
    for _ in range(3):
        for p in (a, b, c):
            p.grad = torch.eye(3) + 0.1
        optimizer.step()
    assert torch.equal(b.detach(), torch.ones(3, 3))
    assert not torch.equal(a.detach(), torch.ones(3, 3))
    assert optimizer.basis(c) == [None, None]
    assert len(optimizer.basis(a)[0]) == 3


def test_named_parameters_and_a_tensor_learning_rate():
    net = network()
    optimizer = SOAP(net.named_parameters(), lr=torch.tensor(1e-2))
    train(net, optimizer, 3)
    other = SOAP(network().named_parameters(), lr=1e-2)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["param_names"] == [name for name, _ in net.named_parameters()]


def test_memory_is_what_the_page_says():
    m, n = 6, 10
    sizes = {}
    for name, options in (("full", {}), ("one", {"one_sided": True}), ("rank", {"factorized": True})):
        p = nn.Parameter(torch.randn(m, n))
        p.grad = torch.randn(m, n)
        optimizer = SOAP([p], **options)
        optimizer.step()
        sizes[name] = optimizer.state_bytes()
    both, small = 4 * (m * m + n * n), 4 * m * m
    assert sizes["full"] == {"moments": 4 * 2 * m * n, "factors": both, "bases": both}
    assert sizes["one"] == {"moments": 4 * 2 * m * n, "factors": small, "bases": small}
    assert sizes["rank"] == {"moments": 4 * (m * n + m + n), "factors": both, "bases": both}


def test_a_member_that_left_its_stack_does_not_keep_it_alive():
    params = [nn.Parameter(torch.ones(4, 4)) for _ in range(4)]
    optimizer = SOAP(params)
    for grads in ((1, 1, 1, 1), (1, 0, 0, 0), (1, 0, 0, 0)):
        for p, has in zip(params, grads, strict=True):
            p.grad = torch.eye(4) if has else None
        optimizer.step()
    assert all(s["exp_avg"].untyped_storage().nbytes() == 4 * 16 for s in optimizer.state.values())


def test_state_set_by_hand_is_used():
    p = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    optimizer = SOAP([p], lr=1.0, betas=(0.0, 0.0), eps=1e-30, weight_decay=0.0)
    p.grad = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64)
    optimizer.step()
    optimizer.state[p]["bases"] = [torch.eye(2, dtype=torch.float64)] * 2
    optimizer.step()
    torch.testing.assert_close(p.detach(), -torch.ones(2, 2, dtype=torch.float64))  # sign descent: Adam with β = 0


@pytest.mark.slow
def test_the_work_between_refreshes_compiles_to_one_graph():
    shapes = [(4, 4), (4, 4), (3, 4, 5), (6,)]  # full rank from the start: rounding is not amplified
    params = [[nn.Parameter(torch.ones(shape, dtype=torch.float64)) for shape in shapes] for _ in range(2)]
    optimizers = [SOAP(ps, 1e-2, precondition_frequency=4) for ps in params]
    optimizers[1].compile(backend="aot_eager")  # always with fullgraph=True: a graph break would raise
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        for pair in zip(*params, strict=True):
            grad = torch.randn(pair[0].shape, generator=generator, dtype=torch.float64)
            for p in pair:
                p.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(params[0], params[1], rtol=0, atol=1e-12)


# -- bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1e-3}, "lr must be finite and at least 0, got -0.001"),
        ({"lr": float("nan")}, "lr must be finite"),
        ({"lr": torch.ones(2)}, r"one element, got shape \(2,\)"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\)"),
        ({"betas": (-0.1, 0.9)}, "betas must be"),
        ({"betas": (0.9,)}, "betas must be two"),
        ({"eps": 0.0}, "eps must be positive"),
        ({"weight_decay": -1.0}, "weight_decay must be"),
        ({"shampoo_beta": 1.0}, "shampoo_beta must be below 1"),
        ({"shampoo_beta": float("nan")}, "shampoo_beta must be below 1"),
        ({"precondition_frequency": 0}, "precondition_frequency must be an integer of at least 1, got 0"),
        ({"precondition_frequency": 2.5}, "precondition_frequency must be an integer"),
        ({"precondition_frequency": True}, "precondition_frequency must be an integer"),
        ({"max_precond_dim": 0}, "max_precond_dim must be an integer"),
        ({"data_format": "nhwc"}, "data_format must be 'channels_first' or 'channels_last', got 'nhwc'"),
    ],
)
def test_bad_options_are_named(options, message):
    p = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=message):
        SOAP([p], **options)
    with pytest.raises(ValueError, match=message):
        SOAP([nn.Parameter(torch.ones(2, 2))]).add_param_group({"params": [p], **options})


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
def test_only_real_floating_parameters(dtype):
    with pytest.raises(ValueError, match=f"got {dtype}"):
        SOAP([torch.ones(2, 2, dtype=dtype)])
    optimizer = SOAP([nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match=f"got {dtype}"):
        optimizer.add_param_group({"params": [torch.ones(2, 2, dtype=dtype)]})
    assert len(optimizer.param_groups) == 1


def test_an_option_that_went_bad_after_construction_is_named():
    p = nn.Parameter(torch.ones(2, 2))
    p.grad = torch.eye(2)
    optimizer = SOAP([p])
    optimizer.param_groups[0]["precondition_frequency"] = 1.5
    with pytest.raises(ValueError, match=r"precondition_frequency .* got 1.5"):
        optimizer.step()


@pytest.mark.parametrize(("before", "after"), [(10, 2), (2, 10)])
def test_options_that_shape_the_state_cannot_change(before, after):
    p = nn.Parameter(torch.ones(4, 4))
    p.grad = torch.eye(4)
    optimizer = SOAP([p], max_precond_dim=before)
    optimizer.step()
    optimizer.param_groups[0]["max_precond_dim"] = after
    with pytest.raises(RuntimeError, match="cannot change once a parameter has state"):
        optimizer.step()


def test_sparse_gradients_are_refused():
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"dense gradients, got torch.sparse_coo for a parameter of shape \(5, 3\)"):
        SOAP(table.parameters()).step()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("when", [0, 3])
def test_a_bad_gradient_is_sat_out(bad, when):
    """1e30 is finite in float32, its square is not: the factor would be infinite."""
    params = [nn.Parameter(torch.ones(3, 3)) for _ in range(3)]
    optimizer = SOAP(params, precondition_frequency=2)
    generator = torch.Generator().manual_seed(0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(8):
            for i, p in enumerate(params):
                p.grad = torch.randn(3, 3, generator=generator)
                if i == 1 and step in (when, when + 1):
                    p.grad[0, 1] = bad
            before = params[1].detach().clone()
            optimizer.step()
            if step in (when, when + 1):
                assert torch.equal(before, params[1].detach())
    assert [str(w.message).split(",")[0] for w in said] == ["1 gradients are not finite"]
    assert [optimizer.state[p]["step"] for p in params] == [7, 5, 7]
    for state in optimizer.state.values():
        assert all(torch.isfinite(x).all() for x in (*state["factors"], *state["bases"], state["exp_avg"], state["exp_avg_sq"]))


def test_error_if_nonfinite_raises_before_anything_moves():
    params = [nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))]
    optimizer = SOAP(params, error_if_nonfinite=True)
    params[0].grad, params[1].grad = torch.eye(3), torch.full((3,), float("nan"))
    with pytest.raises(RuntimeError, match=r"1 gradients are not finite.* shape \(3,\) in group 0"):
        optimizer.step()
    assert not optimizer.state


def test_nothing_to_do_is_fine():
    p, empty = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(0, 3))
    optimizer = SOAP([p, empty])
    empty.grad = torch.ones(0, 3)
    optimizer.step()
    assert not optimizer.state
    with pytest.raises(ValueError, match="no basis yet"):
        optimizer.basis(p)


def small_run(steps=4, dtype=torch.float32, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(4, 4, generator=generator).to(dtype)) for _ in range(2)]
    optimizer = SOAP(params, lr=1e-2, **options)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
        optimizer.step()
    return params, optimizer


def test_goes_on_after_a_parameter_is_dropped_or_its_state_reset():
    params, optimizer = small_run()
    dropped = optimizer.param_groups[0]["params"].pop()
    optimizer.state.pop(dropped)
    optimizer.step()
    assert set(optimizer.state) == {params[0]}
    params, optimizer = small_run()
    optimizer.state.clear()
    params[1].grad = None
    before = params[0].detach().clone()
    optimizer.step()  # measures its basis anew
    optimizer.step()
    assert not torch.equal(params[0], before)


def test_a_step_under_autocast_is_the_step_without_it():
    with torch.autocast("cpu", torch.bfloat16):
        inside, _ = small_run(12, precondition_frequency=3)
    outside, _ = small_run(12, precondition_frequency=3)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


@pytest.mark.parametrize(("saved", "loaded"), [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_state_follows_a_parameter_of_another_precision(saved, loaded):
    _, source = small_run(dtype=saved)
    params, optimizer = small_run(1, dtype=loaded)
    optimizer.load_state_dict(source.state_dict())
    optimizer.step()
    assert optimizer.state[params[0]]["exp_avg"].dtype == loaded
    assert all(Q.dtype == loaded for Q in optimizer.basis(params[0]))


def test_a_basis_replaced_by_hand_is_used():
    params, optimizer = small_run(precondition_frequency=100)
    optimizer.state[params[0]]["bases"][0] = torch.eye(4)
    reference_params, reference = small_run(precondition_frequency=100)
    for p, q in zip(params, reference_params, strict=True):
        p.grad = q.grad = torch.ones(4, 4)
    optimizer.step()
    reference.step()
    assert torch.equal(optimizer.basis(params[0])[0], torch.eye(4))
    assert not torch.equal(params[0], reference_params[0])
    assert torch.equal(params[1], reference_params[1])


def test_a_bad_option_in_a_later_group_moves_nothing():
    params, optimizer = small_run()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, 2))]})
    optimizer.param_groups[1]["lr"] = -1
    before = params[0].detach().clone()
    with pytest.raises(ValueError, match="lr must be finite"):
        optimizer.step()
    assert torch.equal(params[0], before)


def test_stacks_worked_on_in_parts_give_the_same_numbers(monkeypatch):
    whole, _ = small_run(12, precondition_frequency=3)
    monkeypatch.setattr("assay.optim.soap.bucket._CPU_CHUNK", 16)
    parts, _ = small_run(12, precondition_frequency=3)
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
