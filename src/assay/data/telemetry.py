"""NASA's anomaly sets SMAP (a satellite) and MSL (the rover Curiosity): the telemetry, channel 0, of every channel."""

import ast
import csv
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .npz import read_npy, read_npz
from .places import DataUnavailable, find, looked_at

HOME = "https://github.com/khundman/telemanom (data.zip and labeled_anomalies.csv, unpacked to telemanom/)"
PLACES = ("series/smap_msl_dim0.npz", "telemanom/labeled_anomalies.csv")
Row = tuple[str, np.ndarray, np.ndarray, np.ndarray]


def load(group: str) -> list[Row]:
    """Name, test values, test labels and training values of every labelled channel of ``"smap"`` or ``"msl"``."""
    path = find(*PLACES)
    if path is None:
        raise DataUnavailable(group, looked_at(*PLACES), HOME, "its archive is not fetched automatically")
    channels = from_npz(path, group) if path.suffix == ".npz" else from_telemanom(path, group)
    return [(f"{group}/{name}", *arrays) for name, *arrays in sorted(channels, key=lambda row: row[0])]  # type: ignore[misc]


def from_npz(path: Path, group: str) -> Iterator[Row]:
    """Keys ``<SMAP|MSL>_<channel>_{train,test,test_label}``, each ``(time,)``."""
    prefix, ending = f"{group.upper()}_", "_test_label"
    arrays = read_npz(path)
    for key in [key for key in arrays if key.startswith(prefix) and key.endswith(ending)]:
        name = key.removeprefix(prefix).removesuffix(ending)
        marks, test, train = arrays[key], arrays.get(f"{prefix}{name}_test"), arrays.get(f"{prefix}{name}_train")
        if test is None or train is None:
            raise ValueError(f"{path}, channel {name}: its test or its training values are missing")
        if marks.dtype.kind not in "bui" or marks.shape != test.shape[:1] or not np.isin(marks, (0, 1)).all():
            raise ValueError(f"{path}, channel {name}: labels must be 0 or 1, one for each of {test.shape} values")
        yield name, _telemetry(test, path, name), marks.astype(bool), _telemetry(train, path, name)


def from_telemanom(table: Path, group: str) -> Iterator[Row]:
    """The published layout: ``{train,test}/<channel>.npy`` ``(time, inputs)``, and a table of anomalous stretches."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for row in csv.DictReader(io.StringIO(table.read_text(encoding="utf-8"))):
        try:
            stretches = [(int(a), int(b)) for a, b in ast.literal_eval(row["anomaly_sequences"])]
            if row["spacecraft"].lower() == group:
                spans.setdefault(row["chan_id"], []).extend(stretches)  # P-2 has two rows
        except (KeyError, ValueError, TypeError, SyntaxError, AttributeError) as wrong:
            raise ValueError(f"{table}: a row that cannot be read, {row}: {wrong}") from None
    data = table.parent / "data" if (table.parent / "data").is_dir() else table.parent
    for name, stretches in spans.items():
        arrays = []
        for part in ("test", "train"):
            path = data / part / f"{name}.npy"
            if not path.is_file():
                raise DataUnavailable(group, [path], HOME)
            arrays.append(_telemetry(read_npy(path), path, name))
        labels = np.zeros(len(arrays[0]), dtype=bool)
        for first, last in stretches:
            labels[first : last + 1] = True  # both ends are anomalous
        yield name, arrays[0], labels, arrays[1]


def _telemetry(array: np.ndarray, path: Path, name: str) -> np.ndarray:
    if array.dtype.kind not in "fiu" or array.ndim not in (1, 2) or array.size == 0:
        raise ValueError(f"{path}, channel {name}: expected numbers (time,) or (time, inputs), got {array.dtype} {array.shape}")
    values = array.reshape(len(array), -1)[:, :1].astype(np.float64)  # the commands that follow channel 0 are left out
    if not np.isfinite(values).all():
        raise ValueError(f"{path}, channel {name}: {(~np.isfinite(values)).sum()} values are not finite")
    return values
