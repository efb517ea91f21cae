"""Convex losses on stacked outputs, with their derivative and a bound on its slope."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Loss:
    """``outputs (K, n)`` and a target to losses ``(n,)`` and derivatives ``(K, n)``; ``curvature`` bounds the second one."""

    evaluate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    curvature: float

    def __call__(self, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return self.evaluate(outputs, target)


def _squared(outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    residual = outputs - target  # target (n,)
    return 0.5 * residual.square().sum(0), residual


def _pseudo_huber(outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Quadratic near 0, linear beyond 1: the unit is the target's standard deviation."""
    residual = outputs - target
    root = (1 + residual.square()).sqrt()
    return (root - 1).sum(0), residual / root


def _logistic(outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """One output; ``target (n,)`` is 0 or 1."""
    logit = outputs[0]
    return F.softplus(logit) - target * logit, (logit.sigmoid() - target)[None]


def _softmax(outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """``K`` outputs; ``target (K, n)`` is one-hot."""
    return torch.logsumexp(outputs, 0) - (target * outputs).sum(0), outputs.softmax(0) - target


SQUARED = Loss(_squared, 1.0)
PSEUDO_HUBER = Loss(_pseudo_huber, 1.0)
LOGISTIC = Loss(_logistic, 0.25)
SOFTMAX = Loss(_softmax, 0.5)
REGRESSION = {"squared": SQUARED, "pseudo_huber": PSEUDO_HUBER}
