"""What counts, features and labels have to be, checked once at the door."""

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

Counts: TypeAlias = Tensor | np.ndarray | Sequence[int]

# How far from one a unit vector's length may be: rounding in the narrow types is larger than a mistake would be small.
_TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}


def checked_counts(class_counts: Counts, classes: int | None = None, *, least: int = 1, name: str = "class_counts") -> Tensor:
    """Rows of each class as int64 ``(K,)`` on the CPU.

    Raises:
        ValueError: not a vector of whole numbers ≥ ``least``, or not ``classes`` of them.
    """
    counts = torch.as_tensor(class_counts).detach().to("cpu")
    if counts.ndim != 1 or len(counts) < 2:
        raise ValueError(f"{name} must be a vector of at least 2 classes, got shape {tuple(counts.shape)}")
    if classes is not None and len(counts) != classes:
        raise ValueError(f"{name} must hold {classes} numbers, got {len(counts)}")
    wrong = ~(torch.isfinite(counts) & (counts >= least) & (counts == counts.round()))
    if wrong.any():
        k = int(wrong.nonzero()[0])
        rule = "positive whole numbers" if least else "whole numbers, not negative"
        hint = "; leave classes without training rows out" if least else ""
        raise ValueError(f"{name} must be {rule}: class {k} has {counts[k].item():g}{hint}")
    return counts.long()


def checked_number(name: str, value: float, low: float, high: float, *, open_ends: bool = False) -> float:
    value = float(value)
    inside = low < value < high if open_ends else low <= value <= high and math.isfinite(value)
    if not inside:
        raise ValueError(
            f"{name} must lie in {'(' if open_ends else '['}{low:g}, {high:g}{')' if open_ends else ']'}, got {value}"
        )
    return value


def checked_integer(name: str, value: Any, least: int) -> int:
    if not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name} must be at least {least} and a whole number, got {value!r}")
    return int(value)


def check_features(name: str, z: Tensor, dim: int | None = None) -> None:
    """Refuses what is no batch of unit vectors ``(n, d)``."""
    if not z.is_floating_point() or z.ndim != 2 or (dim is not None and z.shape[1] != dim):
        shape = f"(n, {dim if dim is not None else 'd'})"
        raise ValueError(f"{name} must be floating point of shape {shape}, got {z.dtype} of shape {tuple(z.shape)}")
    if len(z) == 0:
        return
    off = (torch.linalg.vector_norm(z.detach().float(), dim=1) - 1).abs()
    worst = float(off.max())  # NaN and infinity come through
    tolerance = _TOLERANCE.get(z.dtype, 1e-3)
    if not worst <= tolerance:
        if not math.isfinite(worst):
            bad = int((~torch.isfinite(z.detach()).all(1)).sum())
            raise ValueError(f"{name} must be finite, {bad} of {len(z)} rows hold NaN or infinity")
        raise ValueError(
            f"{name} must hold unit vectors, a row's length is off by {worst:.2g} (allowed: {tolerance:g}); "
            "use torch.nn.functional.normalize(z, dim=1)"
        )


def check_labels(name: str, y: Tensor, rows: int, classes: int | None = None) -> None:
    """Refuses what is no vector of class indices, one a row."""
    if y.ndim != 1 or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"{name} must be a vector of class indices, got {y.dtype} of shape {tuple(y.shape)}")
    if len(y) != rows:
        raise ValueError(f"{name} must hold {rows} class indices, got {len(y)}")
    if len(y):
        low, high = int(y.min()), int(y.max())
        if low < 0 or (classes is not None and high >= classes):
            raise ValueError(f"{name} must lie in [0, {classes if classes is not None else '∞'}), got {low}..{high}")


def head_mask(head_classes: Literal["auto"] | int | Sequence[int], counts: Tensor) -> Tensor:
    """Which classes are heads: those above the average count, so many of the largest, or the ones named; ``(K,)`` bool."""
    K = len(counts)
    mask = torch.zeros(K, dtype=torch.bool)
    if isinstance(head_classes, str):
        if head_classes != "auto":
            raise ValueError(f"head_classes must be 'auto', a number or class indices, got {head_classes!r}")
        return counts >= counts.double().mean()
    if isinstance(head_classes, (int, np.integer)):
        if not 1 <= head_classes <= K:
            raise ValueError(f"head_classes must name 1 to {K} classes, got {head_classes}")
        mask[torch.argsort(counts, descending=True, stable=True)[: int(head_classes)]] = True
        return mask
    chosen = torch.as_tensor(list(head_classes), dtype=torch.long)
    if not len(chosen) or int(chosen.min()) < 0 or int(chosen.max()) >= K:
        raise ValueError(f"head_classes must hold indices in [0, {K}), got {chosen.tolist()}")
    mask[chosen] = True
    return mask
