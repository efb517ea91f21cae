"""The effective dimension: how much of the inputs' variance a model has to look past."""

import numpy as np
from numpy.typing import ArrayLike


def effective_dimension(cov: ArrayLike, directions: ArrayLike) -> float:
    r"""Total variance of the inputs over their variance in the relevant directions.

    From arXiv 2408.07254: a multi-index model :math:`y = g(Ux) + \xi` is learnt from about

    .. math:: d_\mathrm{eff} = \frac{\mathrm{tr}\,\Sigma}{\|\Sigma^{1/2} U^\top\|_F^2}

    samples, whatever :math:`g`. Isotropic inputs give :math:`d/k`.

    Args:
        cov: Covariance :math:`\Sigma` of the inputs, ``(d, d)``, symmetric, positive semi-definite.
        directions: :math:`U` with orthonormal rows, ``(k, d)``.

    Raises:
        ValueError: a shape that does not fit, values that are not finite, rows that are not orthonormal, a matrix that is not a
            covariance, or no variance at all in the directions.

    Example:
        >>> effective_dimension(np.diag([1.0, 1.0, 0.1, 0.1]), np.eye(4)[:2])
        1.1
    """
    Sigma, U = np.asarray(cov, dtype=np.float64), np.asarray(directions, dtype=np.float64)
    if Sigma.ndim != 2 or Sigma.shape[0] != Sigma.shape[1] or not Sigma.size:
        raise ValueError(f"cov must be (d, d), got shape {Sigma.shape}")
    if U.ndim != 2 or U.shape[1] != len(Sigma) or not 1 <= len(U) <= len(Sigma):
        raise ValueError(f"directions must be (k, {len(Sigma)}) with 1 <= k <= {len(Sigma)}, got shape {U.shape}")
    if not (np.isfinite(Sigma).all() and np.isfinite(U).all()):
        raise ValueError("cov and directions must be finite")
    if np.abs(U @ U.T - np.eye(len(U))).max() > 1e-5:
        raise ValueError("directions must have orthonormal rows: take the rows of np.linalg.qr(U.T)[0].T")
    size = np.abs(Sigma).max()
    if np.abs(Sigma - Sigma.T).max() > 1e-6 * size:
        raise ValueError("cov must be symmetric")
    if np.linalg.eigvalsh(Sigma)[0] < -1e-6 * size:
        raise ValueError("cov must be positive semi-definite")
    relevant = np.trace(U @ Sigma @ U.T)
    if not relevant > 0:
        raise ValueError("the inputs do not vary in these directions: the effective dimension is infinite")
    return float(np.trace(Sigma) / relevant)
