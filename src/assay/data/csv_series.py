"""Numbers out of a CSV file, with the line and column named when they are none."""

import csv
import io
from datetime import datetime

import numpy as np

LABEL_NAMES = {"label", "anomaly", "is_anomaly"}
LEFT_OUT = {"timestamp", "time", "date", "datetime", ""}  # pandas writes its index under an empty name


def parse_csv(raw: bytes, label: str = "CSV data") -> tuple[np.ndarray, np.ndarray | None]:
    """``values (time, channels)`` float64 and, where there is a label column, ``labels (time,)`` bool.

    Raises:
        ValueError: not UTF-8, no rows, rows of unequal length, a cell that is not a finite number, a label not 0 or 1.
    """
    header, rows = _rows(raw, label)
    width = len(rows[0][1])
    for line, row in rows:
        if len(row) != width or (header and len(header) != width):
            raise ValueError(f"{label}, line {line}: {len(row)} columns, expected {len(header) if header else width}")
    names = [name.strip().lower() for name in header] or [f"channel {i}" for i in range(width)]
    is_label = [name in LABEL_NAMES for name in names]
    if sum(is_label) > 1:
        raise ValueError(f"{label}: {sum(is_label)} label columns, expected at most one of {', '.join(sorted(LABEL_NAMES))}")
    left_out = [name in LEFT_OUT or _is_stamp(cell) for name, cell in zip(names, rows[0][1], strict=True)]
    channels = [i for i in range(width) if not is_label[i] and not left_out[i]]
    if not channels:
        raise ValueError(f"{label}: no column of numbers")
    values = np.column_stack([_column(rows, i, label) for i in channels])
    if not any(is_label):
        return values, None
    marks = _column(rows, is_label.index(True), label)
    if not np.isin(marks, (0, 1)).all():
        raise ValueError(f"{label}: the label column must hold 0 and 1 alone")
    return values, marks.astype(bool)


def parse_stamped(raw: bytes, label: str) -> tuple[list[datetime], np.ndarray]:
    """The time stamps and the values ``(time, 1)`` of a CSV file with the columns ``timestamp,value``."""
    header, rows = _rows(raw, label)
    if header != ["timestamp", "value"] or any(len(row) != 2 for _, row in rows):
        raise ValueError(f"{label}: expected the two columns timestamp,value")
    try:
        stamps = [stamp(row[0]) for _, row in rows]
    except ValueError as wrong:
        raise ValueError(f"{label}: a time stamp that cannot be read: {wrong}") from None
    return stamps, _column(rows, 1, label)[:, None]


def stamp(text: str) -> datetime:
    """A moment in ISO form without a zone; with one, moments of one file could not be compared."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is not None:
        raise ValueError(f"the time stamp {text!r} has a zone")
    return moment


def _rows(raw: bytes, label: str) -> tuple[list[str], list[tuple[int, list[str]]]]:
    try:
        reader = csv.reader(io.StringIO(raw.decode("utf-8-sig"), newline=""), strict=True)
        rows = [(reader.line_num, row) for row in reader if row]
    except (UnicodeDecodeError, csv.Error) as wrong:
        raise ValueError(f"{label} is not a CSV file in UTF-8: {wrong}") from None
    header = rows.pop(0)[1] if rows and not any(_is_number(cell) or _is_stamp(cell) for cell in rows[0][1]) else []
    if not rows:
        raise ValueError(f"{label} holds no rows")
    return header, rows


def _column(rows: list[tuple[int, list[str]]], i: int, label: str) -> np.ndarray:
    cells = [row[i] for _, row in rows]
    try:
        column = np.array([float(cell) for cell in cells])
        if np.isfinite(column).all():
            return column
    except ValueError:
        pass
    line, cell = next((line, row[i]) for line, row in rows if not _is_number(row[i]))
    raise ValueError(f"{label}, line {line}, column {i + 1}: expected a finite number, got {cell!r}")


def _is_number(cell: str) -> bool:
    try:
        return bool(np.isfinite(float(cell)))
    except ValueError:
        return False


def _is_stamp(cell: str) -> bool:
    if _is_number(cell):  # 20140401 is a number here, not a day
        return False
    try:
        datetime.fromisoformat(cell.strip())
    except ValueError:
        return False
    return True
