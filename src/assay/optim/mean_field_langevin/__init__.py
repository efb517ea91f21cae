"""Mean-field Langevin dynamics: a two-layer network trained as a cloud of noisy particles."""

from .diagnostics import estimate_effective_dimension
from .dimension import effective_dimension
from .estimators import MeanFieldLangevinClassifier, MeanFieldLangevinRegressor
from .manifolds import Manifold, Sphere
from .network import MeanFieldNet
from .optimizer import MeanFieldLangevin

__all__ = [
    "Manifold",
    "MeanFieldLangevin",
    "MeanFieldLangevinClassifier",
    "MeanFieldLangevinRegressor",
    "MeanFieldNet",
    "Sphere",
    "effective_dimension",
    "estimate_effective_dimension",
]
