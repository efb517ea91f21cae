"""Logit adjustment: a classifier trained on a long tail decides as if every class had been equally frequent."""

from .adjust import AdditiveLogitAdjustment, AdjustedClassifier, MultiplicativeLogitAdjustment
from .angles import boundary_angles
from .estimator import LogitAdjustedClassifier
from .etf import ETFLinear
from .losses import LogitAdjustedLoss, VectorScalingLoss
from .one_vs_one import OneVsOneAdjuster

__all__ = [
    "AdditiveLogitAdjustment",
    "AdjustedClassifier",
    "ETFLinear",
    "LogitAdjustedClassifier",
    "LogitAdjustedLoss",
    "MultiplicativeLogitAdjustment",
    "OneVsOneAdjuster",
    "VectorScalingLoss",
    "boundary_angles",
]
