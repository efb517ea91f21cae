"""Cross-entropy against labels of which a share is spread over all classes."""

from torch import Tensor
from torch.nn import functional as F


def smoothed_cross_entropy(logits: Tensor, labels: Tensor, *, share: float = 0.2) -> Tensor:
    """Cross-entropy of ``(n, classes)`` logits with smoothed labels (Szegedy et al., CVPR 2016); ``share`` lies in [0, 1)."""
    if not 0 <= share < 1:
        raise ValueError(f"share must lie in [0, 1), got {share!r}")
    log_p = F.log_softmax(logits, -1)
    picked = log_p.gather(-1, labels[:, None])[:, 0]
    return -((1 - share) * picked + share * log_p.mean(-1)).mean()
