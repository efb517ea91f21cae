"""Mean-field Langevin dynamics as a torch optimizer."""

import copy
import math
import pickle
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from assay.optim import Manifold, MeanFieldLangevin, MeanFieldNet, Sphere
from assay.optim.mean_field_langevin.activation import Activation
from assay.optim.mean_field_langevin.closed_form import ClosedForm
from assay.optim.mean_field_langevin.langevin import langevin_step_
from assay.optim.mean_field_langevin.losses import SQUARED


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def data(n=40, d=4):
    x = torch.randn(n, d, generator=generator(5))
    return x, torch.tanh(x[:, 0] * x[:, 1])


def train(net, optimizer, steps, x, y):
    for _ in range(steps):
        optimizer.zero_grad()
        (0.5 * (net(x) - y).square().mean()).backward()
        optimizer.step()
    return net.particles.detach().clone()


@pytest.mark.parametrize("manifold", [None, Sphere(), Sphere(joint_axes=2)])
def test_automatic_differentiation_and_the_closed_form_walk_together(manifold):
    """With the noise on: one generator, one path."""
    x, y = (t.double() for t in data())
    net = MeanFieldNet(4, 12, manifold=manifold, generator=generator()).double()
    if manifold is not None:
        net.particles.data = manifold.projx(net.particles.data)
    W = net.particles.detach().clone()[None]
    decay = 0.01 if manifold is None else 0.0
    train(net, MeanFieldLangevin([net.particles], 0.02, 500.0, decay, manifold=manifold, generator=generator(1)), 50, x, y)
    form, noise, inputs = ClosedForm(Activation(), 4.0), generator(1), torch.cat([x, torch.ones(40, 1).double()], 1)
    for _ in range(50):
        drift = form.drift(W, inputs, y, torch.full((40,), 1 / 40, dtype=torch.float64), SQUARED)[1]
        langevin_step_(W[0], drift[0], 0.02, 500.0, weight_decay=decay, manifold=manifold, generator=noise)
    torch.testing.assert_close(net.particles.detach(), W[0], rtol=0, atol=1e-9)


def test_one_step_is_the_formula():
    p = nn.Parameter(torch.randn(3, 5, generator=generator(), dtype=torch.float64))  # particles along the second axis
    before, grad = p.detach().clone(), torch.randn(3, 5, generator=generator(1), dtype=torch.float64)
    for scale, width in ((True, 5), (False, 1)):
        p.data, p.grad = before.clone(), grad
        options = {"particle_dim": 1, "scale_by_width": scale, "generator": generator(2)}
        MeanFieldLangevin([p], 0.1, 7.0, 0.3, **options).step()
        xi = torch.empty(5, 3, dtype=torch.float64).normal_(generator=generator(2)).T
        expected = before - 0.1 * (width * grad + 0.3 * before) + math.sqrt(2 * 0.1 / 7) * xi
        torch.testing.assert_close(p.detach(), expected)


def test_zero_temperature_is_gradient_descent_on_width_times_the_loss():
    x, y = data()
    ours = MeanFieldNet(4, 10, generator=generator())
    theirs = copy.deepcopy(ours)
    a = train(ours, MeanFieldLangevin(ours.parameters(), 0.05, math.inf, 0.1), 20, x, y)
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.05 * 10, weight_decay=0.1 / 10)
    torch.testing.assert_close(a, train(theirs, sgd, 20, x, y), rtol=1e-4, atol=1e-6)


def test_relabelling_particles_changes_nothing_but_their_order():
    x, y = data()
    order = torch.randperm(10, generator=generator(9))
    ours = MeanFieldNet(4, 10, generator=generator())
    theirs = copy.deepcopy(ours)
    theirs.particles.data = theirs.particles.data[order]
    a = train(ours, MeanFieldLangevin(ours.parameters(), 0.05, math.inf), 20, x, y)
    b = train(theirs, MeanFieldLangevin(theirs.parameters(), 0.05, math.inf), 20, x, y)
    torch.testing.assert_close(a[order], b, rtol=1e-4, atol=1e-6)


def test_noise_is_private_fresh_and_seeded():
    def moves(steps, **options):
        p = nn.Parameter(torch.zeros(50, 3))
        optimizer = MeanFieldLangevin([p], 0.1, 5.0, **options)
        path = [p.detach().clone()]
        for _ in range(steps):
            p.grad = torch.zeros_like(p)
            optimizer.step()
            path.append(p.detach().clone())
        return [b - a for a, b in pairwise(path)]

    first, second = moves(2, generator=generator())
    assert not torch.allclose(first, second)
    assert torch.equal(first, moves(1, generator=generator())[0])
    torch.manual_seed(3)
    a = moves(1)[0]
    state = torch.get_rng_state()
    b = moves(1)[0]
    assert not torch.equal(a, b)  # two optimizers do not share their noise
    torch.manual_seed(3)
    assert torch.equal(moves(1)[0], a)
    assert torch.equal(torch.get_rng_state(), state)  # only a seed was drawn from the global generator


