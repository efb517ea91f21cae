"""Assay: the methods of 57 ICLR 2025 papers, each as a part for your own code and a study that tests its claim."""

import lazy_loader as lazy

__version__ = "0.1.0"

_areas = [
    "alignment",
    "compression",
    "decision",
    "evaluation",
    "explain",
    "generation",
    "graphs",
    "inference",
    "language",
    "optim",
    "perception",
    "privacy",
    "reasoning",
    "robustness",
]

__getattr__, __dir__, _ = lazy.attach(__name__, submodules=[*_areas, "bench", "catalog", "data", "models"])
__all__ = ["__version__", *_areas]
