"""Rivals that change the classifier instead of its logits, tuned on the same balanced rows."""

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .case import Features
from .tuning import balanced_accuracy, steps

PENALTIES = tuple(10.0**power for power in range(-6, 4))


def tau_normalised(features: Features, tune_labels: Tensor) -> tuple[Tensor, float]:
    """The τ-normalised classifier (Kang et al., ICLR 2020): head weights by a power of their length, no bias.

    Returns:
        Scores of the test rows, and the exponent that was best on the tuning rows.

    Warns:
        UserWarning: the best exponent is the largest of the grid.
    """
    grid = steps(2.0)
    lengths = features.weight.norm(dim=1, keepdim=True)

    def scores(z: Tensor, tau: float) -> Tensor:
        return F.linear(z, features.weight / lengths**tau)

    best = max(grid, key=lambda tau: balanced_accuracy(scores(features.tune, tau).argmax(-1), tune_labels))
    if best == grid[-1]:
        warnings.warn(f"the best exponent is the largest of the grid, {best:g}: widen it", UserWarning, stacklevel=2)
    return scores(features.test, best), best


def refitted_head(
    features: Features, tune_labels: Tensor, sampler: Any, *, penalties: tuple[float, ...] = PENALTIES, iterations: int = 2000
) -> tuple[Tensor, float]:
    """A logistic regression on standardised features of resampled rows.

    Args:
        features: With training rows of every class.
        tune_labels: Labels of the rows that choose the penalty.
        sampler: An imbalanced-learn sampler that repeats rows, such as ``RandomOverSampler``.
        penalties: Values of C, ascending.
        iterations: Most steps of the solver for one value.

    Returns:
        Scores of the test rows, and the C that was best on the tuning rows.

    Warns:
        UserWarning: the best C is at an end of the grid, or its solver has not converged.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    X, y = features.train.double().numpy(), features.train_labels.numpy()
    sampler.fit_resample(X, y)
    times = np.bincount(sampler.sample_indices_, minlength=len(y)).astype(float)  # a weight does what repeating the row does
    scaler = StandardScaler().fit(X, sample_weight=times)
    train, tune, test = (scaler.transform(z.double().numpy()) for z in (features.train, features.tune, features.test))
    head = LogisticRegression(max_iter=iterations, warm_start=True)
    best = (-1.0, 0.0, False, np.empty(0))
    for C in penalties:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # of the chosen one only
            head.set_params(C=C).fit(train, y, sample_weight=times)
        accuracy = balanced_accuracy(torch.from_numpy(head.predict(tune)), tune_labels)
        if accuracy > best[0]:
            best = (accuracy, C, bool(head.n_iter_.max() < iterations), head.decision_function(test))
    _, C, converged, scores = best
    if len(penalties) > 1 and C in (penalties[0], penalties[-1]):
        warnings.warn(f"the best C is at an end of the grid, {C:g}: widen it", UserWarning, stacklevel=2)
    if not converged:
        warnings.warn(f"the head with the best C, {C:g}, has not converged in {iterations} steps", UserWarning, stacklevel=2)
    return torch.from_numpy(scores), C
