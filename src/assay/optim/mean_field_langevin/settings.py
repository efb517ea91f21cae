"""What the estimators' arguments have to be, checked once at the start of fit."""

import math
from numbers import Integral, Real
from typing import Any

from .activation import Activation
from .manifolds import Manifold, Sphere, is_manifold

DECAY = 1e-4  # weight decay of Euclidean particles unless given


def checked_manifold(estimator: Any) -> tuple[Manifold | None, float]:
    """The manifold, None for Euclidean space, and the weight decay."""
    name, decay = estimator.manifold, estimator.weight_decay
    manifold: Manifold | None
    if name == "euclidean":
        manifold = None
    elif name in ("sphere", "joint_sphere"):
        manifold = Sphere(estimator.radius, joint_axes=1 if name == "sphere" else 2)
    elif is_manifold(name):
        manifold = name
    else:
        raise ValueError(f"manifold must be 'sphere', 'joint_sphere', 'euclidean' or have projx, proju, expmap, got {name!r}")
    if manifold is None:
        decay = DECAY if decay is None else decay
        if not (isinstance(decay, Real) and 0 <= float(decay) < math.inf):
            raise ValueError(f"weight_decay must be finite and at least 0, got {decay!r}")
        return None, float(decay)
    if decay is not None and decay != 0:
        raise ValueError(f"weight_decay has no meaning on a manifold: leave it None for manifold={name!r}, got {decay}")
    return manifold, 0.0


def check_settings(estimator: Any) -> None:
    """Raises ValueError for the first argument that is out of its range. Losses, devices and data are looked at elsewhere."""
    for name, least in (("n_particles", 1), ("max_iter", 1), ("average_last", 0)):
        value = getattr(estimator, name)
        if not _whole(value, least):
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    if estimator.batch_size is not None and not _whole(estimator.batch_size, 1):
        raise ValueError(f"batch_size must be None or an integer of at least 1, got {estimator.batch_size!r}")
    if not (isinstance(estimator.beta, Real) and float(estimator.beta) > 0):
        raise ValueError(f"beta must be > 0 (infinity for no noise), got {estimator.beta!r}")
    if estimator.lr != "auto" and not (isinstance(estimator.lr, Real) and 0 < float(estimator.lr) < math.inf):
        raise ValueError(f"lr must be 'auto' or positive and finite, got {estimator.lr!r}")
    for name in ("output_scale", "radius"):
        value = getattr(estimator, name)
        if not (isinstance(value, Real) and 0 < float(value) < math.inf):
            raise ValueError(f"{name} must be positive and finite, got {value!r}")
    if estimator.anneal not in (None, "log", "geometric"):
        raise ValueError(f"anneal must be None, 'log' or 'geometric', got {estimator.anneal!r}")
    if not (isinstance(estimator.validation_fraction, Real) and 0 < float(estimator.validation_fraction) < 1):
        raise ValueError(f"validation_fraction must lie in (0, 1), got {estimator.validation_fraction!r}")
    if estimator.dtype not in ("auto", "float32", "float64"):
        raise ValueError(f"dtype must be 'auto', 'float32' or 'float64', got {estimator.dtype!r}")
    Activation(estimator.activation, estimator.kappa, estimator.iota)


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, Integral) and int(value) >= least


def inverse_temperature(beta: float, anneal: str | None, step: int, steps: int) -> float:
    """β at a step: constant, or rising from ``beta``, as its logarithm or to a hundred times it."""
    if anneal == "log":
        return beta * (1 + math.log1p(step))
    return beta * 100 ** (step / steps) if anneal == "geometric" else beta
