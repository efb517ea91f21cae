"""A step of the closed form beside automatic differentiation of the same network, and beside an epoch of scikit-learn's MLP."""

from functools import cache

import numpy as np
import torch
from sklearn.neural_network import MLPRegressor
from torch.nn import functional as F

from assay.bench.speed import Contest
from assay.optim import MeanFieldLangevinRegressor

STEPS, D, M = 500, 30, 100


@cache
def rows(n: int) -> tuple[np.ndarray, np.ndarray]:
    X = np.random.default_rng(0).normal(size=(n, D))
    return X, np.tanh(2 * X[:, 0] * X[:, 1])


def ours(n, manifold, beta):
    model = MeanFieldLangevinRegressor(
        M, manifold, beta=beta, max_iter=STEPS, lr=0.04, dtype="float32", random_state=0, weight_decay=None
    )
    return lambda: model.fit(*rows(n))


def gradient_descent(n):
    """The plain loop: forward, backward, one step, in torch."""

    def call():
        X, y = (torch.as_tensor(part).float() for part in rows(n))
        y = (y - y.mean()) / y.std()
        x = torch.cat([X, torch.ones(n, 1)], 1)
        torch.manual_seed(0)
        W = torch.nn.Parameter(torch.randn(2 * M, D + 1) / D**0.5)
        sign = torch.tensor([1.0, -1.0]).repeat(M) * (4 / M)
        optimizer = torch.optim.SGD([W], lr=0.04 * M, weight_decay=1e-4 / M)
        for _ in range(STEPS):
            optimizer.zero_grad()
            z = x @ W.T
            phi = F.softplus(z, beta=5) - F.softplus(z - 10, beta=5)
            (0.5 * (phi @ sign - y).square().mean()).backward()
            optimizer.step()

    return call


def adam_epochs(n):
    model = MLPRegressor(
        hidden_layer_sizes=(2 * M,), batch_size=200, max_iter=STEPS, tol=0, n_iter_no_change=STEPS + 1, random_state=0
    )

    def call():
        X, y = rows(n)
        model.fit(X, y)

    return call


contests = [
    *(
        Contest(
            f"{STEPS} steps, {n} rows, 100 particles, {manifold}",
            ours(n, manifold, 2e3),
            gradient_descent(n),
            "torch autograd, full-batch GD of the same net",
            1.15,
            rounds=7,
            note="ours also draws noise",
        )
        for n in (400, 1200)
        for manifold in ("euclidean", "sphere")
    ),
    Contest(
        f"{STEPS} steps beside {STEPS} epochs, 1,200 rows",
        ours(1200, "sphere", 2e3),
        adam_epochs(1200),
        "scikit-learn MLPRegressor(solver='adam'), 200 neurons",
        1.0,
        rounds=7,
        note="an epoch is six updates, a step is one",
    ),
]
