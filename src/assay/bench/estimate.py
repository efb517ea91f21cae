"""How long a study will take here: its reference time, scaled by a one-second calibration of both machines."""

import contextlib
import json
import os
import platform
import time
from pathlib import Path
from typing import Any


def estimate(reference: dict[str, Any] | None) -> float | None:
    """Seconds that the reference run would take on this machine; None where that is not known."""
    if not reference or not reference["machine"].get("speed"):
        return None
    return reference["work_seconds"] * reference["machine"]["speed"] / speed()


def speed() -> float:
    """Rounds a second of a small fixed workload (a third Python, two thirds matrix products), measured once a machine."""
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "assay" / "speed.json"
    here = f"{platform.node()} {platform.machine()} {os.cpu_count()}"
    try:
        stored = json.loads(path.read_text())
        if stored["machine"] == here:
            return float(stored["speed"])
    except (OSError, ValueError, KeyError):
        pass
    measured = _measure()
    with contextlib.suppress(OSError):  # a read-only home: it is measured again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": here, "speed": measured}))
    return measured


def _measure(seconds: float = 1.0) -> float:
    import numpy as np

    matrix = np.random.default_rng(0).normal(size=(160, 160))
    rounds, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        product = matrix
        for _ in range(8):
            product = product @ matrix
            product /= np.abs(product).max()
        sum(i * i for i in range(15_000))
        rounds += 1
    return rounds / elapsed
