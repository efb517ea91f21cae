"""Logit adjustment around any scikit-learn classifier that has a decision function."""

from typing import Any, Literal

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.linear_model import LogisticRegression
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import nn

from .adjust import AdditiveLogitAdjustment, MultiplicativeLogitAdjustment
from .one_vs_one import OneVsOneAdjuster
from .tuning import warn_if_winners_are_negative

Method = Literal["additive", "multiplicative", "one_vs_one"]


class LogitAdjustedClassifier(ClassifierMixin, BaseEstimator):
    r"""Fits a classifier and predicts as if every class had been equally frequent.

    Multiplicative (Hasegawa & Sato, ICLR 2025), additive (Menon et al., ICLR 2021) or 1-vs-1 adjustment of the values of
    ``decision_function``, with the class counts of ``y``.

    Args:
        estimator: A classifier with a ``decision_function`` of one value a class; logistic regression by default.
        method: ``"additive"`` (default: right for heads with free weights, which is what scikit-learn fits, and the only
            one that does anything for two classes), ``"multiplicative"`` or ``"one_vs_one"`` (three classes and more).
        strength: γ or τ, ≥ 0; the method's own default (1, 0.5, 0.5) when None.
        class_counts: Counts that the estimator was really trained on, in the order of the sorted classes, if these are
            not those of ``y``: pass the true ones after resampling.

    Attributes:
        classes_: The sorted classes.
        class_counts_: Rows of each.
        estimator_: The fitted classifier.
        adjuster_: The fitted adjustment, a ``torch.nn.Module``.

    Raises:
        ValueError: an unknown method, a decision function with another number of columns than classes.

    Warns:
        UserWarning: multiplicative, and there are two classes, or winners are negative on the training rows.

    Example:
        >>> from sklearn.datasets import make_classification
        >>> X, y = make_classification(600, weights=[0.95], flip_y=0, class_sep=0.5, random_state=0)
        >>> plain, adjusted = LogisticRegression().fit(X, y), LogitAdjustedClassifier().fit(X, y)
        >>> int(plain.predict(X).sum()), int(adjusted.predict(X).sum()), int(y.sum())
        (11, 115, 30)
    """

    def __init__(
        self,
        estimator: Any = None,
        method: Method = "additive",
        strength: float | None = None,
        class_counts: Any = None,
    ):
        self.estimator = estimator
        self.method = method
        self.strength = strength
        self.class_counts = class_counts

    def fit(self, X: Any, y: Any, **fit_params: Any) -> "LogitAdjustedClassifier":
        """Fits the estimator on ``X (n, d)`` and ``y (n,)``; further arguments go to its ``fit``."""
        X, y = validate_data(self, X, y)
        check_classification_targets(y)
        self.classes_, counts = np.unique(y, return_counts=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y must hold at least two classes, got one class: {self.classes_[0]!r}")
        self.class_counts_ = counts if self.class_counts is None else np.asarray(self.class_counts)
        if len(self.class_counts_) != len(self.classes_):
            raise ValueError(f"class_counts must hold {len(self.classes_)} numbers, got {len(self.class_counts_)}")
        self.adjuster_ = self._make_adjuster()
        self.estimator_ = clone(LogisticRegression(max_iter=1000) if self.estimator is None else self.estimator)
        if not hasattr(self.estimator_, "decision_function"):
            raise ValueError(f"estimator must have a decision_function, {type(self.estimator_).__name__} has none")
        self.estimator_.fit(X, y, **fit_params)
        if self.method == "multiplicative":
            warn_if_winners_are_negative(self._logits(X))
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """Adjusted values, ``(n, K)``; for two classes their difference, ``(n,)``, as scikit-learn has it."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False)
        with torch.no_grad():
            adjusted = self.adjuster_(self._logits(X)).numpy()
        return adjusted[:, 1] - adjusted[:, 0] if len(self.classes_) == 2 else adjusted

    def predict(self, X: Any) -> np.ndarray:
        """The class with the largest adjusted value, ``(n,)``."""
        values = self.decision_function(X)
        return self.classes_[(values > 0).astype(int) if values.ndim == 1 else values.argmax(1)]

    def _make_adjuster(self) -> nn.Module:
        options = () if self.strength is None else (self.strength,)
        if self.method == "additive":
            return AdditiveLogitAdjustment(self.class_counts_, *options)
        if self.method == "multiplicative":
            return MultiplicativeLogitAdjustment(self.class_counts_, *options)
        if self.method == "one_vs_one":
            return OneVsOneAdjuster(self.class_counts_, *options)
        raise ValueError(f"method must be 'additive', 'multiplicative' or 'one_vs_one', got {self.method!r}")

    def _logits(self, X: np.ndarray) -> torch.Tensor:
        values = np.asarray(self.estimator_.decision_function(X), dtype=np.float64)
        if values.ndim == 1:
            values = np.stack([-values / 2, values / 2], axis=1)  # the log odds, split evenly
        if values.shape[1] != len(self.classes_):
            raise ValueError(
                f"the estimator's decision function has {values.shape[1]} columns for {len(self.classes_)} classes; "
                "set decision_function_shape='ovr' or its like"
            )
        return torch.from_numpy(values)
