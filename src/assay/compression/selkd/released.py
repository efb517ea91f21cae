"""The formulas of the authors' released code, for audit: what `SelKDLoss` does otherwise, and why, is on the page.

From machoshi/SelKD, helper/loops.py, at temperature 4: the kernel is ``exp(−z/4)``, so that a class is given the less the
more its logit speaks for it; columns are the samples of the batch, each standing for its class.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Kind = Literal["closed", "open"]
TEMPERATURE = 4.0


def released_plan(logits: Tensor, labels: Tensor, kind: Kind, *, classes: int, n_iter: int | None = None) -> Tensor:
    """The plan ``(B, B)`` between samples and samples that the released code computes.

    Args:
        logits: ``(B, C)``. Its first `classes` columns are the selected ones.
        labels: ``(B,)`` class ids; those from `classes` on are not selected.
        kind: ``"closed"``: Sinkhorn with unit marginals, on the selected columns. ``"open"``: rows capped at 1 and all of it
            rescaled to the number of selected samples, in turn; unselected samples all use column `classes`.
        classes: Number of selected classes, the first ones.
        n_iter: Rounds; by default 5 (closed), 3 (open; the released code takes 8 for the teacher).

    Raises:
        ValueError: fewer columns than the labels need.

    Example:
        >>> plan = released_plan(torch.zeros(3, 2), torch.tensor([0, 1, 1]), "closed", classes=2)
        >>> plan.sum(0)
        tensor([1.0000, 1.0000, 1.0000])
    """
    if kind not in ("closed", "open"):
        raise ValueError(f"kind must be 'closed' or 'open', got {kind!r}")
    if logits.ndim != 2 or logits.shape[1] < classes + (kind == "open"):
        raise ValueError(
            f"logits must be (B, C) with C ≥ {classes + (kind == 'open')}, {kind}, got shape {tuple(logits.shape)}"
        )
    columns = labels.clamp(max=classes)  # a new tensor: the released code writes into the caller's
    if kind == "closed" and bool((columns == classes).any()):
        raise ValueError(f"labels must lie in [0, {classes}) in closed mode")
    # a product with one-hot columns is a choice of columns
    kernel = torch.exp(-logits[:, columns] / TEMPERATURE)
    if kind == "closed":
        v = torch.ones_like(kernel[0])
        for _ in range(n_iter or 5):
            u = 1 / (kernel @ v + 1e-6)
            v = 1 / (kernel.T @ u + 1e-6)
        return u[:, None] * kernel * v
    m = (labels < classes).sum()
    for _ in range(n_iter or 3):
        kernel = kernel / kernel.sum(1, keepdim=True).clamp_min(1)
        kernel = kernel * m / kernel.sum()
    return kernel


def released_plan_loss(student_logits: Tensor, teacher_logits: Tensor, labels: Tensor, kind: Kind, *, classes: int) -> Tensor:
    """The released distillation term, a scalar: arguments as in `released_plan`, for both models.

    Closed: distillation at temperature 4 of the plans *as if they were logits*. Open: minus the sum of all entries of the
    matrix product ``P_t log P_s``.
    """
    with torch.no_grad():
        teacher = released_plan(teacher_logits, labels, kind, classes=classes, n_iter=8 if kind == "open" else None)
    student = released_plan(student_logits, labels, kind, classes=classes)
    if kind == "open":
        return -(teacher @ student.log()).sum()
    log_student, log_teacher = ((plan / TEMPERATURE).log_softmax(1) for plan in (student, teacher))
    return F.kl_div(log_student, log_teacher, reduction="batchmean", log_target=True) * TEMPERATURE**2
