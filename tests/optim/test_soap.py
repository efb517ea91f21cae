"""SOAP's mathematics: against a loop written from the equations, against the official code, and against limits."""

import math

import pytest
import torch
from torch import nn

from assay.optim import SOAP
from assay.optim.soap import eigenbasis
from assay.optim.soap.layout import layout_of, merged


def gradients(shape, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(steps)]


def run(grads, start=None, **options):
    """A parameter after the given gradients."""
    p = nn.Parameter((torch.ones(grads[0].shape, dtype=torch.float64) if start is None else start).clone())
    optimizer = SOAP([p], **options)
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
    return p.detach(), optimizer


def along(x, Q, axis):
    """Contracts one axis of `x` with the rows of `Q`, entry by entry of the definition."""
    return torch.tensordot(x, Q, dims=([axis], [0])).movedim(-1, axis)


def textbook(grads, *, lr, betas, eps, weight_decay, frequency, beta_s, axes, rank_one=False, normalize=False, correct=True):
    """One tensor, one loop, M kept unrotated as in the paper's Algorithm 3; `axes` are those with a factor."""
    theta, M = torch.ones_like(grads[0]), torch.zeros_like(grads[0])
    V, rows, columns = torch.zeros_like(M), 0.0, 0.0
    b1, b2 = betas
    gram = lambda g, a: torch.tensordot(g, g, dims=([k for k in range(g.ndim) if k != a],) * 2)  # noqa: E731
    S = {a: (1 - beta_s) * gram(grads[0], a) for a in axes}
    Q = {a: torch.linalg.eigh(S[a]).eigenvectors.flip(-1) for a in axes}
    for t, G in enumerate(grads[1:], start=1):
        rotated, M = G, b1 * M + (1 - b1) * G
        direction = M
        for a in axes:
            rotated, direction = along(rotated, Q[a], a), along(direction, Q[a], a)
        V = b2 * V + (1 - b2) * rotated**2
        if rank_one:
            rows, columns = b2 * rows + (1 - b2) * (rotated**2).mean(1), b2 * columns + (1 - b2) * (rotated**2).mean(0)
            V = torch.outer(rows, columns) / rows.mean()
        N = direction / (V.sqrt() + eps)
        for a in axes:
            N = along(N, Q[a].T, a)
        if normalize:
            N = N / (1e-30 + N.square().mean().sqrt())
        alpha = lr * math.sqrt(1 - b2**t) / (1 - b1**t) if correct else lr
        theta = (theta - alpha * N) * (1 - lr * weight_decay)
        for a in axes:
            S[a] = beta_s * S[a] + (1 - beta_s) * gram(G, a)
            if t % frequency == 0:
                order = torch.argsort(torch.diag(Q[a].T @ S[a] @ Q[a]), descending=True)
                V = V.index_select(a, order)
                if rank_one:
                    rows, columns = (rows[order], columns) if a == 0 else (rows, columns[order])
                Q[a] = torch.linalg.qr(S[a] @ Q[a][:, order]).Q
    return theta


BASE = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize(
    ("shape", "axes", "ours", "theirs"),
    [
        ((5, 5), (0, 1), {}, {}),
        ((5, 6), (0, 1), {"shampoo_beta": 0.7}, {"beta_s": 0.7}),
        ((5, 5), (0, 1), {"precondition_frequency": 1}, {"frequency": 1}),
        ((3, 4, 5), (0, 1, 2), {}, {}),
        ((5, 9), (0,), {"max_precond_dim": 5}, {}),
        ((4, 4, 20), (0, 1), {"max_precond_dim": 5}, {}),
        ((5, 5), (0, 1), {"normalize_grads": True}, {"normalize": True}),
        ((5, 5), (0, 1), {"correct_bias": False}, {"correct": False}),
        ((4, 7), (0,), {"one_sided": True}, {}),
        ((7, 4), (1,), {"one_sided": True}, {}),
        ((5, 4, 9), (1,), {"one_sided": True}, {}),
        ((5, 5), (0, 1), {"factorized": True}, {"rank_one": True}),
        ((4, 7), (0,), {"factorized": True, "one_sided": True}, {"rank_one": True}),
        ((5, 5), (), {"factorized": True, "max_precond_dim": 2}, {"rank_one": True}),
        ((1, 6), (), {"max_precond_dim": 5}, {}),
        ((7,), (), {}, {}),
    ],
)
def test_follows_the_equations(shape, axes, ours, theirs, foreach):
    grads = gradients(shape, 24)
    expected = textbook(grads, axes=axes, **{"frequency": 3, "beta_s": 0.95, **BASE, **theirs})
    actual, _ = run(grads, foreach=foreach, **{"precondition_frequency": 3, **BASE, **ours})
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_a_stack_does_what_each_parameter_alone_does():
    """Several shapes with several members each, gradients that come and go, both ways of working."""
    shapes = [(4, 4)] * 5 + [(4, 5)] * 3 + [(3,), (), (3,), (2, 3, 4)]
    results = []
    for foreach in (True, False):
        params = [nn.Parameter(torch.ones(s, dtype=torch.float64)) for s in shapes]
        optimizer = SOAP(params, precondition_frequency=2)
        optimizer.param_groups[0]["foreach"] = foreach
        generator = torch.Generator().manual_seed(0)
        for step in range(20):
            for i, p in enumerate(params):
                grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                p.grad = None if (step + i) % 5 == 4 else grad  # an expert that saw no token
            optimizer.step()
        results.append([p.detach() for p in params])
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


