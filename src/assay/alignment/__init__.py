"""Losses and trainers that align a language model with preferences."""

from assay._lazy import attach_area

__getattr__, __dir__, __all__ = attach_area(__name__)
