"""Logit adjustment around any scikit-learn classifier."""

import copy
import warnings
from typing import Any, Literal

import numpy as np
import torch
from scipy.special import expit, softmax
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.linear_model import LogisticRegression
from sklearn.utils import get_tags
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d
from torch import nn

from .adjust import AdditiveLogitAdjustment, MultiplicativeLogitAdjustment
from .one_vs_one import OneVsOneAdjuster
from .tuning import warn_if_winners_are_negative

Method = Literal["additive", "multiplicative", "one_vs_one"]

_LEAST = np.log(np.finfo(np.float64).tiny)  # in place of log 0: a class without a vote loses, by a finite number


class LogitAdjustedClassifier(ClassifierMixin, BaseEstimator):
    r"""Fits a classifier and predicts as if every class had been equally frequent.

    Multiplicative (Hasegawa & Sato, ICLR 2025), additive (Menon et al., ICLR 2021) or 1-vs-1 adjustment of the values of
    ``decision_function``, with the class counts of ``y``. Where there is none the additive rule takes the logarithm of
    ``predict_proba``, which is Bayes-consistent if the probabilities are good; a class whose probability is exactly zero
    (no tree of a forest votes for it) stays last. ``X`` may be whatever the estimator takes: arrays, sparse matrices, data
    frames, texts.

    Args:
        estimator: A classifier with a ``decision_function`` of one value a class, or, for the additive method, with
            ``predict_proba``; logistic regression by default.
        method: ``"additive"`` (default: right for heads with free weights, which is what scikit-learn fits, and the only
            one that does anything for two classes), ``"multiplicative"`` or ``"one_vs_one"`` (three classes and more).
        strength: γ or τ, ≥ 0; the method's own default (1, 0.5, 0.5) when None. τ = 1 has its meaning on log-odds; on
            margins search for it, or calibrate the estimator first.
        class_counts: Counts that the estimator was really trained on, in the order of the sorted classes, if these are
            not those of ``y``: pass the true ones after resampling, equal ones with ``class_weight="balanced"``.

    Attributes:
        classes_: The sorted classes.
        class_counts_: Rows of each.
        estimator_: The fitted classifier.
        adjuster_: The fitted adjustment, a ``torch.nn.Module``.

    Raises:
        ValueError: an unknown method, an estimator without the scores that the method needs, a decision function with
            another number of columns than classes.

    Warns:
        UserWarning: multiplicative, and there are two classes, or winners are negative on the training rows; additive with
            the default strength on what seem to be margins: the estimator has a decision function and no probabilities,
            or they are far from its softmax and sigmoid. Silence does not prove log-odds.

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
        """Fits the estimator on ``X`` of ``n`` rows and ``y (n,)``; further arguments go to its ``fit``."""
        if y is None:
            raise ValueError("LogitAdjustedClassifier requires y to be passed, but the target y is None")
        check_classification_targets(y)
        y = column_or_1d(y, warn=True)
        self.classes_, counts = np.unique(y, return_counts=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y must hold at least two classes, got one class: {self.classes_[:1].tolist()}")
        self.class_counts_ = counts if self.class_counts is None else np.asarray(self.class_counts)
        if len(self.class_counts_) != len(self.classes_):
            raise ValueError(f"class_counts must hold {len(self.classes_)} numbers, got {len(self.class_counts_)}")
        self.adjuster_ = self._make_adjuster()
        self.estimator_ = clone(self._chosen())
        self.estimator_.fit(X, y, **fit_params)  # says what is wrong with X
        self._source()
        for name in ("n_features_in_", "feature_names_in_"):
            if hasattr(self.estimator_, name):
                setattr(self, name, getattr(self.estimator_, name))
        if self.method == "multiplicative":
            warn_if_winners_are_negative(self._logits(X))
        if self.method == "additive" and self.strength is None and (margins := self._why_margins(X)):
            warnings.warn(
                f"{margins}, so its decision function is taken for margins rather than log-odds, whose unit the additive "
                "rule's default strength of 1 supposes: search for the strength, or calibrate (CalibratedClassifierCV)",
                UserWarning,
                stacklevel=2,
            )
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """Adjusted values, ``(n, K)``; for two classes their difference, ``(n,)``, as scikit-learn has it."""
        check_is_fitted(self)
        with torch.no_grad():
            adjusted = self.adjuster_(self._logits(X)).numpy()
        return adjusted[:, 1] - adjusted[:, 0] if len(self.classes_) == 2 else adjusted

    def predict(self, X: Any) -> np.ndarray:
        """The class with the largest adjusted value, ``(n,)``."""
        values = self.decision_function(X)
        return self.classes_[(values > 0).astype(int) if values.ndim == 1 else values.argmax(1)]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags = copy.deepcopy(get_tags(self._chosen()).input_tags)
        return tags

    def _chosen(self) -> Any:
        return LogisticRegression(max_iter=1000) if self.estimator is None else self.estimator

    def _make_adjuster(self) -> nn.Module:
        options = () if self.strength is None else (self.strength,)
        if self.method == "additive":
            return AdditiveLogitAdjustment(self.class_counts_, *options)
        if self.method == "multiplicative":
            return MultiplicativeLogitAdjustment(self.class_counts_, *options)
        if self.method == "one_vs_one":
            return OneVsOneAdjuster(self.class_counts_, *options)
        raise ValueError(f"method must be 'additive', 'multiplicative' or 'one_vs_one', got {self.method!r}")

    def _source(self) -> str:
        """The estimator's method that scores come from."""
        if hasattr(self.estimator_, "decision_function"):
            return "decision_function"
        if not hasattr(self.estimator_, "predict_proba"):
            raise ValueError(f"estimator must have decision_function or predict_proba, {self._name()} has neither")
        if self.method != "additive":
            raise ValueError(
                f"method {self.method!r} needs raw scores, and {self._name()} has no decision_function: "
                "take method='additive', which works on log-probabilities"
            )
        return "predict_proba"

    def _logits(self, X: Any) -> torch.Tensor:
        source = self._source()
        values = np.asarray(getattr(self.estimator_, source)(X), dtype=np.float64)
        if source == "predict_proba":
            with np.errstate(divide="ignore"):
                values = np.maximum(np.log(values), _LEAST)
        if values.ndim == 1:
            values = np.stack([-values / 2, values / 2], axis=1)  # the log odds, split evenly
        if values.shape[1] != len(self.classes_):
            raise ValueError(
                f"the estimator's decision function has {values.shape[1]} columns for {len(self.classes_)} classes; "
                "set decision_function_shape='ovr' or its like"
            )
        return torch.from_numpy(values)

    def _why_margins(self, X: Any) -> str:
        """What speaks against log-odds, in words; empty where nothing does clearly."""
        if not hasattr(self.estimator_, "decision_function"):
            return ""
        if not hasattr(self.estimator_, "predict_proba"):
            return f"{self._name()} has no predict_proba"
        logits, given = self._logits(X).numpy(), self.estimator_.predict_proba(X)
        one_against_rest = expit(logits)
        readings = (softmax(logits, axis=1), one_against_rest / one_against_rest.sum(axis=1, keepdims=True))
        far = min(np.abs(reading - given).mean() for reading in readings) > 0.05
        return f"{self._name()}'s probabilities are not those of its decision function" if far else ""

    def _name(self) -> str:
        return type(self.estimator_).__name__