# Parameter sums and squared norms after 12 steps of the official soap.py (github.com/nikhilvyas/SOAP at a1e5535), run in
# float64 with its two casts to float32 made float64. `official_input` makes the same input: every factor has full rank.
OFFICIAL = {
    "matrix": ((3, 3), {"precondition_frequency": 3}, [0.298274304015, 0.865084259391, 1.016926760122], 4.417526062663),
    "axis too long": (
        (3, 4),
        {"precondition_frequency": 2, "max_precond_dim": 3, "normalize_grads": True},
        [0.251329372166, 0.937844350755, 1.042716831061],
        6.165160723417,
    ),
    "three axes": (
        (2, 3, 4),
        {"precondition_frequency": 3, "shampoo_beta": 0.8, "betas": (0.9, 0.97)},
        [0.278976378746, 0.85398292047, 1.020194576659],
        11.599809512349,
    ),
    "convolution, merged": (
        (4, 1, 2, 2),
        {"precondition_frequency": 3, "merge_dims": True, "max_precond_dim": 4, "correct_bias": False},
        [0.29293399792, 0.847346336603, 0.998368392875],
        8.028005593883,
    ),
    "channels last, merged": (
        (4, 2, 2, 1),
        {"precondition_frequency": 3, "merge_dims": True, "max_precond_dim": 4, "data_format": "channels_last"},
        [0.281869996974, 0.855886359069, 1.014219639569],
        8.025027471195,
    ),
}


def official_input(shape, steps=12):
    i = torch.arange(math.prod(shape), dtype=torch.float64)
    start = torch.sin(0.7 * i + 0.3).reshape(shape)
    return start, [torch.sin((0.37 + 0.11 * t) * i * i + t).reshape(shape) * (1 + 0.1 * t) for t in range(1, steps + 1)]


@pytest.mark.parametrize("case", OFFICIAL)
def test_agrees_with_the_official_code(case):
    shape, options, first, square = OFFICIAL[case]
    start, grads = official_input(shape)
    theta, _ = run(grads, start, lr=0.01, **options)
    torch.testing.assert_close(theta.flatten()[:3], torch.tensor(first, dtype=torch.float64), rtol=0, atol=2e-12)
    assert theta.square().sum().item() == pytest.approx(square, abs=1e-11)


def test_agrees_with_pytorch_optimizer():
    """To rounding before the first refresh; from there it casts its QR to float32, so to float32's rounding."""
    peer_module = pytest.importorskip("pytorch_optimizer")
    shapes = [(6, 6), (6, 6), (5,), (4, 5, 6), (7, 6)]
    for steps, tolerance in ((10, 1e-13), (25, 2e-6)):
        params = [[nn.Parameter(torch.ones(s, dtype=torch.float64)) for s in shapes] for _ in range(2)]
        ours, peer = SOAP(params[0], precondition_frequency=10), peer_module.SOAP(params[1], precondition_frequency=10)
        for step in range(steps):
            for i, pair in enumerate(zip(*params, strict=True)):
                for p in pair:
                    p.grad = gradients(p.shape, 1, seed=100 * step + i)[0]
            ours.step()
            peer.step()
        torch.testing.assert_close(params[0], params[1], rtol=0, atol=tolerance)


