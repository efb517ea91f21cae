"""Syre: weight decay towards a frozen random point, which removes the loss's symmetries."""

from .anchors import draw_anchors
from .diagnostics import symmetry_diagnostics
from .functional import parametrize_syre, syre_penalty
from .syre import Syre

__all__ = ["Syre", "draw_anchors", "parametrize_syre", "symmetry_diagnostics", "syre_penalty"]
