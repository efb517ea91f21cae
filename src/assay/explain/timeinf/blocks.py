"""Overlapping blocks of a series, and the way back from values of blocks to values of time points."""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

Membership = Literal["all", "lags"]


class Blocks:
    """The blocks of one or several series: block ``b`` has lags ``z[b : b + m]`` and target ``z[b + m]``.

    Nothing of size ``T x m`` is ever stored: blocks are read through a strided view, a chunk of rows at a time.
    Several series are laid end to end; no block spans two of them.

    Args:
        series: Arrays ``(T, D)``, float64, finite, all with the same ``D``.
        block_length: ``m``, at least 1 and below every ``T``.
    """

    def __init__(self, series: Sequence[np.ndarray], block_length: int):
        self.series = [np.ascontiguousarray(z) for z in series]
        self.block_length = block_length

    @property
    def lengths(self) -> list[int]:
        """Blocks in each series, ``T - m``."""
        return [len(z) - self.block_length for z in self.series]

    @property
    def n(self) -> int:
        return sum(self.lengths)

    @property
    def channels(self) -> int:
        return self.series[0].shape[1]

    @property
    def width(self) -> int:
        """Columns of the lag matrix, ``m D``."""
        return self.block_length * self.channels

    def chunks(self, rows: int) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
        """Yield ``(where, lags, targets)``, the arrays of shape ``(c, m D)`` and ``(c, D)``, ``c <= rows``.

        ``lags`` is a view. Its columns run time-major (all channels of the oldest point first): in a C-ordered ``(T, D)``
        series that is the order in memory, so a block is one stretch of it.
        """
        start = 0
        for z, n in zip(self.series, self.lengths, strict=True):
            lags = sliding_window_view(z.ravel(), self.width)[:: self.channels][:n]  # (n, m D), the last window has no target
            targets = z[self.block_length :]  # (n, D)
            for low in range(0, n, rows):
                high = min(low + rows, n)
                yield slice(start + low, start + high), lags[low:high], targets[low:high]
            start += n

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        """Cut an array over all blocks ``(n,)`` into one per series."""
        return np.split(values, np.cumsum(self.lengths)[:-1])


def coverage(n: int, block_length: int, membership: Membership) -> np.ndarray:
    """How many of ``n`` blocks contain each of the ``n + m`` points: fewer at both ends."""
    t, width = np.arange(n + block_length), block_length + (membership == "all")
    return np.minimum(t + 1, n) - np.clip(t + 1 - width, 0, n)


def time_average(values: np.ndarray, block_length: int, membership: Membership) -> tuple[np.ndarray, np.ndarray]:
    """Mean over the blocks that contain a point, and how many those are; ``(n,)`` to ``(n + m,)`` twice.

    ``"all"``: blocks with ``t`` among their lags or as target, ``b in [t - m, t]``. ``"lags"``: ``b in [t - m + 1, t]``.
    A NaN value is a block that does not count; a point with no block left gets NaN and coverage 0.
    """
    width = block_length + (membership == "all")
    around = (width - 1, block_length)
    known = np.isfinite(values)
    if known.all():
        total, counts = _window_sums(np.pad(values, around), width), coverage(len(values), block_length, membership)
    else:
        total = _window_sums(np.pad(np.where(known, values, 0.0), around), width)
        counts = np.rint(_window_sums(np.pad(known.astype(float), around), width)).astype(int)
    return np.where(counts > 0, total / np.maximum(counts, 1), np.nan), counts


def _window_sums(padded: np.ndarray, width: int) -> np.ndarray:
    """Sums of all windows of ``width`` in O(n).

    Running sums restart at every multiple of ``width``, and a window is the end of one stretch plus the beginning of the
    next. The difference of two sums over the whole series would lose the digits of small values behind a large one.
    """
    windows = len(padded) - width + 1
    stretches = np.pad(padded, (0, -len(padded) % width)).reshape(-1, width)
    ahead = np.cumsum(stretches, axis=1).ravel()
    behind = np.cumsum(stretches[:, ::-1], axis=1)[:, ::-1].ravel()
    sums = behind[:windows].copy()
    sums += ahead[width - 1 : width - 1 + windows]
    sums[::width] = behind[:windows:width]  # exactly one stretch
    return sums