@pytest.mark.parametrize("shape", [(4, 6), (5,), (2, 3, 4)])
def test_without_factors_it_is_adam_minus_its_first_step(shape):
    grads = gradients(shape, 30)
    ours, _ = run(grads, lr=0.03, betas=(0.8, 0.9), eps=1e-30, weight_decay=0.2, max_precond_dim=1)
    p = nn.Parameter(torch.ones(shape, dtype=torch.float64))
    adam = torch.optim.Adam([p], lr=0.03, betas=(0.8, 0.9), eps=1e-30)
    for grad in grads[1:]:
        p.grad = grad
        adam.step()
        p.data *= 1 - 0.03 * 0.2  # decay after the step, where AdamW has it before
    torch.testing.assert_close(ours, p.detach(), rtol=0, atol=1e-13)


def test_factorized_is_shampoo_with_exponent_one_half():
    r"""The paper's Claim 1: with exact averages the update is tr(L)^½ · L^{-½} G R^{-½}."""
    m, n, beta2, lr = 4, 5, 0.9, 0.1
    seen, (G,) = gradients((m, n), 12), gradients((m, n), 1, seed=7)
    L0, R0 = sum(g @ g.T for g in seen), sum(g.T @ g for g in seen)
    L, R = beta2 * L0 + (1 - beta2) * G @ G.T, beta2 * R0 + (1 - beta2) * G.T @ G
    (lam, QL), (mu, QR) = torch.linalg.eigh(L), torch.linalg.eigh(R)
    p = nn.Parameter(torch.zeros(m, n, dtype=torch.float64))
    optimizer = SOAP([p], lr, (0.0, beta2), 1e-30, 0.0, correct_bias=False, factorized=True)
    p.grad = G
    optimizer.step()
    optimizer.state[p].update(
        bases=[QL, QR], exp_avg_sq_row=torch.diag(QL.T @ L0 @ QL) / n, exp_avg_sq_column=torch.diag(QR.T @ R0 @ QR) / m
    )
    optimizer.step()
    shampoo = (QL * lam.rsqrt()) @ QL.T @ G @ (QR * mu.rsqrt()) @ QR.T
    torch.testing.assert_close(p.detach(), -lr * L.trace().sqrt() * shampoo, rtol=1e-10, atol=0)


def test_rotating_the_problem_rotates_the_path():
    """Shampoo's basis is equivariant: gradients U G Wᵀ give the path U θ Wᵀ. Adam alone fails this."""
    U, W = (torch.linalg.qr(gradients((5, 5), 1, seed)[0]).Q for seed in (1, 2))
    grads = gradients((5, 5), 20)
    start = torch.zeros(5, 5, dtype=torch.float64)
    turned = [U @ g @ W.T for g in grads]
    for options, equivariant in (({}, True), ({"max_precond_dim": 1}, False)):
        a, _ = run(grads, start, precondition_frequency=4, **options)
        b, _ = run(turned, start, precondition_frequency=4, **options)
        assert torch.allclose(U @ a @ W.T, b, rtol=0, atol=1e-11) is equivariant


def test_maximize_is_the_negated_gradient():
    grads = gradients((4, 4), 15)
    up, _ = run(grads, maximize=True, precondition_frequency=3)
    down, _ = run([-g for g in grads], precondition_frequency=3)
    assert torch.equal(up, down)
    up, _ = run([g[0] for g in grads], maximize=True)
    down, _ = run([-g[0] for g in grads])
    assert torch.equal(up, down)


def test_the_first_call_moves_nothing_and_sorts_the_basis():
    (G,) = gradients((4, 6), 1)
    theta, optimizer = run([G])
    assert torch.equal(theta, torch.ones(4, 6, dtype=torch.float64))
    for Q, gram in zip(optimizer.basis(optimizer.param_groups[0]["params"][0]), (G @ G.T, G.T @ G), strict=True):
        rotated = Q.T @ gram @ Q
        torch.testing.assert_close(rotated, torch.diag(torch.diag(rotated)), rtol=0, atol=1e-10)
        assert (torch.diag(rotated).diff() <= 1e-10).all()


