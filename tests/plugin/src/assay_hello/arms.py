"""A rival that the study does not hold: ``assay run hello --arm focal=assay_hello.arms:focal_loss``."""

from torch import Tensor
from torch.nn import functional as F


def focal_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy that looks away from rows it already has right (Lin et al., ICCV 2017; focus 2)."""
    cross_entropy = F.cross_entropy(logits, labels, reduction="none")
    return ((1 - (-cross_entropy).exp()).square() * cross_entropy).mean()
