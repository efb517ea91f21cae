"""A study for the bench's own tests: arms are factors, a trial is arithmetic, and each start leaves a mark on disk.

An arm is a callable ``(x) -> x`` on a tensor.
``prepare`` returns a ``Case``: a tensor ``x``, ``(n,)``.
"""

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from assay.bench import Claim, Config, Study, Tune, at_least, at_most


class ToyConfig(Config):
    n: int = 16
    """Numbers in the tensor."""
    lr: float = 1.0
    """What is tuned."""
    sleep: float = 0.0
    """Seconds a trial takes."""
    marks: str = ""
    """Folder where every start of a trial or of prepare leaves a file."""
    die_once: str = ""
    """Arm whose worker kills itself the first time."""
    die_always: str = ""
    """Arm whose worker kills itself every time."""


class Case(NamedTuple):
    x: torch.Tensor


def mark(config, name):
    if config.marks:
        folder = Path(config.marks)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}-{time.time_ns()}").touch()
        return len(list(folder.glob(f"{name}-*")))
    return 0


def prepare(config, log) -> Case:
    mark(config, f"prepare-{log.replicate}")
    log.metric("prepared", float(log.seed), 0)
    return Case(torch.randn(config.n))


def trial(arm, shared, config, log):
    starts = mark(config, f"trial-{log.arm}-{log.replicate}-{config.lr}")
    if log.arm == config.die_always or (log.arm == config.die_once and starts == 1):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(config.sleep)
    y = arm(shared.x) + 0.01 * torch.randn(len(shared.x))
    shared.x.zero_()  # what a trial does to its copy reaches no other
    loss = (y.square().mean() * (1 + abs(torch.tensor(config.lr).log10()))).item()
    for step in range(5):
        log.metric("loss", loss / (step + 1), step)
    return {"final_loss": loss, "mean": y.mean().item()}


def scale(x, factor):
    return factor * x


study = Study(
    prepare=prepare,
    trial=trial,
    arms={"one": partial(scale, factor=1.0), "half": partial(scale, factor=0.5), "tenth": partial(scale, factor=0.1)},
    tune=Tune("lr", (0.1, 1.0, 10.0), select="final_loss", follow={"tenth": "half"}),
    scales={"smoke": ToyConfig(seeds=1), "desk": ToyConfig(seeds=2), "paper": ToyConfig(seeds=5, n=10**9)},
    gates=[Claim("the numbers are there", lambda r: r["one"].final_loss, holds=at_least(0.01))],
    claims=[
        Claim("half is at most half as large", lambda r: r["half"].final_loss / r["one"].final_loss, holds=at_most(0.5)),
        Claim("how small a tenth is", lambda r: r["tenth"].final_loss),
    ],
    compare=("final_loss",),
    paper="a billion numbers",
)