@pytest.mark.parametrize("how", ["state_dict", "deepcopy", "pickle"])
def test_a_resumed_run_is_the_same_run(how, tmp_path):
    x, y = data()
    net = MeanFieldNet(4, 8, manifold=Sphere(), generator=generator())
    optimizer = MeanFieldLangevin(net.parameters(), 0.05, 100.0, manifold=Sphere(), generator=generator(1))
    train(net, optimizer, 7, x, y)
    if how == "state_dict":
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
        saved = torch.load(tmp_path / "run.pt", weights_only=True)
        other = MeanFieldNet(4, 8, manifold=Sphere(), generator=generator(8))
        again = MeanFieldLangevin(other.parameters(), 0.5, 1.0, manifold=Sphere())
        other.load_state_dict(saved["net"])
        again.load_state_dict(saved["optimizer"])
    elif how == "deepcopy":
        other, again = copy.deepcopy((net, optimizer))
    else:
        other, again = pickle.loads(pickle.dumps((net, optimizer)))
    assert torch.equal(train(net, optimizer, 5, x, y), train(other, again, 5, x, y))


def test_schedulers_groups_and_closures():
    x, y = data()
    net = MeanFieldNet(4, 8, output_scale=1.0, generator=generator())
    head = nn.Parameter(torch.zeros(6))
    groups = [{"params": net.particles, "weight_decay": 0.1}, {"params": head, "beta": math.inf, "scale_by_width": False}]
    optimizer = MeanFieldLangevin(groups, 0.1, 100.0, generator=generator())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def closure():
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean() + (head - 1).square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.05]
    assert optimizer.step(closure) < first
    torch.testing.assert_close(head.detach(), torch.full((6,), 0.2 + 0.1 * 0.8))
    untouched = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": untouched})
    optimizer.step()
    assert torch.equal(untouched.detach(), torch.ones(3))  # no gradient, no noise


def test_a_schedule_may_start_and_end_at_zero():
    p = nn.Parameter(torch.ones(5, 3))
    optimizer = MeanFieldLangevin([p], 0.1, 10.0, weight_decay=0.1, generator=generator())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: [0.0, 1.0, 0.0][step])
    moved = []
    for _ in range(3):
        before, p.grad = p.detach().clone(), torch.ones(5, 3)
        optimizer.step()
        moved.append(not torch.equal(before, p.detach()))
        schedule.step() if len(moved) < 3 else None
    assert moved == [False, True, False]


def test_torchs_checkpoints_take_the_optimizer():
    """They make a step of rate 0 to fill the state."""
    net = MeanFieldNet(4, 8, generator=generator())
    before = net.particles.detach().clone()
    saved = get_optimizer_state_dict(net, MeanFieldLangevin(net.parameters(), 0.1, 10.0))
    assert saved["param_groups"][0]["params"] == ["particles"]
    assert torch.equal(before, net.particles.detach())


def test_noise_of_another_device_is_left_behind():
    p = nn.Parameter(torch.ones(5, 3))
    optimizer = MeanFieldLangevin([p], 0.1, 10.0, generator=generator(4))
    saved = {**MeanFieldLangevin([p], 0.2, 20.0).state_dict(), "noise": torch.zeros(16, dtype=torch.uint8)}  # as of a GPU
    with pytest.warns(RuntimeWarning, match="not of a generator on cpu"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.2
    assert torch.equal(optimizer.generator.get_state(), generator(4).get_state())


class Stiefel:
    """Orthonormal columns, with QR as the retraction."""

    def projx(self, x):
        Q, R = torch.linalg.qr(x)
        return Q * R.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]

    def proju(self, x, u):
        xu = x.mT @ u
        return u - x @ (xu + xu.mT) / 2

    def expmap(self, x, u):
        return self.projx(x + u)


def test_a_manifold_of_ones_own():
    assert isinstance(Stiefel(), Manifold)
    stiefel = Stiefel()
    p = nn.Parameter(stiefel.projx(torch.randn(30, 5, 2, generator=generator(), dtype=torch.float64)))
    A = torch.diag(torch.tensor([5.0, 4.0, 1.0, 1.0, 0.0], dtype=torch.float64))
    optimizer = MeanFieldLangevin([p], 0.05, 1e4, manifold=stiefel, generator=generator())
    for _ in range(300):
        optimizer.zero_grad()
        (-(p * (A @ p)).sum((1, 2))).mean().backward()
        optimizer.step()
    Q = p.detach()
    torch.testing.assert_close(Q.mT @ Q, torch.eye(2).double().expand(30, 2, 2), rtol=0, atol=1e-10)
    assert ((Q.mT @ A @ Q).diagonal(dim1=1, dim2=2).sum(1) > 8.9).all()  # the two leading eigenvectors: 5 + 4


