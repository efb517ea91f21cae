"""The part of the paper's claim that is mathematics alone: whose boundaries lie closer to the optimum."""

import torch

from .angles import boundary_angles, mean_gap


def largest_error_ratio(imbalance: float = 100.0, gamma: float = 0.45) -> float:
    """MLA's mean boundary error over ALA's, the largest over K in 10, 100, 1000, τ in ½, 1, 2 and feature length in 3, 5, 10.

    Example:
        >>> round(largest_error_ratio(), 2)
        0.51
    """
    ratios = []
    for classes in (10, 100, 1000):
        n = imbalance ** (-torch.arange(classes, dtype=torch.float64) / (classes - 1))
        best = boundary_angles(n)
        ours = mean_gap(boundary_angles(n, "mla", strength=gamma), best)
        for tau in (0.5, 1.0, 2.0):
            for m in (3.0, 5.0, 10.0):
                ratios.append(ours / mean_gap(boundary_angles(n, "ala", strength=tau, feature_norms=m), best))
    return max(ratios)
