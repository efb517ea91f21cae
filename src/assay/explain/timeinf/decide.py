"""Before and after the influences: filling gaps, the official scaling, and how many points to flag."""

import numpy as np


def fill_missing(z: np.ndarray) -> np.ndarray:
    """Replace NaN by linear interpolation in time, channel by channel; the ends are held."""
    z = z.copy()
    t = np.arange(len(z))
    for channel in z.T:
        missing = np.isnan(channel)
        if missing.all():
            raise ValueError("impute='linear' needs at least one value in every channel, one has NaN only")
        channel[missing] = np.interp(t[missing], t[~missing], channel[~missing])
    return z


def two_means(scores: np.ndarray) -> float:
    """Share of the upper of two clusters of ``scores``: exact 2-means on a line, by trying every split.

    0 when all scores are equal.
    """
    x = np.sort(scores)
    if len(x) < 2 or x[0] == x[-1]:
        return 0.0
    x = x - x.mean()
    below = np.arange(1, len(x))  # size of the lower cluster
    lower = np.cumsum(x)[:-1]  # its sum; the upper one's is the negative, since x is centred
    between = np.square(lower) * (1 / below + 1 / (len(x) - below))
    between[np.diff(x) == 0] = -1.0  # equal scores stay together
    return float((len(x) - below[np.argmax(between)]) / len(x))


def threshold_at(scores: list[np.ndarray], contamination: float) -> float:
    """The value above which a share ``contamination`` of the finite scores lies."""
    every = np.concatenate(scores)
    finite = every[np.isfinite(every)]
    if len(finite) == 0:
        raise ValueError(
            f"none of the {len(every)} time points of the X that was fitted has a finite score, so there is no threshold to "
            f"flag by: with mode='loo' no block can be left out (lengthen X, shorten block_length or pass ridge > 0), and "
            f"with a regressor every draw must both hold and miss blocks (raise n_subsets)"
        )
    return float(np.quantile(finite, 1 - contamination))


def paper_scaling(scores: np.ndarray, training: list[np.ndarray], block_length: int) -> np.ndarray:
    """The official post-processing of ``scores`` with the constants of the ``training`` scores.

    Min-max scaling; the first ``block_length`` points, which few blocks cover, get the mean; then the distance from the
    mean, taken anew. It folds low scores onto high ones.
    """
    every = np.concatenate(training)
    if not np.isfinite(every).any():
        return np.full_like(scores, np.nan)
    low, high = np.nanmin(every), np.nanmax(every)
    width = high - low if high > low else 1.0
    mean = (np.nanmean(every) - low) / width

    def unit(s: np.ndarray) -> np.ndarray:
        s = (s - low) / width
        s[:block_length] = mean
        return s

    return np.abs(unit(scores) - np.nanmean(np.concatenate([unit(s) for s in training])))
