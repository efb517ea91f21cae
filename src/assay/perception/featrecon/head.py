"""FeatRecon after training: a classifier on frozen features whose rare classes are filled up with synthetic ones."""

from numbers import Integral
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.linear_model import LogisticRegression
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch.nn import functional as F

from .reconstructor import FeatureReconstructor


class FeatReconHead(ClassifierMixin, BaseEstimator):
    r"""Logistic regression on unit features, each class topped up to the largest with features drawn from its cap.

    The generation of FeatRecon (Yi et al., ICLR 2025) on embeddings of an encoder that is not trained any more (this use is
    not the paper's). Rows are centred by the training mean (``center``), brought to length one, described by
    :class:`FeatureReconstructor`, and a logistic head is fitted on real and synthetic rows together.

    Args:
        alpha: Quantile of the angles that a cap reaches to, in (0, 1).
        q: Head classes that a tail class borrows from, ≥ 1.
        shrinkage: Rows at which a tail class trusts its own statistics by half, ≥ 0.
        eta: How far centres move to the simplex, in [0, 1]; above 0 needs as many features as classes, less one.
        C: Inverse strength of the head's ℓ2 penalty, > 0.
        center: Whether the training mean is taken away first; embeddings usually share a large one.
        max_iter: Of the logistic regression.
        random_state: Seed of the draws, a ``RandomState``, or None for NumPy's global one.

    Attributes:
        classes_: Sorted classes.
        class_counts_: Rows of each.
        reconstructor_: The fitted :class:`FeatureReconstructor`.
        mean_: What is taken away from rows.
        estimator_: The fitted logistic regression. ``n_iter_``: its iterations.

    Raises:
        ValueError: one class, one feature, anything that scikit-learn refuses.

    Example:
        >>> from sklearn.datasets import load_digits
        >>> X, y = load_digits(return_X_y=True)
        >>> round(FeatReconHead().fit(X[:900], y[:900]).score(X[900:], y[900:]), 1)
        0.9
    """

    def __init__(
        self,
        alpha: float = 0.99,
        q: int = 3,
        shrinkage: float = 20.0,
        eta: float = 0.0,
        C: float = 1.0,
        center: bool = True,
        max_iter: int = 1000,
        random_state: int | np.random.RandomState | None = 0,
    ):
        self.alpha = alpha
        self.q = q
        self.shrinkage = shrinkage
        self.eta = eta
        self.C = C
        self.center = center
        self.max_iter = max_iter
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> "FeatReconHead":
        """Fits on features ``X (n, d)``, d ≥ 2, and labels ``y (n,)``."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        if X.shape[1] < 2:
            raise ValueError("n_features = 1: a direction needs at least 2 features")
        self.classes_, index, self.class_counts_ = np.unique(y, return_inverse=True, return_counts=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y must hold at least two classes, got one class: {self.classes_.tolist()}")
        self.mean_ = X.mean(0) if self.center else np.zeros(X.shape[1])
        z = self._unit(X)
        labels, usable = torch.from_numpy(index), torch.linalg.vector_norm(z, dim=1) > 0.5  # a row at the mean has no direction
        if not usable.any():
            raise ValueError("X has no direction in any row: all rows are equal (or zero, with center=False)")
        rec = FeatureReconstructor(
            len(self.classes_), X.shape[1], self.class_counts_, self.alpha, "auto", self.q, self.shrinkage, self.eta
        )
        self.reconstructor_ = rec.fit(z[usable].float(), labels[usable])
        wanted = torch.from_numpy(self.class_counts_.max() - self.class_counts_).where(rec.seen, torch.tensor(0))
        seed = self.random_state
        if not isinstance(seed, Integral):  # None: NumPy's own state, as everywhere in scikit-learn
            seed = check_random_state(seed).randint(2**31 - 1)
        generator = torch.Generator().manual_seed(int(seed))
        new_z, new_y = rec.sample(wanted, generator)
        features, targets = torch.cat([z, new_z.double()]).numpy(), torch.cat([labels, new_y]).numpy()
        self.estimator_ = LogisticRegression(C=self.C, max_iter=self.max_iter).fit(features, targets)
        self.n_iter_ = int(self.estimator_.n_iter_.max())
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """Log-odds ``(n, K)``; for two classes their difference, ``(n,)``."""
        rows = self._checked(X)  # first: it says when nothing is fitted
        return self.estimator_.decision_function(rows)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities ``(n, K)``, as if all classes were equally frequent."""
        rows = self._checked(X)
        return self.estimator_.predict_proba(rows)

    def predict(self, X: Any) -> np.ndarray:
        """Classes ``(n,)``."""
        rows = self._checked(X)
        return self.classes_[self.estimator_.predict(rows)]

    def _checked(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        return self._unit(validate_data(self, X, reset=False, dtype=np.float64)).numpy()

    def _unit(self, X: np.ndarray) -> torch.Tensor:
        # Scaled before its length is taken: squares of very large or small rows would leave the range.
        shifted = torch.from_numpy(X - self.mean_)
        shifted = shifted / shifted.abs().amax(1, keepdim=True).clamp_min(1e-300)
        return F.normalize(shifted, dim=1)
