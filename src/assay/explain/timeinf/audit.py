"""Which anomaly labels do the scores contradict?"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from pandas import DataFrame


def audit_labels(scores: ArrayLike, labels: ArrayLike, windows: Sequence[tuple[int, int]] | None = None) -> "DataFrame":
    """Hold every labelled window against the unlabelled windows of the same length.

    A window's *percentile* is the share of unlabelled windows of its length with a smaller mean score. A labelled window
    below 50 looks like any other stretch: its label is doubtful. An unlabelled window (of the median labelled length,
    none overlapping another) above the median labelled percentile looks like the labelled ones: a label may be missing.

    Args:
        scores: Anomaly scores ``(T,)``, high = odd; NaN points are left out of means.
        labels: True where labelled anomalous, ``(T,)``.
        windows: Labelled windows as ``(start, end)``, end excluded; by default the runs of true labels.

    Returns:
        A row a window: ``start``, ``end``, ``labelled``, ``mean_score``, ``percentile``, ``finding`` (``"agrees"``,
        ``"label doubtful"``, ``"label missing?"``); labelled windows first, then by falling percentile.

    Raises:
        ValueError: shapes that differ, no labelled window, a window outside the series, no room for an unlabelled window.

    Example:
        >>> scores = np.zeros(100); scores[10:15] = 5; scores[60:65] = 9
        >>> labels = np.zeros(100, dtype=bool); labels[10:15] = True
        >>> audit_labels(scores, labels)[["start", "labelled", "finding"]].values.tolist()
        [[10, True, 'agrees'], [60, False, 'label missing?']]
    """
    import pandas as pd

    scores, labels = np.asarray(scores, dtype=float), np.asarray(labels)
    if labels.dtype != bool:
        if labels.dtype.kind not in "iuf" or not np.isin(labels, (0, 1)).all():
            raise ValueError("labels must be booleans, or 0 and 1")
        labels = labels.astype(bool)
    if scores.ndim != 1 or scores.shape != labels.shape:
        raise ValueError(f"scores and labels must be (T,) alike, got {scores.shape} and {labels.shape}")
    spans = _runs(labels) if windows is None else [(int(a), int(b)) for a, b in windows]
    if not spans:
        raise ValueError("no labelled window to audit: labels are all false")
    if wrong := [span for span in spans if not 0 <= span[0] < span[1] <= len(scores)]:
        raise ValueError(f"windows must lie in 0..{len(scores)} with start < end, got {wrong[0]}")
    labelled = labels.copy()
    for a, b in spans:
        labelled[a:b] = True

    rows = []
    pools: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for a, b in spans:
        length = b - a
        if length not in pools:
            pools[length] = _unlabelled(scores, labelled, length)
        mean = _mean(scores[a:b])
        percentile = _percentile(pools[length][1], mean)
        rows.append((a, b, True, mean, percentile, "label doubtful" if percentile < 50 else "agrees"))

    percentiles = np.array([row[4] for row in rows])
    if not np.isfinite(percentiles).any():
        raise ValueError("scores are NaN in every labelled window: there is nothing to audit")
    bar = float(np.nanmedian(percentiles))
    length = int(np.median([b - a for a, b in spans]))
    starts, means = pools[length] if length in pools else _unlabelled(scores, labelled, length)
    for start, mean in _apart(starts, means, length, above=float(np.percentile(means, bar))):
        percentile = _percentile(means, mean)
        if percentile > bar:
            rows.append((start, start + length, False, mean, percentile, "label missing?"))
    table = pd.DataFrame(rows, columns=["start", "end", "labelled", "mean_score", "percentile", "finding"])
    return table.sort_values(["labelled", "percentile"], ascending=False, kind="stable", ignore_index=True)


def _runs(labels: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.r_[0, labels.astype(int), 0]))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _unlabelled(scores: np.ndarray, labelled: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts and mean scores of the windows that touch no label."""
    free = np.flatnonzero(~sliding_window_view(labelled, length).any(axis=1))
    known = np.isfinite(scores)
    sums = np.r_[0.0, np.cumsum(np.where(known, scores, 0.0))]
    counts = np.r_[0, np.cumsum(known)]
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (sums[free + length] - sums[free]) / (counts[free + length] - counts[free])
    free, means = free[np.isfinite(means)], means[np.isfinite(means)]
    if len(free) == 0:
        raise ValueError(f"no unlabelled window of {length} points to compare a labelled one with")
    return free, means


def _mean(scores: np.ndarray) -> float:
    known = scores[np.isfinite(scores)]
    return float(known.mean()) if len(known) else float("nan")


def _percentile(pool: np.ndarray, mean: float) -> float:
    return 100 * float((pool < mean).mean()) if np.isfinite(mean) else float("nan")


def _apart(starts: np.ndarray, means: np.ndarray, length: int, *, above: float) -> list[tuple[int, float]]:
    """Highest window first, then the next highest that overlaps none taken."""
    taken: list[tuple[int, float]] = []
    blocked = np.zeros(int(starts[-1]) + length, dtype=bool)  # starts that would overlap a window already taken
    for i in np.argsort(-means, kind="stable"):
        start = int(starts[i])
        if means[i] < above:
            break
        if not blocked[start]:
            taken.append((start, float(means[i])))
            blocked[max(0, start - length + 1) : start + length] = True
    return taken
