"""The study's data: synthetic multi-index models, real tables with columns of noise appended, a table of one's own."""

import csv
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn import datasets
from sklearn.model_selection import train_test_split

from .fitting import is_rounding

Array = NDArray[np.float64]

TARGETS: dict[str, tuple[int, Callable[[Array], Array]]] = {
    "tanh": (2, lambda z: np.tanh(2 * z[:, 0] * z[:, 1])),
    "he3": (1, lambda z: (z[:, 0] ** 3 - 3 * z[:, 0]) / 6**0.5),
    "parity": (3, lambda z: np.sign(z[:, 0] * z[:, 1] * z[:, 2])),
}
TABLES: dict[str, Callable[..., Any]] = {
    "diabetes": datasets.load_diabetes,
    "breast_cancer": datasets.load_breast_cancer,
    "digits": datasets.load_digits,
}


class Problem(NamedTuple):
    """Rows to fit and rows to test on; ``U (k, d)`` spans the relevant directions where they are known.

    ``kinds`` says which arms take it up; without any, all do.
    """

    X: Array
    y: Array
    test_x: Array
    test_y: Array
    U: Array | None = None
    kinds: tuple[str, ...] = ()


def multi_index(target: str, d: int, a: float, n: int, n_test: int, noise: float, rng: np.random.Generator) -> Problem:
    """``y = g(Ux) + noise`` with relevant variance 1 and variance ``a`` elsewhere, in a random orthonormal basis."""
    k, g = TARGETS[target]
    basis = np.linalg.qr(rng.normal(size=(d, d)))[0].T
    z = rng.normal(size=(n + n_test, d)) * np.r_[np.ones(k), np.full(d - k, a**0.5)]
    X, y = z @ basis, g(z)
    y[:n] += noise * rng.normal(size=n)
    return Problem(X[:n], y[:n], X[n:], y[n:], basis[:k])


def real_table(name: str, p: int, scale: float, most: int, rng: np.random.Generator) -> Problem:
    """A table of scikit-learn's, its columns standardised, ``p`` Gaussian columns of standard deviation ``scale`` appended."""
    if name not in TABLES:
        raise ValueError(f"tables must be among {', '.join(TABLES)}, got {name!r}")
    X, y = TABLES[name](return_X_y=True)
    return split(X.astype(float), y.astype(float), p, scale, most, rng)


def own_table(path: str, target: str, p: int, scale: float, most: int, rng: np.random.Generator) -> Problem:
    """A CSV file with a header; the column ``target``, or the last one, is learnt from all others."""
    with open(path, newline="", encoding="utf-8-sig") as file:  # spreadsheets put a byte-order mark first
        header, *rows = [row for row in csv.reader(file) if row] or [[]]
    if target and target not in header:
        raise ValueError(f"{path} has no column {target!r}, only {', '.join(header)}")
    try:
        values = np.array(rows, dtype=float)
    except ValueError as error:
        raise ValueError(f"{path} must hold numbers below its header: {error}") from None
    if values.ndim != 2 or values.shape[1] != len(header) or len(values) < 20 or not np.isfinite(values).all():
        raise ValueError(f"{path} must hold at least 20 complete rows of finite numbers")
    at = header.index(target) if target else len(header) - 1
    return split(np.delete(values, at, axis=1), values[:, at], p, scale, most, rng)


def split(X: Array, y: Array, p: int, scale: float, most: int, rng: np.random.Generator) -> Problem:
    """70 % of the rows, at most ``most``, to fit; the rest to test on."""
    X, test_x, y, test_y = train_test_split(X, y, test_size=0.3, random_state=int(rng.integers(2**31)))
    X, y = X[:most], y[:most]
    spread = X.std(0)
    spread[is_rounding(spread, X)] = 1.0
    parts = [(x - X.mean(0)) / spread for x in (X, test_x)]
    X, test_x = (np.c_[x, scale * rng.normal(size=(len(x), p))] for x in parts)
    return Problem(X, y, test_x, test_y)
