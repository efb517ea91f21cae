"""Quality at equal distance: the best reward that a run reaches within each bin of KL."""

import numpy as np

WIDTH = 0.5  # nats


def frontier(kl: np.ndarray, gold: np.ndarray, width: float = WIDTH) -> dict[int, float]:
    """Bin to the best reward of the checkpoints in it; bin b holds KL from ``b · width`` up to ``(b+1) · width``.

    Example:
        >>> frontier(np.array([0.1, 0.4, 0.7]), np.array([1.0, 2.0, 1.5]))
        {0: 2.0, 1: 1.5}
    """
    best: dict[int, float] = {}
    for b, value in zip(np.floor(np.asarray(kl) / width).astype(int).tolist(), np.asarray(gold).tolist(), strict=True):
        best[b] = max(value, best.get(b, -np.inf))
    return best


def shared_bins(kl: np.ndarray, other: np.ndarray, width: float = WIDTH) -> list[int]:
    """Bins that both runs have a checkpoint in."""
    return sorted(frontier(kl, kl, width).keys() & frontier(other, other, width).keys())


def gain_at_equal_kl(
    ours: tuple[np.ndarray, np.ndarray], theirs: tuple[np.ndarray, np.ndarray], width: float = WIDTH
) -> float | None:
    """Mean difference of the two frontiers over the bins that both reach; None where they share none.

    Example:
        >>> gain_at_equal_kl((np.array([0.1, 0.7]), np.array([1.0, 2.0])), (np.array([0.2, 5.0]), np.array([0.5, 9.0])))
        0.5
    """
    a, b = frontier(*ours, width), frontier(*theirs, width)
    both = a.keys() & b.keys()
    return float(np.mean([a[k] - b[k] for k in both])) if both else None
