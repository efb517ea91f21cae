"""Label smoothing: a share of every label spread over all classes."""

from .smoothing import smoothed_cross_entropy

__all__ = ["smoothed_cross_entropy"]
