"""What class counts and logits have to be, checked once at the door."""

import math
import warnings
from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

Counts: TypeAlias = Tensor | np.ndarray | Sequence[float]

# Whoever passes probabilities passes them in every row, so a few rows tell; but one row of logits may sum to one by chance.
_ROWS_LOOKED_AT = 16
_EVIDENCE = 40  # bits: a coincidence of one in 10¹²


def checked_counts(class_counts: Counts, *, least: int = 2) -> Tensor:
    """Training rows of each class as float64 ``(K,)`` on the CPU.

    Raises:
        ValueError: not a vector of at least ``least`` positive, finite numbers.
    """
    counts = torch.as_tensor(class_counts).detach().to("cpu", torch.float64)
    if counts.ndim != 1 or len(counts) < least:
        raise ValueError(f"class_counts must be a vector of at least {least} classes, got shape {tuple(counts.shape)}")
    wrong = ~(torch.isfinite(counts) & (counts > 0))
    if wrong.any():
        classes = torch.nonzero(wrong)[:, 0].tolist()
        raise ValueError(
            f"class_counts must be positive: class {classes[0]} has {counts[classes[0]].item():g}"
            f"{f', and {len(classes) - 1} more' if len(classes) > 1 else ''}; leave classes without training rows out"
        )
    return counts


def checked_strength(name: str, value: float) -> float:
    value = float(value)
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be finite and at least 0, got {value}")
    return value


def checked_norms(feature_norms: Counts, classes: int) -> Tensor:
    """Positive mean-feature norms as float64 ``(K,)`` on the CPU."""
    norms = torch.as_tensor(feature_norms).detach().to("cpu", torch.float64)
    if norms.shape != (classes,):
        raise ValueError(f"feature_norms must hold one number for each of {classes} classes, got shape {tuple(norms.shape)}")
    if not (torch.isfinite(norms) & (norms > 0)).all():
        raise ValueError("feature_norms must be positive and finite")
    return norms


def check_classes(logits: Tensor, classes: int) -> None:
    if not logits.is_floating_point():
        raise ValueError(f"logits must be floating point, got {logits.dtype}")
    if logits.ndim < 1 or logits.shape[-1] != classes:
        raise ValueError(f"logits must be (*, {classes}) for {classes} class counts, got shape {tuple(logits.shape)}")


def check_values(adjusted: Tensor, logits: Tensor, *, raw: bool) -> None:
    """Looks closer where the sum of the result or its first rows say that something may be wrong.

    NaN and infinities pass into a sum, which reads each number once; ``isnan().any()`` writes a mask first and takes four
    times as long.

    Raises:
        ValueError: NaN or infinite logits, a result too large for its dtype, or, where the method needs `raw` logits,
            probabilities or log-probabilities.

    Warns:
        UserWarning: probabilities, where log-probabilities would do.
    """
    if adjusted.numel() == 0 or torch.compiler.is_compiling():  # a compiled graph does not branch on values
        return
    adjusted = adjusted.detach()
    total = adjusted.sum(dtype=torch.promote_types(adjusted.dtype, torch.float32))
    if not math.isfinite(total) and not bool((adjusted < math.inf).all()):  # -inf alone is a class masked out
        bad = int((logits.isnan() | (logits == math.inf)).sum())
        if bad:
            raise ValueError(f"logits must not be NaN or +inf, {bad} of {logits.numel()} values are")
        raise ValueError(f"the adjusted logits do not fit {logits.dtype}: pass logits in a wider dtype")
    kind = _normalised(logits.detach().reshape(-1, logits.shape[-1])[:_ROWS_LOOKED_AT])
    if kind == "log-probabilities" and raw:
        raise ValueError(
            "these are log-probabilities; multiplying needs raw logits, whose winner is positive: scaling a log-probability "
            "up makes its class less likely. Pass what the last linear layer gives, or use AdditiveLogitAdjustment"
        )
    if kind == "probabilities" and raw:
        raise ValueError(
            "these are probabilities; multiplying needs raw logits. Scaling softmax outputs by powers of the prior is "
            "additive adjustment: use AdditiveLogitAdjustment on the logits"
        )
    if kind == "probabilities":
        warnings.warn(
            "these are probabilities; adding belongs to logits or log-probabilities: pass those", UserWarning, stacklevel=6
        )


def _normalised(rows: Tensor) -> Literal["probabilities", "log-probabilities"] | None:
    """What rows ``(n, K)`` certainly are: probabilities sum to one in every row, as closely as their dtype can.

    A row of logits within the same range does so with a chance of about twice the tolerance. Distinct rows have to add up
    to ``_EVIDENCE``: 3 of them in single precision, 7 in half precision, 14 in bfloat16. Fewer are taken for logits.
    """
    tolerance = max(8 * torch.finfo(rows.dtype).eps, 1e-5)
    enough = math.ceil(_EVIDENCE / -math.log2(2 * tolerance))
    if len(rows) < enough:
        return None
    rows = rows.float()
    low, high = torch.stack(torch.aminmax(rows)).tolist()
    if low >= 0 and high <= 1:
        kind: Literal["probabilities", "log-probabilities"] = "probabilities"
        sums = rows.sum(-1)
    elif high <= 0:
        kind, sums = "log-probabilities", rows.exp().sum(-1)
    else:
        return None
    certain = bool(((sums - 1).abs() < tolerance).all()) and len(torch.unique(rows, dim=0)) >= enough
    return kind if certain else None


def checked_calibration(logits: Tensor, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Held-out logits ``(n, K)`` and targets ``(n,)``, both detached."""
    logits, targets = torch.as_tensor(logits).detach(), torch.as_tensor(targets).detach()
    check_classes(logits, classes)
    if logits.ndim != 2 or len(logits) == 0:
        raise ValueError(f"logits must be (n, {classes}) with n ≥ 1, got shape {tuple(logits.shape)}")
    if targets.shape != logits.shape[:1] or targets.is_floating_point():
        raise ValueError(f"targets must be {len(logits)} class indices, got {targets.dtype} of shape {tuple(targets.shape)}")
    if int(targets.min()) < 0 or int(targets.max()) >= classes:
        raise ValueError(f"targets must lie in [0, {classes}), got {int(targets.min())}..{int(targets.max())}")
    return logits, targets.long()
