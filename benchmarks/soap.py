"""One SOAP step beside pytorch_optimizer's and heavyball's, ten at a time so that each turn holds one refresh.

pytorch_optimizer works parameter by parameter, as the official code does; heavyball runs uncompiled, with SOAP's settings.
"""

from collections.abc import Callable, Iterator
from itertools import repeat

import heavyball
import pytorch_optimizer
import torch

from assay.bench.speed import Contest
from assay.optim import SOAP

heavyball.utils.compile_mode = None
FREQUENCY = 10
PER_PARAMETER, FASTER_PEER = 0.6, 1.0
Shapes = list[tuple[int, ...]]


def transformer(width: int, layers: int, vocabulary: int) -> Shapes:
    block: Shapes = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width), (width,), (width,)]
    return [(vocabulary, width), *block * layers, (width,)]


def ten_steps(make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], shapes: Shapes) -> Callable[[], None]:
    """A call that takes ten steps; parameters and optimizer are made at its first use, and warmed up."""

    def prepared() -> Iterator[tuple[list[torch.nn.Parameter], list[torch.Tensor], torch.optim.Optimizer]]:
        generator = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(0.02 * torch.randn(shape, generator=generator)) for shape in shapes]
        grads = [torch.randn(shape, generator=generator) for shape in shapes]
        yield from repeat((params, grads, make(params)))

    ready = prepared()

    def call() -> None:
        params, grads, optimizer = next(ready)
        for _ in range(FREQUENCY):
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad  # heavyball takes the gradient away
            optimizer.step()

    return call


def contests_on(name: str, shapes: Shapes, longest: int, rounds: int) -> list[Contest]:
    def ours(params):
        return SOAP(params, precondition_frequency=FREQUENCY, max_precond_dim=longest)

    def by_parameter(params):
        return pytorch_optimizer.SOAP(params, precondition_frequency=FREQUENCY, max_precondition_dim=longest)

    def by_heavyball(params):
        options = {"merge_dims": False, "use_precond_schedule": False, "max_precond_dim": longest}
        return heavyball.SOAP(params, betas=(0.95, 0.95), precondition_frequency=FREQUENCY, **options)

    mine = ten_steps(ours, shapes)
    return [
        Contest(
            f"ten steps, {name}", mine, ten_steps(by_parameter, shapes), "pytorch_optimizer.SOAP", PER_PARAMETER, rounds=rounds
        ),
        Contest(f"ten steps, {name}", mine, ten_steps(by_heavyball, shapes), "heavyball.SOAP", FASTER_PEER, rounds=rounds),
    ]


contests = [
    *contests_on("the desk model: 2 layers, d=64", transformer(64, 2, 107), 10_000, rounds=15),
    *contests_on("2 of 12 layers, d=512, axes up to 512", transformer(512, 2, 107), 512, rounds=5),  # 12 take six times as long
]
