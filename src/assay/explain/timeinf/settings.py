"""What a detector is asked for, checked, and kept as it was when it was fitted."""

from typing import Any, Literal, NamedTuple, Self

import numpy as np

from .blocks import Membership

CHOICES = {
    "membership": ("all", "lags"),
    "mode": ("first_order", "loo"),
    "scaling": (None, "paper"),
    "hessian": ("auto", "dense", "cg", "exact"),
    "impute": (None, "linear"),
    "standardize": ("auto", True, False),
}


class Settings(NamedTuple):
    """The parameters that are read again after ``fit``: a later ``set_params`` waits for the next fit."""

    block_length: int
    membership: Membership
    scaling: Literal["paper"] | None
    contamination: float | Literal["auto"]
    impute: Literal["linear"] | None

    @classmethod
    def of(cls, detector: Any) -> Self:
        return cls(*(getattr(detector, name) for name in cls._fields))


def check_settings(detector: Any) -> None:
    """Raise ValueError, naming the parameter, where one is out of its range."""
    for name, allowed in CHOICES.items():
        if getattr(detector, name) not in allowed:
            raise ValueError(f"{name} must be one of {allowed}, got {getattr(detector, name)!r}")
    if not isinstance(detector.block_length, int | np.integer) or detector.block_length < 1:
        raise ValueError(f"block_length must be an integer of at least 1, got {detector.block_length!r}")
    if detector.contamination != "auto" and not 0 < detector.contamination <= 0.5:
        raise ValueError(f"contamination must be 'auto' or lie in (0, 0.5], got {detector.contamination!r}")
    for name in ("ridge", "damping"):
        if not 0 <= getattr(detector, name) < float("inf"):
            raise ValueError(f"{name} must be finite and at least 0, got {getattr(detector, name)!r}")
    if detector.n_subsets < 2:
        raise ValueError(f"n_subsets must be at least 2, got {detector.n_subsets!r}")
    if not 0 < detector.subset_fraction <= 1:
        raise ValueError(f"subset_fraction must lie in (0, 1], got {detector.subset_fraction!r}")