def test_a_manifold_of_geoopts():
    geoopt = pytest.importorskip("geoopt")
    x, y = data()
    start = MeanFieldNet(4, 8, manifold=Sphere(), generator=generator())
    paths = []
    for manifold in (Sphere(), geoopt.Sphere()):
        net = copy.deepcopy(start)
        optimizer = MeanFieldLangevin(net.parameters(), 0.05, 100.0, manifold=manifold, generator=generator(1))
        paths.append(train(net, optimizer, 20, x, y))
    torch.testing.assert_close(*paths, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "lr must be positive"),
        ({"lr": math.nan}, "lr must be positive"),
        ({"beta": 0.0}, "beta must be > 0"),
        ({"beta": math.nan}, "beta must be > 0"),
        ({"weight_decay": -1.0}, "weight_decay must be finite"),
        ({"weight_decay": 0.1, "manifold": Sphere()}, "weight_decay has no meaning on a manifold"),
        ({"manifold": "sphere"}, "manifold must have projx, proju and expmap"),
        ({"manifold": Sphere}, "manifold must have projx, proju and expmap"),
        ({"manifold": Sphere(1e-4)}, "particles must start on the manifold"),
        ({"manifold": Sphere(3.0)}, "particles must start on the manifold"),
        ({"particle_dim": 2}, r"particle_dim must lie in \[-2, 2\)"),
        ({"particle_dim": -3}, r"particle_dim must lie in \[-2, 2\)"),
    ],
)
def test_bad_arguments(options, message):
    p = nn.Parameter(Sphere().projx(torch.randn(4, 3, generator=generator())))
    with pytest.raises(ValueError, match=message):
        MeanFieldLangevin([p], **{"lr": 0.1, "beta": 10.0, **options})


def test_bad_particles_and_gradients():
    for dtype in (torch.bfloat16, torch.complex64):
        with pytest.raises(ValueError, match="float32 or float64"):
            MeanFieldLangevin([nn.Parameter(torch.zeros(3, 2, dtype=dtype))], 0.1, 10.0)
    p, q = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 2))
    optimizer = MeanFieldLangevin([p, q], 0.1, 10.0)
    p.grad, q.grad = torch.zeros(3, 2), torch.full((3, 2), math.nan)
    with pytest.raises(RuntimeError, match=r"shape \(3, 2\) is not finite: try a smaller lr"):
        optimizer.step()
    assert torch.equal(p.detach(), torch.ones(3, 2))
    q.grad = torch.zeros(3, 2).to_sparse()
    with pytest.raises(RuntimeError, match="dense gradients"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="lr must be positive"):
        optimizer.step()


DISTRIBUTED = """
import os
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from assay.optim import MeanFieldLangevin, MeanFieldNet, Sphere

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(5))
y = torch.tanh(x[:, 0] * x[:, 1])
net = MeanFieldNet(4, 16, manifold=Sphere(), generator=torch.Generator().manual_seed(0))
model = DistributedDataParallel(net)
noise = torch.Generator().manual_seed(1)  # one seed for all ranks
optimizer = MeanFieldLangevin(model.parameters(), 0.05, 500.0, manifold=Sphere(), generator=noise)
for _ in range(120):
    optimizer.zero_grad()
    (0.5 * (model(x[rank::2]) - y[rank::2]).square().mean()).backward()
    optimizer.step()
torch.save(net.particles.detach(), f"{sys.argv[1]}/rank{rank}.pt")
dist.destroy_process_group()
os._exit(0)  # gloo's threads may outlive the group, and abort a process that ends as usual
"""


@pytest.mark.slow
def test_two_processes_walk_as_one(tmp_path):
    """Data parallelism under torchrun: each rank sees half the rows, all draw the same noise."""
    script = tmp_path / "run.py"
    script.write_text(DISTRIBUTED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*torchrun, str(script), str(tmp_path)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    ranks = [torch.load(Path(tmp_path) / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert torch.equal(*ranks)
    x = torch.randn(64, 4, generator=generator(5))
    net = MeanFieldNet(4, 16, manifold=Sphere(), generator=generator())
    optimizer = MeanFieldLangevin(net.parameters(), 0.05, 500.0, manifold=Sphere(), generator=generator(1))
    alone = train(net, optimizer, 120, x, torch.tanh(x[:, 0] * x[:, 1]))
    torch.testing.assert_close(ranks[0], alone, rtol=0, atol=1e-4)
