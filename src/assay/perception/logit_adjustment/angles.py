"""Where each rule puts the boundary between two classes whose directions form a simplex."""

import math
from typing import Literal

import torch
from torch import Tensor

from .checks import Counts, checked_counts, checked_norms, checked_strength

DEFAULT_STRENGTH = {"optimal": 0.5, "mla": 0.5, "ala": 1.0}


def simplex_angle(classes: int) -> float:
    """ρ = arccos(−1/(K−1)): the angle between any two of K directions that are as far apart as they can be."""
    return math.acos(-1.0 / (classes - 1))


def boundary_angles(
    class_counts: Counts,
    kind: Literal["optimal", "mla", "ala"] = "optimal",
    *,
    strength: float | None = None,
    feature_norms: Counts | float | None = None,
) -> Tensor:
    r"""Angle from class k's direction to its boundary with class k', for every pair.

    From *Multiplicative Logit Adjustment Approximates Neural-Collapse-Aware Decision Boundary Adjustment* (Hasegawa &
    Sato, ICLR 2025). After neural collapse the class directions enclose :math:`\rho = \arccos(-1/(K-1))`, and the two
    sides of a boundary share it, :math:`\theta_{k,k'} + \theta_{k',k} = \rho`:

    .. math::
        \theta^*_{k,k'} &= \rho \frac{a_{k'}}{a_k + a_{k'}}, \quad a_k = n_k^\tau m_k \\
        \tan\theta^{MLA}_{k,k'} &= \frac{(n_{k'}/n_k)^\gamma - \cos\rho}{\sin\rho} \\
        \theta^{ALA}_{k,k'} &= \frac{\rho}{2} - \arcsin\frac{\tau\log(n_k/n_{k'})}{2 \bar m \sin(\rho/2)},
            \quad \bar m = \frac{\sum_k n_k m_k}{\sum_k n_k}

    The additive boundary depends on how long features are, the multiplicative one does not.

    Args:
        class_counts: Training rows of each class, ``(K,)``, positive, K ≥ 2.
        kind: ``"optimal"`` (what :class:`OneVsOneAdjuster` realises), ``"mla"`` or ``"ala"``.
        strength: The exponent τ (optimal, default 0.5), γ (mla, 0.5) or the factor τ (ala, 1), ≥ 0.
        feature_norms: :math:`m_k`, norms of the class-mean features, ``(K,)`` or one number for all. The multiplicative
            boundary does not use them; ``"optimal"`` takes 1 for all by default; ``"ala"`` needs them.

    Returns:
        ``(K, K)`` float64, :math:`\theta_{k,k'}` in row k and column k'; :math:`\rho/2` on the diagonal. An additive
        boundary that falls outside the two directions' segment is put at :math:`\rho/2 \mp \pi/2`.

    Raises:
        ValueError: counts or norms that are not positive, an unknown kind, ``"ala"`` without norms.

    Example:
        >>> theta = boundary_angles([100, 1, 1])
        >>> (theta[1, 0] / theta[0, 1]).round(decimals=6)            # √(n_0 / n_1)
        tensor(10., dtype=torch.float64)
    """
    n = checked_counts(class_counts)
    if kind not in DEFAULT_STRENGTH:
        raise ValueError(f"kind must be one of {', '.join(DEFAULT_STRENGTH)}, got {kind!r}")
    strength = checked_strength("strength", DEFAULT_STRENGTH[kind] if strength is None else strength)
    rho = simplex_angle(len(n))
    if feature_norms is None:
        m = torch.ones_like(n)
    else:
        norms = torch.as_tensor(feature_norms)
        m = checked_norms(norms.expand(len(n)) if norms.ndim == 0 else norms, len(n))
    log_ratio = n.log()[:, None] - n.log()[None, :]  # log(n_k / n_k')
    if kind == "optimal":
        # a_k' / (a_k + a_k') as a logistic function: no power of a large count can overflow
        return rho * torch.sigmoid(-strength * log_ratio - m.log()[:, None] + m.log()[None, :])
    if kind == "mla":
        # The released plotting code adds cos ρ; its angles do not sum to ρ. atan2 also covers K = 2, where sin ρ = 0.
        return torch.atan2((-strength * log_ratio).exp() - math.cos(rho), torch.full_like(log_ratio, math.sin(rho)))
    if feature_norms is None:
        raise ValueError("kind 'ala' needs feature_norms: its boundary depends on how long features are")
    mean_norm = (n * m).sum() / n.sum()
    # The released code lacks the clamp and returns NaN for short features.
    return rho / 2 - torch.arcsin((strength * log_ratio / (2 * mean_norm * math.sin(rho / 2))).clamp(-1, 1))


def mean_gap(angles: Tensor, other: Tensor) -> float:
    """Mean distance in radians of two ``(K, K)`` tables of boundaries, over pairs of different classes."""
    gap = (angles - other).abs()
    return gap[~torch.eye(len(gap), dtype=torch.bool)].mean().item()