@pytest.mark.parametrize("kind", ["zero", "rank one", "tiny", "normal"])
def test_the_basis_stays_orthonormal(kind):
    scale = {"zero": 0.0, "tiny": 1e-15}.get(kind, 1.0)
    grads = [scale * g for g in gradients((6, 9), 30)]
    if kind == "rank one":
        grads = [g[:, :1] @ g[:1] for g in grads]
    theta, optimizer = run(grads, precondition_frequency=1)
    assert torch.isfinite(theta).all()
    for Q in optimizer.basis(optimizer.param_groups[0]["params"][0]):
        torch.testing.assert_close(Q.T @ Q, torch.eye(len(Q), dtype=torch.float64), rtol=0, atol=1e-12)


def test_precondition_1d_is_full_matrix_adagrad_in_spirit():
    """A vector's factor is the EMA of g gᵀ; the recursion is the matrix one with a single axis."""
    grads = gradients((4,), 20)
    expected = textbook(grads, **BASE, frequency=100, beta_s=0.95, axes=(0,))
    actual, optimizer = run(grads, **BASE, precondition_frequency=100, precondition_1d=True)
    p = optimizer.param_groups[0]["params"][0]
    S = 0.05 * sum(0.95 ** (19 - i) * torch.outer(g, g) for i, g in enumerate(grads))
    torch.testing.assert_close(optimizer.state[p]["factors"][0], S, rtol=1e-12, atol=0)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)  # both start from the same rank-1 eigh


def test_large_factors_use_symmetry_without_changing_the_sum():
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(3, 517, 520, generator=generator, dtype=torch.float64)
    S = torch.eye(517, dtype=torch.float64).repeat(3, 1, 1)
    eigenbasis.add_gram(S, A, 0.9)
    torch.testing.assert_close(S, 0.9 * torch.eye(517, dtype=torch.float64) + 0.1 * A @ A.mT, rtol=0, atol=1e-11)
    assert torch.equal(S[:, :258, 258:], S[:, 258:, :258].mT)  # mirrored, not computed twice


def test_rotation_is_undone_exactly_where_some_axes_have_no_basis():
    x = gradients((2, 3, 4, 5), 1)[0]
    bases = [None, torch.linalg.qr(gradients((2, 4, 4), 1)[0]).Q, torch.linalg.qr(gradients((2, 5, 5), 1)[0]).Q]
    y = eigenbasis.rotate(x, bases)
    torch.testing.assert_close(y, torch.einsum("kabc,kbd,kce->kade", x, bases[1], bases[2]), rtol=0, atol=1e-13)
    torch.testing.assert_close(eigenbasis.rotate_back(y, bases), x, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("shape", "limit", "dims"),
    [
        ((7, 13), 10000, (91,)),
        ((8, 4, 3, 3), 40, (32, 9)),
        ((1, 1, 1), 10, (1,)),
        ((), 10, (1,)),
        ((1, 8, 1, 8), 8, (8, 8)),
        ((50, 2, 2), 10, (50, 4)),
        ((3, 50, 2), 10, (3, 50, 2)),
    ],
)
def test_merging(shape, limit, dims):
    assert merged(shape, limit) == dims
    assert math.prod(dims) == math.prod(shape)


@pytest.mark.parametrize(("shape", "limit", "dims"), [((4, 3, 2, 5), 10, (4, 5, 6)), ((3, 3, 3, 3), 3, (3, 3, 3, 3))])
def test_folding_a_channels_last_kernel_is_a_view_back(shape, limit, dims):
    layout = layout_of(shape, limit, True, False, "channels_last", False, False)
    assert layout.dims == dims
    x = torch.arange(2.0 * math.prod(shape)).reshape(2, *shape)
    stack = torch.stack([layout.fold(one) for one in x])
    assert torch.equal(stack.flatten(1), x.permute(0, 1, 4, 2, 3).flatten(1))
    back = layout.unfold(stack)
    assert torch.equal(torch.stack(back), x)
    assert back[0].untyped_storage().data_ptr() == stack.untyped_storage().data_ptr()


def test_frequency_can_be_scheduled():
    """The group is read at every step: raising the frequency stops the refreshes."""
    p = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
    optimizer = SOAP([p], precondition_frequency=1)
    before = None
    for step, grad in enumerate(gradients((4, 4), 8)):
        p.grad = grad
        optimizer.step()
        Q = optimizer.basis(p)[0].clone()
        if step > 0:
            assert torch.equal(Q, before) is (step >= 4)
        before = Q
        if step == 3:
            optimizer.param_groups[0]["precondition_frequency"] = 1000
