"""Optimizers and regularisers that change how a model is trained."""

from assay._lazy import attach_area

__getattr__, __dir__, __all__ = attach_area(__name__)
