"""How far the features of a training set have collapsed onto a simplex."""

import torch
from torch import Tensor
from torch.nn import functional as F


def class_means(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Mean feature of each class, ``(K, d)`` float64.

    Raises:
        ValueError: a class without rows.
    """
    rows = torch.bincount(labels, minlength=classes)
    if (rows == 0).any():
        raise ValueError(f"every class needs a row, class {int((rows == 0).nonzero()[0])} has none")
    sums = torch.zeros(classes, features.shape[1], dtype=torch.float64).index_add_(0, labels, features.double())
    return sums / rows[:, None]


def neural_collapse(features: Tensor, labels: Tensor, weight: Tensor) -> dict[str, float]:
    r"""Three properties of neural collapse (Papyan et al., PNAS 2020); all are 0 when it is complete.

    With class means :math:`\mu_k`, their mean :math:`\mu_G` and :math:`\bar\mu_k = \mu_k - \mu_G`:

    - ``nc1``: within-class over between-class scatter, classes counting alike,
      :math:`\sum_k E\|z - \mu_k\|^2 / \sum_k \|\bar\mu_k\|^2`;
    - ``nc2``: mean distance of :math:`\cos(\bar\mu_k, \bar\mu_{k'})` from :math:`-1/(K-1)`;
    - ``nc3``: :math:`1 - \cos(w_k, \bar\mu_k)`, averaged.

    Args:
        features: ``(n, d)``.
        labels: ``(n,)``, every class present.
        weight: The linear head, ``(K, d)``.

    Example:
        >>> simplex = torch.eye(3) - 1 / 3
        >>> {name: round(value, 6) for name, value in neural_collapse(simplex, torch.arange(3), simplex).items()}
        {'nc1': 0.0, 'nc2': 0.0, 'nc3': 0.0}
    """
    K = len(weight)
    mean = class_means(features, labels, K)
    within = class_means((features.double() - mean[labels]).square().sum(1, keepdim=True), labels, K)
    centred = mean - mean.mean(0)
    directions = F.normalize(centred, dim=1)
    off = ~torch.eye(K, dtype=torch.bool)
    gap = (directions @ directions.T)[off] + 1 / (K - 1)
    alignment = (directions * F.normalize(weight.double(), dim=1)).sum(1)
    return {
        "nc1": (within.sum() / centred.square().sum()).item(),
        "nc2": gap.abs().mean().item(),
        "nc3": (1 - alignment).mean().item(),
    }
