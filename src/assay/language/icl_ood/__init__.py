"""In-context learning out of distribution: function classes, models trained on them, and what to hold them against."""

from .classes import (
    CUBIC,
    LINEAR,
    LINQUAD,
    QUADRATIC,
    SQRT,
    FunctionClass,
    Power,
    ReLUNet,
    SigmoidNet,
    sample_prompts,
)
from .descent import GDReference
from .linear_attention import LinearAttentionICL
from .posterior import MixturePosterior
from .references import Averaging, KNearest, LeastSquares, Reference, Zero, predict_at
from .report import agreement, bootstrap, ood_report
from .retrieval import LinearRetrieval, Retrieval
from .training import Curriculum, train_icl
from .transformer import ICLTransformer

__all__ = [
    "CUBIC",
    "LINEAR",
    "LINQUAD",
    "QUADRATIC",
    "SQRT",
    "Averaging",
    "Curriculum",
    "FunctionClass",
    "GDReference",
    "ICLTransformer",
    "KNearest",
    "LeastSquares",
    "LinearAttentionICL",
    "LinearRetrieval",
    "MixturePosterior",
    "Power",
    "ReLUNet",
    "Reference",
    "Retrieval",
    "SigmoidNet",
    "Zero",
    "agreement",
    "bootstrap",
    "ood_report",
    "predict_at",
    "sample_prompts",
    "train_icl",
]
