"""The study's arms that are made of this method's own parts, and the weights that they share."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .config import RELEASED_TARGETS, RRSConfig
from .quantize import configure_activations, quantize_rrs
from .smoothquant import quantize_smoothquant

A4W16_AND_W4A4 = {"a4w16": (16, 4), "w4a4": (4, 4)}
KEPT_BYTES = 3_000_000_000


@dataclass(frozen=True)
class Rounded:
    """An arm made of this method's own parts, so that arms differ in nothing but what they are named after."""

    rotate: str = "none"
    smooth: bool = False
    group: int | None = None  # None: the configuration's
    targets: tuple[str, ...] | str = RELEASED_TARGETS
    sink: int = 0
    settings: Mapping[str, tuple[int, int]] = field(default_factory=lambda: A4W16_AND_W4A4, hash=False)

    @property
    def seeded(self) -> bool:
        return self.rotate != "none"

    def config(self, case: Any, w_bits: int, a_bits: int, seed: int = 0) -> RRSConfig:
        return RRSConfig(
            w_bits=w_bits,
            a_bits=a_bits,
            rotate=self.rotate,
            group=self.group or case.group,
            smooth=self.smooth,
            smooth_targets=self.targets,
            weight_method=case.weights,
            w_clip=case.clip,
            sink=self.sink,
            seed=seed,
        )

    def __call__(self, case: Any, w_bits: int, a_bits: int, seed: int) -> Any:
        model = rounded_weights(case, self.rotate, seed if self.seeded else 0, w_bits)
        return configure_activations(model, self.config(case, w_bits, a_bits, seed))


@dataclass(frozen=True)
class SmoothQuant:
    """Static scales from calibration text, moved into the weights."""

    alpha: float = 0.5

    def __call__(self, case: Any, w_bits: int, a_bits: int, seed: int) -> Any:
        def build() -> Any:
            return quantize_smoothquant(
                case.fresh(), case.calib, w_bits=w_bits, alpha=self.alpha, w_clip=case.clip, weight_method=case.weights
            )

        model = shared_weights(case, (self, w_bits), build) if w_bits < 16 else build()
        return configure_activations(model, RRSConfig(w_bits=w_bits, a_bits=a_bits, rotate="none", smooth=False))


def rounded_weights(case: Any, rotate: str, seed: int, w_bits: int) -> Any:
    def build() -> Any:
        config = RRSConfig(
            w_bits=w_bits, a_bits=16, rotate=rotate, group="auto", weight_method=case.weights, w_clip=case.clip, seed=seed
        )
        return quantize_rrs(case.fresh(), config, calib=case.calib.split(2048))

    if rotate == "none" and w_bits == 16:
        return build()  # made in no time: not worth the memory of a second full-precision model
    return shared_weights(case, (rotate, seed, w_bits), build)


_WEIGHTS: dict[tuple[Any, ...], Any] = {}


def shared_weights(case: Any, key: tuple[Any, ...], build: Callable[[], Any]) -> Any:
    """A model with its weights done, kept for all arms and windows that differ only in activations.

    Weights that equal those of the full-precision model, or of another kept one, are held once. The oldest models go
    where all of them, and one in the making, would take more than `KEPT_BYTES`.
    """
    texts = [None if ids is None else hashlib.sha256(ids.numpy().tobytes()).hexdigest() for ids in (case.calib, case.kept)]
    key = (case.model, case.layers, case.weights, case.clip, *texts, *key)  # holds the model: an id could be taken again
    if key not in _WEIGHTS:
        base = case.original()
        while _WEIGHTS and _own_bytes(base) + held_bytes(base) > KEPT_BYTES:
            _WEIGHTS.pop(next(iter(_WEIGHTS)))
        model = build()
        for other in (base, *_WEIGHTS.values()):
            _share(model, other)
        _WEIGHTS[key] = model
    return _WEIGHTS[key]


def held_bytes(base: Any) -> int:
    """What the kept models take beside `base`."""
    own = _storages(base)
    return sum({p: n for model in _WEIGHTS.values() for p, n in _storages(model).items() if p not in own}.values())


def _own_bytes(model: Any) -> int:
    return sum(_storages(model).values())


def _storages(model: Any) -> dict[int, int]:
    tensors = [*model.parameters(), *model.buffers()]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def _share(model: Any, other: Any) -> None:
    theirs = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        twin = theirs.get(name)
        if twin is not None and twin.shape == parameter.shape and torch.equal(twin, parameter):
            parameter.data = twin.data
