"""FeatRecon: features of rare classes drawn from caps on the unit sphere, for training and for frozen encoders."""

from .geometry import aligned_simplex, cap_overlap, simplex_angle, simplex_gap
from .head import FeatReconHead
from .losses import BalancedSupConLoss, FeatReconLoss
from .reconstructor import FeatureReconstructor
from .sampling import LongTailSampler, make_long_tailed
from .theory import optimal_centers

__all__ = [
    "BalancedSupConLoss",
    "FeatReconHead",
    "FeatReconLoss",
    "FeatureReconstructor",
    "LongTailSampler",
    "aligned_simplex",
    "cap_overlap",
    "make_long_tailed",
    "optimal_centers",
    "simplex_angle",
    "simplex_gap",
]
