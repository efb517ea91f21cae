"""The adjuster that puts every pair of classes at its own optimal boundary: what the multiplicative rule approximates."""

import math
import warnings

import torch
from torch import Tensor

from .angles import boundary_angles, simplex_angle
from .checks import Counts, check_classes, check_values, checked_counts, checked_norms, checked_strength
from .tuning import TunableRule

# Comparisons held at once. Large enough to keep the vector units busy, small enough to stay in a core's cache.
_BLOCK = 2**18


class OneVsOneAdjuster(TunableRule):
    r"""Decides every pair of classes at the boundary that neural-collapse theory calls optimal; the most wins predict.

    The reference method of *Multiplicative Logit Adjustment Approximates Neural-Collapse-Aware Decision Boundary
    Adjustment* (Hasegawa & Sato, ICLR 2025). With the optimal angles :math:`\theta^*` of :func:`boundary_angles`, class
    k beats k' if and only if

    .. math:: s_k \kappa_{k,k'} > s_{k'} \kappa_{k',k}, \qquad
        \kappa_{k,k'} = \sin\theta^*_{k,k'} + \cos\rho\,\sin\theta^*_{k',k} = \sin\rho\,\cos\theta^*_{k',k} .

    Args:
        class_counts: Training rows of each class, ``(K,)``, positive, K ≥ 3.
        tau: Exponent of the counts, ≥ 0; 0.5 in theory. 0 and no norms: the plain argmax.
        feature_norms: Norms :math:`m_k` of the class-mean features on the training rows, ``(K,)``; 1 for all by default.
        break_ties: Add less than half a win, more for the class with the larger logit relative to :math:`n_k^\tau m_k`,
            so that ``argmax`` decides ties by the multiplicative rule. ``False`` returns exact shares of wins.
        check: Refuse NaN and infinite logits, as in :class:`MultiplicativeLogitAdjustment`.

    Shapes:
        - logits ``(*, K)``, output ``(*, K)``: share of the K classes that each class beats, float32 or wider. Time is
          :math:`O(BK^2)`, memory :math:`O(BK + K^2)`.

    Raises:
        ValueError: fewer than three classes (ρ = π leaves no plane), counts or norms that are not positive.

    Warns:
        UserWarning: a boundary lies at π/2 or more from a class: the distribution is too skewed for so few classes.

    Example:
        >>> wins = OneVsOneAdjuster([100, 50, 30, 20], tau=0.5, break_ties=False)
        >>> wins(torch.tensor([[3.0, 1.2, 2.9, 0.1]]))
        tensor([[0.5000, 0.2500, 0.7500, 0.0000]])
    """

    tau: Tensor
    log_weight: Tensor
    cosine: Tensor

    def __init__(
        self,
        class_counts: Counts,
        tau: float = 0.5,
        feature_norms: Counts | None = None,
        *,
        break_ties: bool = True,
        check: bool = True,
    ):
        super().__init__()
        n = checked_counts(class_counts)
        if len(n) < 3:
            raise ValueError("the 1-vs-1 adjuster needs at least 3 classes: with two, ρ = π and every κ is 0")
        tau = checked_strength("tau", tau)
        m = torch.ones_like(n) if feature_norms is None else checked_norms(feature_norms, len(n))
        theta = boundary_angles(n, "optimal", strength=tau, feature_norms=m)
        if theta.max() >= math.pi / 2:
            warnings.warn(
                f"the distribution is too skewed for {len(n)} classes at tau={tau:g}: the largest boundary angle is "
                f"{theta.max().item():.2f} > π/2, so that a class can win where its own logit is negative",
                UserWarning,
                stacklevel=2,
            )
        weight = tau * n.log() + m.log()  # log a_k
        self.break_ties, self.check = break_ties, check
        self.register_buffer("tau", torch.tensor(tau, dtype=torch.float32))
        self.register_buffer("log_weight", (weight - weight.max()).float())
        self.register_buffer("cosine", theta.T.cos().float())  # κ_{k,k'} / sin ρ, the form without cancellation

    @property
    def kappa(self) -> Tensor:
        """κ as in the paper, ``(K, K)``."""
        return math.sin(simplex_angle(len(self.log_weight))) * self.cosine

    def forward(self, logits: Tensor) -> Tensor:
        check_classes(logits, len(self.log_weight))
        if self.check:
            check_values(logits, logits, raw=True)
        K = logits.shape[-1]
        s = logits.reshape(-1, K)
        s = s.float() if s.dtype.itemsize < 4 else s  # (B, K)
        mine, theirs = self.cosine.to(s.dtype), self.cosine.T.to(s.dtype)
        wins = torch.zeros_like(s)
        width = max(1, min(K, _BLOCK // max(1, s.numel())))
        for rivals in torch.arange(K, device=s.device).split(width):  # memory stays O(BK), whatever K is
            beats = s[:, :, None] * mine[:, rivals] > s[:, None, rivals] * theirs[:, rivals]  # (B, K, width)
            wins += (beats & (s != -math.inf)[:, :, None]).sum(-1)
        if self.break_ties:
            favour = s * (-self.log_weight).exp().to(s.dtype)  # the multiplicative rule
            masked = favour == -math.inf  # a masked class keeps no wins, and does not stretch the scale of the others
            low = favour.masked_fill(masked, math.inf).amin(-1, keepdim=True)
            high = favour.amax(-1, keepdim=True)
            share = (favour - low) / (high - low).clamp_min(torch.finfo(s.dtype).tiny)
            wins += 0.49 * share.masked_fill(masked, 0.0)
        return (wins / K).reshape(logits.shape)

    def extra_repr(self) -> str:
        return f"classes={len(self.log_weight)}, tau={self.tau.item():g}, break_ties={self.break_ties}"
