"""The IDX format of MNIST and its relatives: a big-endian header, then the numbers."""

import gzip
import zlib
from pathlib import Path

import numpy as np


def read_idx(path: Path, *, largest: int = 1 << 30) -> np.ndarray:
    """An array of unsigned bytes from an IDX file, gzip-compressed or not.

    Raises:
        ValueError: Not IDX, another element type, or more or fewer bytes than the header promises, or above `largest`.
    """
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        raw = _unzip(raw, path, largest)
    return parse_idx(raw, str(path))


def parse_idx(raw: bytes, label: str = "IDX data") -> np.ndarray:
    """The array in the bytes of an IDX file, writable and apart from them."""
    if len(raw) < 4 or raw[:2] != b"\0\0":
        raise ValueError(f"{label} is not IDX: it begins with {raw[:4]!r}")
    kind, rank = raw[2], raw[3]
    if kind != 8:
        raise ValueError(f"{label} holds elements of type 0x{kind:02x}; only unsigned bytes (0x08) are read")
    start = 4 + 4 * rank
    if rank == 0 or len(raw) < start:
        raise ValueError(f"{label} breaks off inside its header of {rank} dimensions")
    shape = tuple(int(n) for n in np.frombuffer(raw, ">u4", rank, 4))
    count = 1
    for n in shape:
        count *= n  # Python's integers: sizes from a file may overflow any other
    if len(raw) - start != count:
        raise ValueError(f"{label} promises {count} bytes of shape {shape} and holds {len(raw) - start}")
    try:
        return np.frombuffer(raw, np.uint8, offset=start).reshape(shape).copy()
    except ValueError as wrong:  # more than 64 dimensions, or zeros beside sizes that overflow
        raise ValueError(f"{label} has a shape that cannot be: {wrong}") from None


def _unzip(raw: bytes, path: Path, largest: int) -> bytes:
    import io

    try:
        with gzip.GzipFile(fileobj=io.BytesIO(raw)) as stream:
            out = stream.read(largest + 1)
    except (OSError, EOFError, zlib.error) as wrong:
        raise ValueError(f"{path} is not a whole gzip file: {wrong}") from None
    if len(out) > largest:
        raise ValueError(f"{path} unpacks to more than {largest} bytes")
    return out
