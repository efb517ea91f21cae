"""The Numenta Anomaly Benchmark: how its files become series with labels."""

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from .csv_series import parse_stamped, stamp
from .download import obtain
from .nab_files import GROUPS, HOME, SHA256, WINDOWS, WINDOWS_SHA256
from .places import DataUnavailable


def load(member: str) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Name, values ``(time, 1)`` and labels ``(time,)`` of all series of a group, of one series, or (``""``) of `GROUPS`."""
    group, _, one = member.partition("/")
    if group and (group not in SHA256 or (one and one not in SHA256[group])):
        raise DataUnavailable(f"nab/{member}", [], HOME, f"NAB has no such series; its groups are {', '.join(SHA256)}")
    windows = parse_windows(_file(WINDOWS, f"labels/{WINDOWS}", WINDOWS_SHA256).read_bytes())
    for each in [group] if group else GROUPS:
        for name in [one] if one else SHA256[each]:
            file = f"{each}/{name}.csv"
            path = _file(file, f"data/{file}", SHA256[each][name])
            stamps, values = parse_stamped(path.read_bytes(), str(path))
            yield f"nab/{each}/{name}", values, _inside(stamps, windows.get(file, []))


def parse_windows(raw: bytes) -> dict[str, list[tuple[datetime, datetime]]]:
    """The anomaly windows of each file, first and last moment, both within.

    Raises:
        ValueError: not JSON of the form ``{file: [[first, last], ...]}``.
    """
    try:
        table: Any = json.loads(raw)
        windows = {str(file): [(stamp(first), stamp(last)) for first, last in spans] for file, spans in table.items()}
        if any(first > last for spans in windows.values() for first, last in spans):
            raise ValueError("a window ends before it begins")
        return windows
    except (ValueError, TypeError, AttributeError, RecursionError) as wrong:
        raise ValueError(f"anomaly windows that cannot be read: {wrong}") from None


def _inside(stamps: list[datetime], spans: list[tuple[datetime, datetime]]) -> np.ndarray:
    when = np.array(stamps, dtype="datetime64[us]")
    labels = np.zeros(len(when), dtype=bool)
    for first, last in spans:
        labels |= (when >= np.datetime64(first)) & (when <= np.datetime64(last))
    return labels


def _file(local: str, remote: str, sha256: str) -> Path:
    # a checkout of the repository serves as well as the flat layout
    places = (f"series/NAB/{local}", f"NAB/{remote}")
    return obtain("nab", places, f"{HOME}/{remote}", sha256, "https://github.com/numenta/NAB")
