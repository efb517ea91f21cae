"""The effective dimension of a data set whose relevant directions are unknown."""

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_X_y

from .estimators import MeanFieldLangevinRegressor
from .fitting import variance_ratio


def estimate_effective_dimension(
    X: ArrayLike, y: ArrayLike, k: int, method: Literal["agop"] = "agop", *, model: Any = None
) -> float:
    r"""The effective dimension (arXiv 2408.07254) with directions estimated from the data.

    They are the first ``k`` eigenvectors of the average gradient outer product (AGOP)
    :math:`\frac1n \sum_i \nabla\hat y(x_i) \nabla\hat y(x_i)^\top` of a fit :math:`\hat y`; see `effective_dimension`. Where
    the fit has found nothing the directions are chance, and the value is near :math:`d/k`.

    Args:
        X, y: Inputs ``(n, d)`` and target ``(n,)``. The value depends on the units of the columns.
        k: Number of directions, in [1, d].
        method: ``"agop"``.
        model: What to fit, in place: a regressor with ``index_directions``. By default a `MeanFieldLangevinRegressor`
            seeded with 0.

    Raises:
        ValueError: an unknown method; ``k`` out of range; NaN.

    Example:
        >>> X = np.random.default_rng(0).normal(size=(300, 6)) * [1, 1, 0.3, 0.3, 0.3, 0.3]
        >>> 1.0 < estimate_effective_dimension(X, X[:, 0] * X[:, 1], k=2) < 1.4  # exactly: 1 + 4 · 0.09 / 2 = 1.18
        True
    """
    if method != "agop":
        raise ValueError(f"method must be 'agop', got {method!r}")
    inputs, target = check_X_y(X, y, dtype=np.float64, y_numeric=True)
    if not 1 <= k <= inputs.shape[1]:
        raise ValueError(f"k must lie in [1, {inputs.shape[1]}], got {k}")
    fitted = (MeanFieldLangevinRegressor(random_state=0) if model is None else model).fit(inputs, target)
    return variance_ratio(inputs, fitted.index_directions(k))
