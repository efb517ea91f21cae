"""A training step of a 10-million-parameter MLP under AdamW(foreach=True), with Syre and without; and the step alone."""

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Literal

import torch
from torch import nn

from assay.bench.speed import Contest
from assay.optim import Syre

WIDTH, LAYERS, BATCH = 1024, 10, 256
ROUNDS = 9
STORED, SEEDED = 1.05, 1.20
Store = Literal["seed", "tensor"]


def prepared(store: Store | None) -> Iterator[tuple[nn.Module, torch.Tensor, torch.optim.Optimizer]]:
    """The network, its input and its optimizer; made at first use."""
    torch.manual_seed(0)
    net = nn.Sequential(*(m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0.05, foreach=True)
    if store:
        Syre(optimizer, store=store)
    x = torch.randn(BATCH, WIDTH)
    net(x).square().mean().backward()
    yield from repeat((net, x, optimizer))


def training_step(store: Store | None) -> Callable[[], None]:
    ready = prepared(store)

    def call() -> None:
        net, x, optimizer = next(ready)
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    return call


def optimizer_step(store: Store | None) -> Callable[[], None]:
    ready = prepared(store)
    return lambda: next(ready)[2].step()


NOTE = f"{LAYERS} layers of {WIDTH}×{WIDTH}"
PEER = "AdamW(foreach=True)"
plain_training, plain_step = training_step(None), optimizer_step(None)
contests = [
    Contest(
        f"training step, batch {BATCH}, kept anchors",
        training_step("tensor"),
        plain_training,
        PEER,
        STORED,
        rounds=ROUNDS,
        note=NOTE,
    ),
    Contest(
        f"training step, batch {BATCH}, anchors from a seed",
        training_step("seed"),
        plain_training,
        PEER,
        SEEDED,
        rounds=ROUNDS,
        note=NOTE,
    ),
    Contest("optimizer.step() alone, kept anchors", optimizer_step("tensor"), plain_step, PEER, rounds=ROUNDS, note=NOTE),
    Contest("optimizer.step() alone, anchors from a seed", optimizer_step("seed"), plain_step, PEER, rounds=ROUNDS, note=NOTE),
]
