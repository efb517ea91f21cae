"""Does dropping blocks in the order of their value help or hurt the forecaster?"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import clone

from .blocks import Blocks

if TYPE_CHECKING:
    from pandas import DataFrame

Order = Literal["most_valuable", "least_valuable"]
REPLACE_BY = 30  # a removed time point becomes the mean of this many values before it, as in the official code


def prune_curve(
    values: ArrayLike,
    X_train: ArrayLike,
    X_test: ArrayLike,
    fractions: Sequence[float],
    estimator: Any,
    *,
    order: Order = "most_valuable",
    block_length: int | None = None,
) -> "DataFrame":
    """Test error of ``estimator`` after a growing share of the training series is taken away.

    Values of blocks: the blocks are dropped. Values of time points: the points are replaced by the mean of the 30 values
    before them (each already replaced where it was removed too). A value of NaN goes last.

    Args:
        values: One value per block ``(T - m,)`` or per time point ``(T,)``, as from ``TimeInf.influence_on``.
        X_train: Training series ``(T,)`` or ``(T, D)``.
        X_test: Test series, the same number of channels.
        fractions: Shares to remove, each in [0, 1).
        estimator: scikit-learn regressor from lags ``(n, m D)`` to targets ``(n,)``, or ``(n, D)`` when ``D > 1``.
        order: What goes first.
        block_length: ``m``; needed with time points, otherwise ``T`` minus the number of values.

    Returns:
        A row a fraction: ``fraction``, ``removed`` (how many), ``mse``, ``relative_mse`` (over that of the full training
        series), ``r2``.

    Raises:
        ValueError: lengths that do not fit each other, a fraction outside [0, 1), no block left, values not finite.

    Example:
        >>> from sklearn.linear_model import LinearRegression
        >>> x = np.sin(np.arange(300) / 5) + 0.1 * np.random.default_rng(0).normal(size=300)
        >>> values = np.arange(190.0)                               # as if later blocks were worth more
        >>> prune_curve(values, x[:200], x[200:], [0, 0.5], LinearRegression()).removed.tolist()
        [0, 95]
    """
    import pandas as pd

    values, train, test = np.asarray(values, dtype=float), _series(X_train, "X_train"), _series(X_test, "X_test")
    by_time = len(values) == len(train)
    if values.ndim != 1 or np.isinf(values).any():
        raise ValueError(f"values must be one finite (or NaN) number each, got shape {values.shape}")
    if by_time and block_length is None:
        raise ValueError("values of time points need block_length")
    m = len(train) - len(values) if block_length is None else block_length
    if not 1 <= m < min(len(train), len(test)) or (not by_time and m != len(train) - len(values)):
        raise ValueError(
            f"{len(values)} values fit neither the {len(train)} points of X_train nor its blocks"
            f" with block_length={block_length}, or X_test ({len(test)} points) holds no block"
        )
    if train.shape[1] != test.shape[1]:
        raise ValueError(f"X_test has {test.shape[1]} channels, X_train has {train.shape[1]}")
    if order not in ("most_valuable", "least_valuable"):
        raise ValueError(f"order must be 'most_valuable' or 'least_valuable', got {order!r}")
    if not all(0 <= fraction < 1 for fraction in fractions):
        raise ValueError(f"fractions must lie in [0, 1), got {list(fractions)}")

    first = np.argsort(-values if order == "most_valuable" else values, kind="stable")  # NaN sorts last either way
    X_held, Y_held = _all_blocks(test, m)
    X, Y = _all_blocks(train, m)

    def error(X: np.ndarray, Y: np.ndarray) -> float:
        predicted = np.asarray(clone(estimator).fit(X, _target(Y)).predict(X_held)).reshape(Y_held.shape)
        return float(np.square(Y_held - predicted).mean())

    full = error(X, Y)
    rows = []
    for fraction in fractions:
        removed = first[: round(fraction * len(values))]
        if by_time:
            mse = error(*_all_blocks(_replaced(train, removed), m))
        else:
            kept = np.setdiff1d(np.arange(len(values)), removed, assume_unique=True)
            if len(kept) == 0:
                raise ValueError(f"a fraction of {fraction} leaves no block to train on")
            mse = error(X[kept], Y[kept])
        r2 = 1 - mse / max(float(Y_held.var(axis=0).mean()), np.finfo(float).tiny)
        rows.append((fraction, len(removed), mse, mse / max(full, np.finfo(float).tiny), r2))
    return pd.DataFrame(rows, columns=["fraction", "removed", "mse", "relative_mse", "r2"])


def _replaced(z: np.ndarray, removed: np.ndarray) -> np.ndarray:
    z = z.copy()
    for t in np.sort(removed):  # in order of time: a gap is filled from what was filled before it
        if t > 0:
            z[t] = z[max(0, t - REPLACE_BY) : t].mean(axis=0)
    return z


def _all_blocks(z: np.ndarray, m: int) -> tuple[np.ndarray, np.ndarray]:
    ((_, X, Y),) = Blocks([z], m).chunks(len(z))
    return X, Y


def _target(Y: np.ndarray) -> np.ndarray:
    return Y[:, 0] if Y.shape[1] == 1 else Y


def _series(X: ArrayLike, name: str) -> np.ndarray:
    z = np.asarray(X, dtype=float)
    z = z[:, None] if z.ndim == 1 else z
    if z.ndim != 2 or not np.isfinite(z).all():
        raise ValueError(f"{name} must be a finite series (T,) or (T, D), got shape {z.shape}")
    return z
