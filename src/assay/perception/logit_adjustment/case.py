"""What the study adjusts: logits, labels and counts, checked before an arm sees them."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checks import checked_counts


class Features(NamedTuple):
    """Penultimate features ``(n, d)`` and the linear head on them, ``(K, d)`` and ``(K,)``."""

    train: Tensor
    train_labels: Tensor
    tune: Tensor
    test: Tensor
    weight: Tensor
    bias: Tensor | None = None


class Case(NamedTuple):
    """What is adjusted. Logits ``(n, K)``, labels ``(n,)``, counts ``(K,)``, K ≥ 3."""

    tune_logits: Tensor
    tune_labels: Tensor
    test_logits: Tensor
    test_labels: Tensor
    class_counts: Tensor
    features: Features | None = None
    loss_logits: Tensor | None = None
    """Test logits of a network of the same size, with a free head, trained with the additive loss."""
    regime: str = "own"
    """Data set and head of the study's own cases; yours stay ``own``."""


class NotInCase(LookupError):
    """An arm needs an optional field that the case does not have."""


def needed(thing: Any, what: str) -> Any:
    if thing is None:
        raise NotInCase(f"this case has no {what}")
    return thing


def checked_case(given: Any) -> Case:
    """Anything with the fields of a ``Case``, as tensors on the CPU.

    Raises:
        ValueError: what is wrong, and with which field.
    """
    try:
        counts = checked_counts(given.class_counts, least=3)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"class_counts cannot be read as numbers: {error}") from None
    K = len(counts)
    tune_logits = _matrix("tune_logits", given.tune_logits, columns=K, may_mask=True)
    test_logits = _matrix("test_logits", given.test_logits, columns=K, may_mask=True)
    loss_logits = getattr(given, "loss_logits", None)
    case = Case(
        tune_logits,
        _labels("tune_labels", given.tune_labels, len(tune_logits), K),
        test_logits,
        _labels("test_labels", given.test_labels, len(test_logits), K),
        counts,
        loss_logits=None if loss_logits is None else _matrix("loss_logits", loss_logits, len(test_logits), K, may_mask=True),
        regime=getattr(given, "regime", "own"),
    )
    features = getattr(given, "features", None)
    return case if features is None else case._replace(features=_checked_features(features, case))


def _checked_features(given: Any, case: Case) -> Features:
    missing = [name for name in Features._fields if name != "bias" and not hasattr(given, name)]
    if missing:
        raise ValueError(f"features must be Features({', '.join(Features._fields)}), got {type(given).__name__}")
    K = len(case.class_counts)
    train = _matrix("features.train", given.train)
    d = train.shape[1]
    labels = _labels("features.train_labels", given.train_labels, len(train), K)
    absent = torch.nonzero(torch.bincount(labels, minlength=K) == 0)[:, 0].tolist()
    if absent:
        raise ValueError(f"features.train_labels must hold every class, {len(absent)} have no row: class {absent[0]} …")
    bias = getattr(given, "bias", None)
    return Features(
        train,
        labels,
        _matrix("features.tune", given.tune, len(case.tune_labels), d),
        _matrix("features.test", given.test, len(case.test_labels), d),
        _matrix("features.weight", given.weight, K, d),
        None if bias is None else _matrix("features.bias", _numbers("features.bias", bias)[None], 1, K)[0],
    )


def _numbers(name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} cannot be read as a tensor: {error}") from None


def _matrix(name: str, value: Any, rows: int | None = None, columns: int | None = None, *, may_mask: bool = False) -> Tensor:
    """Floating-point ``(rows, columns)``; −inf only where it masks a class."""
    tensor = _numbers(name, value)
    if tensor.is_complex():
        raise ValueError(f"{name} must be real, got {tensor.dtype}")
    tensor = tensor if tensor.is_floating_point() else tensor.float()
    wanted = f"({'n' if rows is None else rows}, {'d' if columns is None else columns})"
    fits = tensor.ndim == 2 and rows in (None, len(tensor)) and columns in (None, tensor.shape[1]) and tensor.numel() > 0
    if not fits:
        raise ValueError(f"{name} must be {wanted} and not empty, got shape {tuple(tensor.shape)}")
    bad = ~tensor.isfinite() & ~((tensor == -math.inf) if may_mask else torch.zeros_like(tensor, dtype=torch.bool))
    if bad.any():
        raise ValueError(f"{name} must be finite, {int(bad.sum())} of {tensor.numel()} values are not")
    return tensor


def _labels(name: str, value: Any, rows: int, classes: int) -> Tensor:
    """Class indices ``(rows,)`` int64; whole numbers of any type."""
    tensor = _numbers(name, value)
    if tensor.shape != (rows,):
        raise ValueError(f"{name} must be ({rows},), a class for each row, got shape {tuple(tensor.shape)}")
    if tensor.dtype == torch.bool or tensor.is_complex() or not bool((tensor.double() == tensor.double().round()).all()):
        raise ValueError(f"{name} must be class indices, whole numbers, got {tensor.dtype}")
    low, high = int(tensor.min()), int(tensor.max())
    if low < 0 or high >= classes:
        raise ValueError(f"{name} must lie in [0, {classes}) for {classes} class_counts, got {low}..{high}")
    return tensor.long()
