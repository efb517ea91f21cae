"""Speed beside a peer: both in one process, turn by turn, as a ratio that holds when the machine's speed drifts."""

import contextlib
import gc
import importlib.util
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .config import UsageError
from .study import MissingExtra

_ROUNDS = 15
_SECONDS_A_TURN = 0.2


@dataclass(frozen=True)
class Contest:
    """One task, done by us and by a peer.

    Args:
        name: What is timed.
        ours: Takes no arguments; one call is one unit of work.
        peer: The same work by the peer.
        peer_name: Who that is.
        target: The largest ratio ours / peer that is acceptable; None reports it only.
        memory: Also measure the peak memory of one call of each.
        memory_target: The largest acceptable ratio of peak memory.
        rounds: Turns that each takes.
        note: What a reader should know.
    """

    name: str
    ours: Callable[[], Any]
    peer: Callable[[], Any]
    peer_name: str
    target: float | None = None
    memory: bool = False
    memory_target: float | None = None
    rounds: int = _ROUNDS
    note: str = ""


def compete(contest: Contest, *, progress: Callable[[str, float, str], None] | None = None) -> dict[str, Any]:
    """Runs a contest.

    Each turn is timed with ``torch.utils.benchmark.Timer``, ours and the peer's one after the other, the order swapped
    every round; the ratio is formed within a round.

    Returns:
        ``name, peer, ours_ms, peer_ms`` (medians), ``ratio`` (median), ``spread`` (quartiles), ``target``, ``met``;
        ``memory`` with ``ours_mb, peer_mb, ratio, target, met`` where asked for.
    """
    import torch
    from torch.utils.benchmark import Timer

    threads = torch.get_num_threads()
    sides = {"ours": contest.ours, "peer": contest.peer}
    calls = {}
    for side, call in sides.items():
        call()  # warm-up: first calls allocate, compile and fill caches
        started = time.perf_counter()
        call()
        calls[side] = max(1, min(1000, math.ceil(_SECONDS_A_TURN / max(time.perf_counter() - started, 1e-7))))
    timers = {side: Timer("call()", globals={"call": call}, num_threads=threads) for side, call in sides.items()}
    taken: dict[str, list[float]] = {"ours": [], "peer": []}
    for i in range(contest.rounds):
        gc.collect()
        for side in ("ours", "peer") if i % 2 == 0 else ("peer", "ours"):
            taken[side].append(timers[side].timeit(calls[side]).mean)
        if progress:
            progress(contest.name, (i + 1) / contest.rounds, f"{taken['ours'][-1] / taken['peer'][-1]:.2f}×")
    ratios = np.array(taken["ours"]) / np.array(taken["peer"])
    ratio = float(np.median(ratios))
    outcome: dict[str, Any] = {
        "name": contest.name,
        "peer": contest.peer_name,
        "ours_ms": float(np.median(taken["ours"])) * 1e3,
        "peer_ms": float(np.median(taken["peer"])) * 1e3,
        "ratio": ratio,
        "spread": [float(q) for q in np.quantile(ratios, (0.25, 0.75))],
        "rounds": contest.rounds,
        "threads": threads,
        "target": contest.target,
        "met": None if contest.target is None else ratio <= contest.target,
        "note": contest.note,
    }
    if contest.memory:
        ours_mb, peer_mb = (peak_memory_mb(call) for call in sides.values())
        memory_ratio = ours_mb / peer_mb if peer_mb > 0 else math.inf
        outcome["memory"] = {
            "ours_mb": ours_mb,
            "peer_mb": peer_mb,
            "ratio": memory_ratio,
            "target": contest.memory_target,
            "met": None if contest.memory_target is None else memory_ratio <= contest.memory_target,
        }
    return outcome


def peak_memory_mb(call: Callable[[], Any]) -> float:
    """Memory that one call adds at its peak, in MB: the GPU's where one is in use, else the process's resident memory.

    Resident memory is sampled every half millisecond, so a peak shorter than that may be missed; memory that the
    allocator already holds from earlier calls does not show. The larger of three calls is taken.
    """
    import torch

    if torch.cuda.is_available() and torch.cuda.memory_allocated() > 0:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    return max(_resident_peak_mb(call) for _ in range(3))


def _resident_peak_mb(call: Callable[[], Any]) -> float:
    import psutil

    gc.collect()
    _give_back_freed_memory()
    process = psutil.Process(os.getpid())
    before = peak = process.memory_info().rss
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.0005):
            peak = max(peak, process.memory_info().rss)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        kept = call()
        peak = max(peak, process.memory_info().rss)
        del kept
    finally:
        done.set()
        thread.join()
    return (peak - before) / 1e6


def _give_back_freed_memory() -> None:
    import ctypes

    with contextlib.suppress(AttributeError, OSError):  # glibc keeps freed pages; without this a second call needs none
        ctypes.CDLL(None).malloc_trim(0)


def load_contests(slug: str) -> list[Contest]:
    """The contests of ``benchmarks/<slug>.py``, looked for from the working directory and from the source tree.

    Raises:
        UsageError: there is no such file, or it defines no contest.
        MissingExtra: the peer is not installed.
    """
    places = [Path.cwd() / "benchmarks", Path(__file__).parents[3] / "benchmarks"]
    path = next((place / f"{slug}.py" for place in places if (place / f"{slug}.py").exists()), None)
    if path is None:
        raise UsageError(
            f"there is no benchmarks/{slug}.py in {' or '.join(str(p.parent) for p in dict.fromkeys(places))}: benchmarks "
            "come with the source tree, not with the installed package; run this from a checkout"
        )
    spec = importlib.util.spec_from_file_location(f"assay_benchmark_{slug}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtra(f"benchmarks/{slug}.py needs the package {error.name!r}, which is not installed") from error
    found = getattr(module, "contests", None) or [getattr(module, "contest", None)]
    if not all(isinstance(contest, Contest) for contest in found):
        raise UsageError(f"{path} must define `contest = Contest(...)` or `contests = [Contest(...), ...]`")
    return list(found)
