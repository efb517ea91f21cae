"""The study's arms: losses that all see the same rows, the same start and the same number of steps."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from .labels import remap_labels
from .loss import SelKDLoss
from .released import released_plan_loss
from .rivals import Term

Outputs = Literal["closed", "all", "open"]
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def label_loss(student: Tensor, labels: Tensor, selected: tuple[int, ...], outputs: Outputs) -> Tensor:
    """Cross-entropy on the labels, in the columns that the student has."""
    targets = labels if outputs == "all" else remap_labels(labels, selected, open_set=outputs == "open")
    return F.cross_entropy(student, targets)


@dataclass(frozen=True)
class Rival:
    """Labels and a term of distillation, or labels alone."""

    term: Term | None = None
    outputs: Outputs = "closed"

    def __call__(self, selected: tuple[int, ...], config: Any) -> Loss:
        def loss(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
            value = label_loss(student, labels, selected, self.outputs)
            if self.term is not None:
                targets = remap_labels(labels, selected, open_set=True)
                value = value + config.alpha * self.term(student, teacher, targets, selected, config.eps)
            return value

        return loss


@dataclass(frozen=True)
class Selective:
    """`SelKDLoss` with these options."""

    outputs: Literal["closed", "open"] = "closed"
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __call__(self, selected: tuple[int, ...], config: Any) -> Loss:
        return SelKDLoss(selected, mode=self.outputs, eps=config.eps, alpha=config.alpha, **self.options)


@dataclass(frozen=True)
class Released:
    """Labels and the released code's term, which takes the first classes for the selected: columns are put in that order."""

    outputs: Literal["closed", "open"] = "closed"

    def __call__(self, selected: tuple[int, ...], config: Any) -> Loss:
        def loss(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
            first = list(selected) + [c for c in range(teacher.shape[1]) if c not in selected]
            targets = remap_labels(labels, selected, open_set=True)
            term = released_plan_loss(student, teacher[:, first], targets, self.outputs, classes=len(selected))
            return label_loss(student, labels, selected, self.outputs) + config.alpha * term

        return loss


def term_gradient(
    loss: Loss, student: Tensor, teacher: Tensor, labels: Tensor, selected: tuple[int, ...], outputs: Outputs
) -> float:
    """Norm of the gradient, in the student's logits, of all that a loss holds beside cross-entropy."""
    z = student.detach().requires_grad_()
    whole, of_labels = (
        torch.autograd.grad(value, z)[0] for value in (loss(z, teacher, labels), label_loss(z, labels, selected, outputs))
    )
    return float((whole - of_labels).norm())
