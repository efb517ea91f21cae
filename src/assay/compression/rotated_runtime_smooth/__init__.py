"""Rotated Runtime Smooth: 4-bit weights and activations, smoothed while they run."""

from .config import RRSConfig
from .hadamard import hadamard_factors, hadamard_matrix
from .linear import RotatedLinear, RRSLinear
from .pack import pack_int4, rrs_gemm, unpack_int4
from .quantize import RRSQuantizer, configure_activations, packed_bytes, quantize_rrs
from .rotate import rotate_model
from .smooth import quantize_tokens, runtime_smooth, smoothness, victim_rate
from .weights import clip_scale, gptq_round, round_weight

__all__ = [
    "RRSConfig",
    "RRSLinear",
    "RRSQuantizer",
    "RotatedLinear",
    "clip_scale",
    "configure_activations",
    "gptq_round",
    "hadamard_factors",
    "hadamard_matrix",
    "pack_int4",
    "packed_bytes",
    "quantize_rrs",
    "quantize_tokens",
    "rotate_model",
    "round_weight",
    "rrs_gemm",
    "runtime_smooth",
    "smoothness",
    "unpack_int4",
    "victim_rate",
]
