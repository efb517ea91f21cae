"""Which family a forecaster belongs to, and the influences that the family can give."""

import sys
from typing import Any, Literal, Protocol

import numpy as np
from sklearn.base import BaseEstimator, is_regressor
from sklearn.utils import check_random_state

from .blocks import Blocks
from .linear import LinearAttribution
from .nonparametric import SubsetAttribution

Family = Literal["linear", "regressor", "torch"]


class Attribution(Protocol):
    """What a family gives: influence of its training blocks on themselves and on others."""

    def self_influence(self) -> np.ndarray: ...
    def influence_on(self, evaluation: Blocks) -> np.ndarray: ...
    def score_new(self, blocks: Blocks) -> np.ndarray: ...


def family_of(model: Any, *, mode: str) -> Family:
    torch = sys.modules.get("torch")  # a model can only be a Module if torch is already imported
    family: Family
    if isinstance(model, str) and model == "linear":
        family = "linear"
    elif torch is not None and isinstance(model, torch.nn.Module):
        family = "torch"
    elif isinstance(model, BaseEstimator) and is_regressor(model):
        family = "regressor"
    else:
        raise ValueError(f"model must be 'linear', a scikit-learn regressor or a torch.nn.Module, got {model!r}")
    if mode == "loo" and family != "linear":
        raise ValueError("mode='loo' is exact for model='linear' only; use mode='first_order'")
    return family


def attribute(detector: Any, blocks: Blocks, family: Family) -> Attribution:
    """Fit the detector's forecaster to ``blocks``."""
    if family == "linear":
        return LinearAttribution(blocks, ridge=detector.ridge, leave_one_out=detector.mode == "loo")
    random_state = check_random_state(detector.random_state)
    if family == "regressor":
        return SubsetAttribution(
            detector.model,
            blocks,
            n_subsets=detector.n_subsets,
            fraction=detector.subset_fraction,
            random_state=random_state,
        )
    from . import blackbox  # the only part that needs torch

    module = detector.model
    if detector.fit_params is not None:
        seed = int(random_state.randint(2**31 - 1))
        module = blackbox.train(module, blocks, ridge=detector.ridge, seed=seed, **detector.fit_params)
    return blackbox.TorchAttribution(module, blocks, ridge=detector.ridge, damping=detector.damping, hessian=detector.hessian)
