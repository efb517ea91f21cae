"""Printed capital letters as sixteen numbers each."""

import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .places import DataUnavailable, find, looked_at

HOME = "https://archive.ics.uci.edu/dataset/59/letter+recognition"
PLACES = ("letters/letter-recognition.data", "letter-recognition/letter-recognition.data")
ATTRIBUTES = 16
_ROW = re.compile(rb"([A-Z])((?:,(?:[0-9]|1[0-5])){16})")


@dataclass(frozen=True)
class Letters:
    """Letters of many fonts: ``features (n, 16)`` uint8 in 0 … 15, ``labels (n,)`` int64 with 0 for A … 25 for Z,
    ``is_test (n,)`` bool."""

    features: np.ndarray = field(repr=False)
    labels: np.ndarray = field(repr=False)
    is_test: np.ndarray = field(repr=False)
    source: str

    def __len__(self) -> int:
        return len(self.labels)


def load_letters(name: str | Path = "letters") -> Letters:
    """Capital letters described by sixteen moments and edge counts. The last fifth of the rows is for testing, as usual.

    Args:
        name: ``"letters"``: Letter Recognition of UCI (Slate, 1991), 20,000 rows; or the path of your own file of its form:
            a line ``letter,number,…`` with sixteen numbers each, and maybe a header.

    Raises:
        ValueError: a line that is not of that form (its number is named), fewer than five rows.
        DataUnavailable: no such file.
    """
    named = str(name) == "letters"
    path = find(*PLACES) if named else Path(name).expanduser()
    if path is None or not path.is_file():
        raise DataUnavailable(str(name), looked_at(*PLACES) if named else [str(path)], HOME, "the file is not there")
    features, labels = parse_letters(path.read_bytes(), path.name)
    if len(labels) < 5:
        raise ValueError(f"{path.name} holds {len(labels)} letters; five is the least that can be split")
    return Letters(features, labels, np.arange(len(labels)) >= len(labels) - len(labels) // 5, str(name))


def parse_letters(raw: bytes, where: str = "file") -> tuple[np.ndarray, np.ndarray]:
    """Attributes ``(n, 16)`` uint8 and letters ``(n,)`` int64 of one file.

    Raises:
        ValueError: a line other than the first that is no capital letter with sixteen numbers in 0 … 15; or a first one
            that is neither that nor a header of seventeen names.
    """
    features, labels = [], []
    for number, line in enumerate(raw.split(b"\n"), 1):
        line = line.strip()
        row = _ROW.fullmatch(line)
        if row:
            labels.append(row[1][0] - ord("A"))
            features.append([int(value) for value in row[2][1:].split(b",")])
        elif line and not (number == 1 and line[:6].lower() == b"letter" and line.count(b",") == ATTRIBUTES):
            raise ValueError(f"{where}, line {number}: not a capital letter and {ATTRIBUTES} numbers in 0 … 15")
    return np.array(features, dtype=np.uint8).reshape(-1, ATTRIBUTES), np.array(labels, dtype=np.int64)
