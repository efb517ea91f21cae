"""Choosing an adjustment's one number on held-out rows."""

import warnings
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from .checks import Counts, checked_calibration, checked_counts

Metric: TypeAlias = Literal["balanced_accuracy"] | Callable[[Tensor, Tensor], float]
Rule = TypeVar("Rule", bound=nn.Module)


def steps(last: float, step: float = 0.05) -> tuple[float, ...]:
    """``0, step, …, last``."""
    return tuple(round(i * step, 10) for i in range(round(last / step) + 1))


def balanced_accuracy(predicted: Tensor, targets: Tensor) -> float:
    """Share of right predictions in each class that occurs in ``targets``, averaged over those classes.

    Example:
        >>> balanced_accuracy(torch.tensor([0, 0, 0, 0]), torch.tensor([0, 0, 0, 1]))
        0.5
    """
    rows = torch.bincount(targets)
    right = torch.bincount(targets[predicted == targets], minlength=len(rows))
    return (right[rows > 0].double() / rows[rows > 0]).mean().item()


@torch.no_grad()
def best_strength(
    make: Callable[[float], nn.Module],
    class_counts: Counts,
    logits: Tensor,
    targets: Tensor,
    grid: Iterable[float],
    metric: Metric,
) -> float:
    """The smallest of the values of ``grid`` that maximise ``metric`` of ``make(value)(logits).argmax(-1)``."""
    logits, targets = checked_calibration(logits, targets, len(checked_counts(class_counts)))
    values = sorted(float(value) for value in grid)
    if not values:
        raise ValueError("grid must hold at least one value")
    if metric == "balanced_accuracy":
        score: Callable[[Tensor, Tensor], float] = balanced_accuracy
    elif callable(metric):
        score = metric
    else:
        raise ValueError(f"metric must be 'balanced_accuracy' or a function (predicted, targets) -> float, got {metric!r}")
    scores = [float(score(make(value).to(logits.device)(logits).argmax(-1), targets)) for value in values]
    return values[scores.index(max(scores))]


def warn_if_winners_are_negative(logits: Tensor) -> None:
    """Says what stands in the way of a multiplicative adjustment: losing winners, or too few classes."""
    if logits.shape[-1] == 2:
        warnings.warn(
            "with two classes and opposite logits a positive factor for each class changes no decision; "
            "use AdditiveLogitAdjustment",
            UserWarning,
            stacklevel=3,
        )
    share = (logits.detach().amax(-1) < 0).double().mean().item()
    if share > 0.05:
        warnings.warn(
            f"the winning logit is negative on {share:.0%} of the rows; multiplying pushes rare classes down there. "
            "Use a head without bias on centred features (ETFLinear), center='shift', or AdditiveLogitAdjustment",
            UserWarning,
            stacklevel=3,
        )
