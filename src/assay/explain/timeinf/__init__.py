"""TimeInf: which points of a time series a forecaster leans on, and which it cannot explain."""

from .audit import audit_labels
from .detector import TimeInf
from .pruning import prune_curve

__all__ = ["TimeInf", "audit_labels", "prune_curve"]
