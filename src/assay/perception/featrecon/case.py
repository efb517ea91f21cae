"""What the study trains on: long-tailed rows with balanced tuning and test rows, checked before an arm sees them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Case(NamedTuple):
    """Rows ``(n, channels, height, width)`` or ``(n, features)``, labels ``(n,)``, counts ``(K,)``, K ≥ 3."""

    train_images: Tensor
    train_labels: Tensor
    tune_images: Tensor
    tune_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    class_counts: Tensor
    encoder: Callable[[], nn.Module] | None = None
    """Makes a new encoder, rows to ``(B, features)``; by default a small one for rows of this shape."""
    regime: str = "own"
    """Data set and head of the study's own cases; yours stay ``own``."""


def checked_case(given: Any) -> Case:
    """Anything with the fields of a ``Case``, as tensors on the CPU; rows that are vectors become ``(n, features, 1, 1)``.

    Raises:
        ValueError: what is wrong, and with which field.
    """
    rows, labels = {}, {}
    counts = torch.as_tensor(given.class_counts).cpu().long()
    K = len(counts)
    if K < 3:
        raise ValueError(f"class_counts must hold at least 3 classes, got {K}")
    for part in ("train", "tune", "test"):
        x = torch.as_tensor(getattr(given, f"{part}_images")).detach().cpu().float()
        y = torch.as_tensor(getattr(given, f"{part}_labels")).detach().cpu()
        if x.ndim not in (2, 4) or len(x) == 0:
            raise ValueError(f"{part}_images must be (n, channels, height, width) or (n, features), got {tuple(x.shape)}")
        if not torch.isfinite(x).all():
            raise ValueError(f"{part}_images must be finite, they hold NaN or infinity")
        if y.shape != x.shape[:1] or y.is_floating_point() or int(y.min()) < 0 or int(y.max()) >= K:
            raise ValueError(
                f"{part}_labels must be {len(x)} class indices in [0, {K}), got {y.dtype} of shape {tuple(y.shape)}"
            )
        rows[part], labels[part] = (x if x.ndim == 4 else x[:, :, None, None]), y.long()
    held = torch.bincount(labels["tune"], minlength=K)
    if int(held.min()) < 1:
        raise ValueError(f"tune_labels must hold every class, class {int(held.argmin())} is missing")
    if len({x.shape[1:] for x in rows.values()}) > 1:
        raise ValueError(f"the parts' rows must have one shape, got {[tuple(x.shape[1:]) for x in rows.values()]}")
    if not torch.equal(torch.bincount(labels["train"], minlength=K), counts):
        raise ValueError("class_counts must be the rows of each class in train_labels, bincount(train_labels)")
    if int(counts.min()) < 1:
        raise ValueError(f"class {int(counts.argmin())} has no training rows: leave it out")
    return Case(
        rows["train"], labels["train"], rows["tune"], labels["tune"], rows["test"], labels["test"], counts,
        getattr(given, "encoder", None), getattr(given, "regime", "own"),
    )  # fmt: skip
