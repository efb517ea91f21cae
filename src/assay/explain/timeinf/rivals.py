"""What TimeInf is held against: other ways to score points and to value blocks, each in a few lines."""

from collections.abc import Callable

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from scipy.spatial.distance import cdist
from sklearn.linear_model import LinearRegression

from .blocks import Blocks, time_average
from .decide import paper_scaling


def lag_matrix(z: np.ndarray, m: int) -> tuple[np.ndarray, np.ndarray]:
    """Lags ``(n, m D)`` and targets ``(n, D)`` of all blocks."""
    ((_, X, Y),) = Blocks([z], m).chunks(len(z))
    return np.ascontiguousarray(X), Y


def standardised(z: np.ndarray) -> np.ndarray:
    return (z - z.mean(axis=0)) / np.where(np.ptp(z, axis=0) == 0, 1.0, z.std(axis=0))


def on_windows(z: np.ndarray, m: int, score: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Score windows of ``m`` points ``(T - m + 1, m D)`` and give each point the mean over its windows, ``(T,)``."""
    windows = np.ascontiguousarray(sliding_window_view(z.ravel(), m * z.shape[1])[:: z.shape[1]])
    return time_average(np.asarray(score(windows)), m - 1, "all")[0]


def official_scores(z: np.ndarray, m: int) -> np.ndarray:
    """The released linear detector: Hessian without the intercept, lags only, min-max, fold; no standardising.

    It scores the first ``T - m`` points; the others are NaN. Its reshaping for several channels mixes time and channels and
    is not followed here: channels are scored one by one and averaged.
    """
    scores = np.full(len(z), np.nan)
    total = np.zeros(len(z) - m)
    for channel in z.T:
        X, Y = lag_matrix(channel[:, None], m)
        R = (Y - LinearRegression().fit(X, Y).predict(X))[:, 0]
        leverage = np.einsum("bq,bq->b", X @ np.linalg.pinv(X.T @ X, hermitian=True), X)
        points = time_average(np.square(R) * leverage, m, "lags")[0][: len(R)]
        total += paper_scaling(points, [points], m)
    scores[: len(z) - m] = total / z.shape[1]
    return scores


def knn_shapley(train: np.ndarray, valid: np.ndarray, m: int, *, share: float = 0.1) -> np.ndarray:
    r"""Exact Shapley values of training blocks for nearest-neighbour forecasting of the validation blocks, ``(n,)``.

    The worth of a set of blocks for a validation block ``c`` is the mean over its ``K`` nearest members ``i`` of
    :math:`u_i = \lVert y_c - \bar y \rVert^2 - \lVert y_c - y_i \rVert^2`, counted as ``1/K`` each; then, from the farthest
    block inwards (Jia et al., 2019), :math:`s_N = u_N / N` and
    :math:`s_i = s_{i+1} + (u_i - u_{i+1}) \min(K, i) / (K i)`.
    """
    X, Y = lag_matrix(train, m)
    X_valid, Y_valid = lag_matrix(valid, m)
    n = len(X)
    K = max(1, int(share * n))
    order = np.argsort(cdist(X_valid, X, "sqeuclidean"), axis=1, kind="stable")  # (n_valid, n)
    u = cdist(Y_valid, Y.mean(axis=0, keepdims=True), "sqeuclidean") - cdist(Y_valid, Y, "sqeuclidean")
    u = np.take_along_axis(u, order, axis=1)
    rank = np.arange(1, n)
    steps = (u[:, :-1] - u[:, 1:]) * np.minimum(K, rank) / (K * rank)
    last = u[:, -1:] * min(K, n) / (K * n)
    s = np.concatenate([np.cumsum(steps[:, ::-1], axis=1)[:, ::-1] + last, last], axis=1)
    values = np.empty_like(s)
    np.put_along_axis(values, order, s, axis=1)
    return values.mean(axis=0)


def data_oob(train: np.ndarray, m: int, *, models: int, seed: int) -> np.ndarray:
    """Minus the mean squared error of a block under linear models whose bootstrap sample left it out, ``(n,)``.

    Data-OOB (Kwon and Zou, 2023). NaN where every sample held the block.
    """
    X, Y = lag_matrix(train, m)
    rng = np.random.default_rng(seed)
    total, count = np.zeros(len(X)), np.zeros(len(X))
    for _ in range(models):
        drawn = rng.integers(len(X), size=len(X))
        out = np.bincount(drawn, minlength=len(X)) == 0
        error = Y - LinearRegression().fit(X[drawn], Y[drawn]).predict(X)
        total += np.where(out, -np.square(error).sum(axis=1), 0.0)
        count += out
    return total / np.where(count > 0, count, np.nan)


def retrained_value(train: np.ndarray, valid: np.ndarray, m: int) -> np.ndarray:
    """What the mean validation loss of least squares gains when each block is left out and the rest refitted, ``(n,)``.

    The refit follows from the full one, ``-G a_b r_b / (1 - h_b)``, and the loss is a quadratic in it: no approximation.
    """
    X, Y = lag_matrix(train, m)
    A = np.c_[np.ones(len(X)), X]
    G = np.linalg.pinv(A.T @ A, hermitian=True)
    B = G @ (A.T @ Y)
    R = Y - A @ B
    AG = A @ G
    change = -AG / (1 - np.einsum("bq,bq->b", AG, A))[:, None]  # row b times r_b is the change of B without block b
    X_valid, Y_valid = lag_matrix(valid, m)
    C = np.c_[np.ones(len(X_valid)), X_valid]
    slope = -C.T @ (Y_valid - C @ B) / len(C)  # (q, D)
    curvature = C.T @ C / len(C)
    first = np.einsum("bq,qd,bd->b", change, slope, R)
    second = 0.5 * np.einsum("bq,qr,br->b", change, curvature, change, optimize=True) * np.square(R).sum(axis=1)
    return first + second
