"""SelKD: distil some of a teacher's classes, by matching transport plans between samples and classes."""

from .labels import predict_open, remap_labels
from .loss import SelKDLoss
from .plans import plan_divergence, transport_plan
from .released import released_plan

__all__ = ["SelKDLoss", "plan_divergence", "predict_open", "released_plan", "remap_labels", "transport_plan"]
