"""One update of the reference beside TRL's loop of two operations a tensor, on a model's shapes and on many small tensors."""

from collections.abc import Callable, Iterator
from itertools import repeat

import torch
from torch import nn
from trl.trainer.callbacks import SyncRefModelCallback

from assay.alignment import ReferenceUpdater
from assay.bench.speed import Contest

LARGE, SMALL = 0.7, 0.25
ALPHA = 0.6


class Tensors(nn.Module):
    def __init__(self, shapes: list[tuple[int, ...]], generator: torch.Generator):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes)


def llama(
    layers: int = 30, width: int = 576, inner: int = 1536, kv: int = 192, vocabulary: int = 49152
) -> list[tuple[int, ...]]:
    """SmolLM2-135M's shapes."""
    block: list[tuple[int, ...]] = [
        *[(width, width)] * 2, *[(kv, width)] * 2, *[(inner, width)] * 2, (width, inner), (width,), (width,),
    ]  # fmt: skip
    return [(vocabulary, width), *block * layers, (width,)]


def both(shapes: list[tuple[int, ...]], check: bool) -> tuple[Callable[[], None], Callable[[], None]]:
    """Ours and TRL's, on models that are made at the first call."""

    def prepared() -> Iterator[tuple[Tensors, Tensors, ReferenceUpdater]]:
        generator = torch.Generator().manual_seed(0)
        policy, reference = Tensors(shapes, generator), Tensors(shapes, generator)
        yield from repeat((policy, reference, ReferenceUpdater(policy, reference, alpha=ALPHA, every=1, check_finite=check)))

    ready = prepared()

    def ours() -> None:
        next(ready)[2].step()

    def theirs() -> None:
        policy, reference, _ = next(ready)
        SyncRefModelCallback._sync_target_model(policy, reference, ALPHA)

    return ours, theirs


PEER = "trl SyncRefModelCallback"
contests = [
    Contest("update, 135M float32 weights, unchecked", *both(llama(), False), PEER, LARGE, rounds=7),
    Contest("update, 135M float32 weights, checked for NaN", *both(llama(), True), PEER, rounds=7),
    Contest("update, 2,000 tensors of 64, unchecked", *both([(64,)] * 2000, False), PEER, SMALL, rounds=30),
    Contest("update, 2,000 tensors of 64, checked for NaN", *both([(64,)] * 2000, True), PEER, rounds=30),
]
