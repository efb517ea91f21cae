"""Smaller and faster models out of trained ones."""

from assay._lazy import attach_area

__getattr__, __dir__, __all__ = attach_area(__name__)
