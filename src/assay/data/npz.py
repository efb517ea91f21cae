"""NumPy's files from outside: any bytes give arrays or a ValueError."""

import zlib
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

# what NumPy and zipfile raise on damaged archives, beside ValueError: headers that lie about sizes, methods and fields
_BROKEN = (
    *(AttributeError, BadZipFile, EOFError, KeyError, MemoryError, NotImplementedError, OSError, OverflowError),
    *(RuntimeError, SyntaxError, TypeError, ValueError, zlib.error),
)


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an npz archive by name; pickled objects are refused.

    Raises:
        ValueError: Not an npz archive, a damaged one, or one that holds anything but arrays.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive}
    except _BROKEN as wrong:
        raise ValueError(f"{path} is not an npz archive that can be read: {type(wrong).__name__}: {wrong}") from None
    if not all(isinstance(array, np.ndarray) for array in arrays.values()):
        raise ValueError(f"{path} holds members that are not arrays")
    return arrays


def read_npy(path: Path) -> np.ndarray:
    """The array of an npy file; pickled objects are refused.

    Raises:
        ValueError: Not an npy file, or a damaged one.
    """
    try:
        array = np.load(path, allow_pickle=False)
    except _BROKEN as wrong:
        raise ValueError(f"{path} is not an npy file that can be read: {type(wrong).__name__}: {wrong}") from None
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path} is an archive, not one array")
    return array
