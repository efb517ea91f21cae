"""Which rotary frequencies a model uses, which heads look at positions, and p-RoPE."""

from .ablate import rope_ablate, scores_without
from .analyse import analyse_rope
from .frequencies import apply_p_rope, p_rope_inv_freq, partial_inv_freq, rotary_frequencies
from .layers import RotaryLayer, rotary_layers
from .report import RopeReport, positional_heads

__all__ = [
    "RopeReport",
    "RotaryLayer",
    "analyse_rope",
    "apply_p_rope",
    "p_rope_inv_freq",
    "partial_inv_freq",
    "positional_heads",
    "rope_ablate",
    "rotary_frequencies",
    "rotary_layers",
    "scores_without",
]
