"""Choosing an adjustment's one number on held-out rows."""

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar, Literal, Self, TypeAlias

import torch
from torch import Tensor, nn

from .checks import Counts, checked_calibration, checked_counts

Metric: TypeAlias = Literal["balanced_accuracy"] | Callable[[Tensor, Tensor], float]


def steps(last: float, step: float = 0.05) -> tuple[float, ...]:
    """``0, step, …, last``."""
    return tuple(round(i * step, 10) for i in range(round(last / step) + 1))


class TunableRule(nn.Module):
    """A rule ``(class_counts, strength, **options)`` whose strength held-out rows can choose."""

    grid: ClassVar[tuple[float, ...]] = steps(2.0)

    @classmethod
    def tuned(
        cls,
        class_counts: Counts,
        logits: Tensor,
        targets: Tensor,
        grid: Iterable[float] | None = None,
        metric: Metric = "balanced_accuracy",
        **options: Any,
    ) -> Self:
        """The rule with the strength of the grid that does best on held-out rows, the smallest where several are level.

        Args:
            class_counts: Training rows of each class, ``(K,)``.
            logits: Raw logits of rows that were not trained on and are not the test rows, ``(n, K)``.
            targets: Their classes, ``(n,)``.
            grid: Values to try; the class's own ``grid`` by default.
            metric: ``"balanced_accuracy"``, or a function ``(predicted, targets) -> float`` to be maximised.
            **options: Further arguments of the class, as it documents them.

        Raises:
            ValueError: targets that do not go with the logits, an empty grid, and what the class refuses.

        Warns:
            UserWarning: the largest value of the grid is best, so that a larger one may be better; and what makes the rule
                doubtful on these rows.
        """
        logits = torch.as_tensor(logits)
        cls._warn_of(logits, options)
        make = partial(cls, class_counts, **options)
        values = sorted(cls.grid if grid is None else map(float, grid))
        best = best_strength(make, class_counts, logits, targets, values, metric)
        if len(values) > 1 and best == values[-1]:
            warnings.warn(f"the best strength is the largest of the grid, {best:g}: widen it", UserWarning, stacklevel=2)
        return make(best).to(logits.device)

    @classmethod
    def _warn_of(cls, logits: Tensor, options: dict[str, Any]) -> None:
        """Warns of what the rule cannot do on these rows."""


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

    def tried(value: float) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the grid may reach far; only the value that is kept is worth a warning
            return float(score(make(value).to(logits.device)(logits).argmax(-1), targets))

    scores = [tried(value) for value in values]
    return values[scores.index(max(scores))]


def warn_if_winners_are_negative(logits: Tensor, stacklevel: int = 3) -> None:
    """Says what stands in the way of a multiplicative adjustment: losing winners, or too few classes."""
    if logits.shape[-1] == 2:
        warnings.warn(
            "with two classes and opposite logits a positive factor for each class changes no decision; "
            "use AdditiveLogitAdjustment",
            UserWarning,
            stacklevel=stacklevel,
        )
    share = (logits.detach().amax(-1) < 0).double().mean().item()
    if share > 0.05:
        warnings.warn(
            f"the winning logit is negative on {share:.0%} of the rows; multiplying pushes rare classes down there. "
            "Use a head without bias on centred features (ETFLinear), center='shift', or AdditiveLogitAdjustment",
            UserWarning,
            stacklevel=stacklevel,
        )
