"""The training-time forms: cross-entropy on logits that the class counts have shifted or scaled."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .checks import Counts, check_classes, checked_counts, checked_strength


class VectorScalingLoss(nn.Module):
    r"""Cross-entropy on scaled and shifted logits; plain logits are what the model predicts with afterwards.

    The vector-scaling loss (Kini et al., NeurIPS 2021), which has class-dependent temperatures (CDT: ``tau=0``) and the
    logit-adjusted loss (``gamma=0``) as its two ends:

    .. math:: \mathrm{CE}(\Delta \odot s + l,\, y), \quad \Delta_k = (n_k / n_{max})^\gamma, \quad l_k = \tau \log \pi_k.

    Args:
        class_counts: Training rows of each class, ``(K,)``, positive.
        gamma: Exponent of the scaling, ≥ 0.
        tau: Factor of the shift, ≥ 0.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: As in ``torch.nn.CrossEntropyLoss``.

    Shapes:
        - logits ``(B, K)``, targets ``(B,)`` class indices or ``(B, K)`` probabilities.

    Raises:
        ValueError: counts that are not positive, logits with another number of classes.

    Example:
        >>> loss = VectorScalingLoss([90, 9, 1], gamma=0.2)
        >>> loss(torch.zeros(1, 3), torch.tensor([2])).round(decimals=2)     # −log π_2: nothing is known yet
        tensor(4.6100)
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        class_counts: Counts,
        gamma: float = 0.2,
        tau: float = 1.0,
        *,
        reduction: Literal["mean", "sum", "none"] = "mean",
        label_smoothing: float = 0.0,
    ):
        super().__init__()
        n = checked_counts(class_counts)
        self.gamma, self.tau = checked_strength("gamma", gamma), checked_strength("tau", tau)
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
        self.reduction, self.label_smoothing = reduction, label_smoothing
        self.register_buffer("scale", ((n / n.max()) ** self.gamma).to(torch.get_default_dtype()))
        self.register_buffer("shift", (self.tau * (n / n.sum()).log()).to(torch.get_default_dtype()))

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        check_classes(logits, len(self.scale))
        biased = logits * self.scale.to(logits.dtype) if self.gamma else logits
        biased = biased + self.shift.to(logits.dtype)
        return F.cross_entropy(biased, targets, reduction=self.reduction, label_smoothing=self.label_smoothing)

    def extra_repr(self) -> str:
        return f"classes={len(self.scale)}, gamma={self.gamma:g}, tau={self.tau:g}"


class LogitAdjustedLoss(VectorScalingLoss):
    r"""Cross-entropy on :math:`s_k + \tau \log \pi_k`; the plain logits are then already adjusted.

    The training-time form of *Long-tail learning via logit adjustment* (Menon et al., ICLR 2021). Do not adjust again
    afterwards: a model trained with it would be corrected twice.

    :class:`VectorScalingLoss` without the scaling: its other arguments, shapes and errors.

    Args:
        tau: Factor, ≥ 0; 1 is consistent for the balanced error.

    Example:
        >>> criterion = LogitAdjustedLoss([90, 9, 1])
        >>> criterion(torch.zeros(2, 3), torch.tensor([0, 2])).round(decimals=2)
        tensor(2.3600)
    """

    def __init__(
        self,
        class_counts: Counts,
        tau: float = 1.0,
        *,
        reduction: Literal["mean", "sum", "none"] = "mean",
        label_smoothing: float = 0.0,
    ):
        super().__init__(class_counts, 0.0, tau, reduction=reduction, label_smoothing=label_smoothing)
