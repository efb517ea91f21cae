"""Linear TimeInf beside a loop over blocks, and its leverage beside statsmodels'. 20,000 to 1,000,000 points."""

from functools import partial

import numpy as np
from sklearn.linear_model import LinearRegression
from statsmodels.api import OLS
from statsmodels.stats.outliers_influence import OLSInfluence

from assay.bench.speed import Contest
from assay.explain import TimeInf

T = 20_000
rng = np.random.default_rng(0)
series = np.sin(np.arange(T) / 30) + 0.1 * rng.normal(size=T).cumsum() / 30 + 0.3 * rng.normal(size=T)
million = np.sin(np.arange(1_000_000) / 30) + 0.3 * rng.normal(size=1_000_000)
longer = np.tile(series, 10) + 0.1 * rng.normal(size=10 * T)


def loop(m):
    """Block by block, as a direct reading of the definition: a product with the inverse Hessian for each."""
    X = np.array([series[b : b + m] for b in range(T - m)])
    Y = series[m:]
    fit = LinearRegression().fit(X, Y)
    A = np.c_[np.ones(len(X)), X]
    inverse_hessian = len(A) * np.linalg.inv(A.T @ A)
    block = np.empty(len(A))
    for b in range(len(A)):
        gradient = -A[b] * (Y[b] - X[b] @ fit.coef_ - fit.intercept_)
        block[b] = gradient @ inverse_hessian @ gradient / len(A)
    return np.array([block[max(0, t - m) : t + 1].mean() for t in range(T)])


def hat_diagonal(m=100):
    windows = np.lib.stride_tricks.sliding_window_view(series, m)[:-1]
    A = np.c_[np.ones(len(windows)), windows]
    return OLSInfluence(OLS(series[m:], A).fit()).hat_matrix_diag


def ours(m):
    return TimeInf(m).fit(series).decision_scores_


def whole_matrix(m=100):
    """The same scores from one QR of the whole lag matrix."""
    A = np.c_[np.ones(len(longer) - m), np.lib.stride_tricks.sliding_window_view(longer, m)[:-1]]
    Q = np.linalg.qr(A)[0]
    residual = longer[m:] - Q @ (Q.T @ longer[m:])
    return np.square(residual) * np.square(Q).sum(axis=1)


def normal_equations(m=100):
    """The same scores of a million points from the whole lag matrix and its normal equations, the fastest plain NumPy."""
    A = np.c_[np.ones(len(million) - m), np.lib.stride_tricks.sliding_window_view(million, m)[:-1]]
    G = np.linalg.inv(A.T @ A)
    residual = million[m:] - A @ (G @ (A.T @ million[m:]))
    return np.square(residual) * np.einsum("bq,bq->b", A @ G, A)


contests = [
    Contest(
        "scores, 25 lags", ours=partial(ours, 25), peer=partial(loop, 25), peer_name="loop over blocks", target=1 / 50, rounds=5
    ),
    Contest(
        "scores, 100 lags",
        ours=partial(ours, 100),
        peer=partial(loop, 100),
        peer_name="loop over blocks",
        target=1 / 50,
        rounds=5,
        note="the loop's products with a 101 x 101 matrix are fast themselves, so less is left to gain",
    ),
    Contest(
        "fit and leverage, 100 lags",
        ours=partial(ours, 100),
        peer=hat_diagonal,
        peer_name="statsmodels OLSInfluence",
        target=1.5,
        rounds=9,
    ),
    Contest(
        "scores, 100 lags, 200,000 points",
        ours=lambda: TimeInf(100).fit(longer).decision_scores_,
        peer=whole_matrix,
        peer_name="QR of the whole lag matrix",
        memory=True,
        memory_target=0.25,
        rounds=3,
    ),
    Contest(
        "scores, 100 lags, 1,000,000 points",
        ours=lambda: TimeInf(100).fit(million).decision_scores_,
        peer=normal_equations,
        peer_name="normal equations of the whole lag matrix",
        rounds=3,
        note="ours under 10 s; the peer holds two copies of the 800 MB lag matrix",
    ),
]
