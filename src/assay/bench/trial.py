"""One piece of work, run so that whatever happens to it happens to nothing else. The same code here and on a cluster."""

import math
import os
import resource
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from .config import Config, UsageError
from .log import Log, Progress, seed_everything
from .study import NotApplicable, Study, seed_of


class Status(StrEnum):
    FINISHED = "finished"
    FAILED = "failed"
    """It raised, or ran out of memory."""
    DIVERGED = "diverged"
    """A number it logged or returned was not finite."""
    SKIPPED = "skipped"
    """It needs a package that is not installed, or does not apply to the case."""


@dataclass
class TrialResult:
    """What one trial left: numbers or the reason there are none."""

    status: Status
    metrics: dict[str, float] = field(default_factory=dict)
    curves: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    peak_mb: float = 0.0
    error: str = ""
    trace: str = ""


@dataclass(frozen=True)
class Task:
    """One arm on one replicate under one configuration."""

    arm: str
    replicate: str
    config: Config
    key: str
    tuning: bool = False


def run_trial(
    study: Study,
    arm: Any,
    task: Task,
    shared: Any,
    *,
    scale: str,
    device: str,
    progress: Progress | None = None,
) -> TrialResult:
    """Runs one trial. Never raises except for KeyboardInterrupt, SystemExit and usage errors."""
    log = Log(
        seed=seed_of(task.replicate), replicate=task.replicate, scale=scale, device=device, arm=task.arm, progress=progress
    )
    started = time.perf_counter()
    status, metrics, error, trace = Status.FINISHED, {}, "", ""
    with _PeakMemory() as memory:
        try:
            _settle(task.config, log.seed)
            metrics = _checked_metrics(study.trial(arm, shared, task.config, log))
        except UsageError:
            raise
        except NotApplicable as gap:
            status, error = Status.SKIPPED, str(gap)
        except FloatingPointError as gap:
            status, error, trace = Status.DIVERGED, str(gap), traceback.format_exc()
        except Exception as gap:  # isolation is the point: any error is this trial's alone
            status, error, trace = Status.FAILED, f"{type(gap).__name__}: {gap}", traceback.format_exc()
            del gap
            _free_memory()
    return TrialResult(
        status=status,
        metrics=metrics,
        curves=log.curves,
        files=log.files,
        notes=log.notes,
        seconds=time.perf_counter() - started,
        peak_mb=memory.peak_mb,
        error=error,
        trace=trace,
    )


def run_prepare(
    study: Study, replicate: str, config: Config, *, scale: str, device: str, progress: Progress | None = None
) -> tuple[Any, dict[str, Any]]:
    """Runs ``prepare`` for a replicate, seeded and with the trial's number of threads. Its errors are the caller's.

    Returns:
        What it made, and what it noted on the way: ``curves``, ``notes``, ``seconds``.
    """
    assert study.prepare is not None
    log = Log(seed=seed_of(replicate), replicate=replicate, scale=scale, device=device, progress=progress)
    _settle(config, log.seed)
    started = time.perf_counter()
    made = study.prepare(config, log)
    return made, {"curves": log.curves, "notes": log.notes, "seconds": time.perf_counter() - started}


def _settle(config: Config, seed: int) -> None:
    import torch
    from threadpoolctl import threadpool_limits

    # Sums come out differently with another number of threads: fixed by the config, so that every executor agrees.
    threads = max(1, int(config.num_cpus))
    threadpool_limits(threads)  # NumPy's and scikit-learn's libraries, which would otherwise take every core
    torch.set_num_threads(threads)
    seed_everything(seed)


def _checked_metrics(returned: Any) -> dict[str, float]:
    if not isinstance(returned, Mapping):
        raise TypeError(f"trial must return a mapping from metric to number, got {type(returned).__name__}")
    metrics = {}
    for name, value in returned.items():
        try:
            metrics[str(name)] = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"metric {name!r} must be a number, got {value!r}") from error
        if not math.isfinite(metrics[name]):
            raise FloatingPointError(f"metric {name!r} is {metrics[name]}")
    return metrics


def _free_memory() -> None:
    import gc

    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


class _PeakMemory:
    """The largest resident memory of the process while it runs (and of the GPU, where one is in use), in MB."""

    peak_mb = 0.0

    def __enter__(self) -> "_PeakMemory":
        import psutil

        self._process = psutil.Process(os.getpid())
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while True:
            self.peak_mb = max(self.peak_mb, self._process.memory_info().rss / 1e6)
            if self._done.wait(0.05):
                return

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def lifetime_peak_mb() -> float:
    """The largest resident memory this process has ever had, in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e6 if sys.platform == "darwin" else 1e3)
