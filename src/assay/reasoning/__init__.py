"""Getting more reasoning out of language models."""

from assay._lazy import attach_area

__getattr__, __dir__, __all__ = attach_area(__name__)
