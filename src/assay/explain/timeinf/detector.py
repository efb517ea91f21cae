"""The scikit-learn estimator: influence of time points on a forecaster, and anomaly flags from it."""

import warnings
from collections.abc import Sequence
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, OutlierMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from .blocks import Blocks, Membership, coverage, time_average
from .decide import fill_missing, paper_scaling, threshold_at, two_means
from .families import Attribution, attribute, family_of
from .linear import LinearAttribution
from .settings import Settings, check_settings

Scores = Any  # (T,) for one series, a list of them for a list of series


class TimeInf(OutlierMixin, BaseEstimator):
    r"""Influence of every point of a time series on a forecaster of it.

    From *TimeInf: Time Series Data Contribution via Influence Functions* (Zhang, Shen, Xiong, Kwon, ICLR 2025).

    Block :math:`b` has lags :math:`x_b = (z_b, …, z_{b+m-1})` and target :math:`y_b = z_{b+m}`. With the loss
    :math:`\ell(b) = \tfrac12 \lVert y_b - f_\theta(x_b) \rVert^2` and its Hessian :math:`H` over the :math:`n` training
    blocks,

    .. math:: I(b, c) = \tfrac1n \nabla\ell(c)^\top H^{-1} \nabla\ell(b)

    is to first order what :math:`\ell(c)` gains when :math:`b` is removed: positive means that :math:`b` helps :math:`c`.
    *Self-influence* :math:`I(b, b)` is large where the model fits a block only because it was trained on it: the anomaly
    score. *Test influence*, the mean over evaluation blocks, is the value of a block for forecasting. A time point gets the
    mean over the blocks that contain it.

    Args:
        block_length: Lags :math:`m` of a block, at least 1. Default 100.
        model: ``"linear"``: least squares, closed form. A scikit-learn regressor: differences between models that did and
            did not see a block, no gradients. A ``torch.nn.Module`` from lags ``(n, m, D)`` to forecasts ``(n, D)``.
        membership: ``"all"``: a point belongs to the blocks that hold it as lag or target. ``"lags"``: as lag only.
        mode: ``"first_order"``, or ``"loo"``: the exact leave-one-out parameter change (linear only).
        scaling: ``None``: raw. ``"paper"``: the official fold of low scores onto high ones, kept for comparison.
        contamination: Share of flagged points, in (0, 0.5], or ``"auto"``: the upper cluster of 2-means on the scores.
        hessian: For a torch model: ``"dense"`` or ``"cg"`` Gauss-Newton, ``"auto"`` (dense up to 4,096 parameters), or
            ``"exact"``: the loss's own Hessian.
        damping: Added to a torch model's Hessian, at least 0. Default 1e-3.
        ridge: Weight decay of the objective ``mean loss + ridge/2 ||theta||^2``, at least 0; it enters the Hessian. The
            linear model's intercept is free of it.
        n_subsets: Draws of a model without gradients, at least 2. Default 200 (the official script: 1000).
        subset_fraction: Size of a draw over number of blocks, in (0, 1].
        random_state: Seed of the draws and of training a torch model.
        standardize: Divide each channel by its training standard deviation after centring. ``"auto"``: yes, except for a
            torch model that comes fitted, which expects its own units.
        impute: ``"linear"`` fills NaN by interpolation in time; ``None`` refuses them.
        fit_params: Train a copy of the torch model with ``epochs``, ``lr``, ``batch_size``; ``None``: it comes fitted.

    What ``fit`` used is kept as it was: changing the module's weights, ``X`` or a parameter changes no later answer, until
    the next fit.

    Shapes:
        - ``X``: ``(T,)`` or ``(T, D)``, rows in order of time, or a list of such arrays: a panel with one shared model.
        - time level: ``(T,)`` for each series; block level: ``(T - m,)``. A panel gives lists.

    Attributes:
        coverage_: Blocks that contain each point, ``(T,)``: few at the ends, where a score is less reliable.
        decision_scores_: Anomaly scores of the training series, high = odd (PyOD's sign).
        threshold_, offset_, labels_, contamination_: Flag a training point above ``threshold_ = -offset_``; ``labels_`` is
            1 for odd. For a new series see ``decision_function``.
        attribution_: The fitted model family; for the linear one, ``diagnostics()`` gives leverage and residuals.

    Raises:
        ValueError: an argument out of range; a series not longer than ``block_length + 1``; NaN without ``impute``, or
            infinite values; another number of channels than in fit; no more blocks than coefficients without ``ridge``; a
            torch model that is not differentiable; flags asked for where no point has a score.

    See Also:
        prune_curve: does dropping the most valuable blocks hurt?
        audit_labels: which anomaly labels do the scores contradict?

    Example:
        >>> t = np.arange(600)
        >>> x = np.sin(t / 5) + 0.1 * np.random.default_rng(0).normal(size=600)
        >>> x[400:404] += 1.5
        >>> detector = TimeInf(block_length=20).fit(x)
        >>> int(np.argmax(detector.decision_scores_)), bool(detector.predict(x)[401] == -1)
        (401, True)
    """

    def __init__(
        self,
        block_length: int = 100,
        model: Any = "linear",
        membership: Membership = "all",
        mode: Literal["first_order", "loo"] = "first_order",
        scaling: Literal["paper"] | None = None,
        contamination: float | Literal["auto"] = "auto",
        hessian: Literal["auto", "dense", "cg", "exact"] = "auto",
        damping: float = 1e-3,
        ridge: float = 0.0,
        n_subsets: int = 200,
        subset_fraction: float = 0.7,
        random_state: Any = None,
        *,
        standardize: bool | Literal["auto"] = "auto",
        impute: Literal["linear"] | None = None,
        fit_params: dict[str, Any] | None = None,
    ):
        self.block_length = block_length
        self.model = model
        self.membership = membership
        self.mode = mode
        self.scaling = scaling
        self.contamination = contamination
        self.hessian = hessian
        self.damping = damping
        self.ridge = ridge
        self.n_subsets = n_subsets
        self.subset_fraction = subset_fraction
        self.random_state = random_state
        self.standardize = standardize
        self.impute = impute
        self.fit_params = fit_params

    def fit(self, X: ArrayLike | Sequence[ArrayLike], y: Any = None) -> Self:
        """Fit the forecaster on all blocks of ``X``; ``y`` is ignored."""
        check_settings(self)
        family = family_of(self.model, mode=self.mode)
        self._fitted = Settings.of(self)  # set_params after this waits for the next fit
        series, self.is_panel_ = self._series(X, reset=True)
        every = np.concatenate(series)
        constant = np.ptp(every, axis=0) == 0
        if constant.any():
            which = np.flatnonzero(constant).tolist()
            warnings.warn(f"channels {which} are constant: they add nothing to a score", UserWarning, stacklevel=2)
        own_units = self.standardize == "auto" and family == "torch" and self.fit_params is None
        scaled = self.standardize in ("auto", True) and not own_units
        self.mean_ = every.mean(axis=0) if scaled else np.zeros(every.shape[1])
        self.mean_[constant] = every[0, constant] if scaled else 0.0  # to the last digit, so that it leaves exact zeros
        self.scale_ = np.where(constant, 1.0, every.std(axis=0)) if scaled else np.ones(every.shape[1])
        self.blocks_ = Blocks([(z - self.mean_) / self.scale_ for z in series], self.block_length)
        self.n_blocks_ = self.blocks_.n
        self.coverage_ = self._shaped([coverage(n, self.block_length, self.membership) for n in self.blocks_.lengths])
        self.attribution_: Attribution = attribute(self, self.blocks_, family)
        return self

    def self_influence(self, level: Literal["time", "block"] = "time") -> Scores:
        """Influence of the training series on itself, ``(T,)`` or, for blocks, ``(T - m,)``; never negative if linear."""
        check_is_fitted(self)
        return self._at_level(self.attribution_.self_influence(), self.blocks_, level)

    def influence_on(self, X_eval: ArrayLike | Sequence[ArrayLike], level: Literal["time", "block"] = "block") -> Scores:
        """Mean influence of each training block (or point) on the loss over ``X_eval``; positive: it helps."""
        check_is_fitted(self)
        evaluation = self._blocks(X_eval)[0]
        return self._at_level(self.attribution_.influence_on(evaluation), self.blocks_, level)

    def score_samples(self, X: ArrayLike | Sequence[ArrayLike] | None = None) -> Scores:
        """Minus the anomaly score of each point (scikit-learn's sign).

        ``None``, or the training series again: its self-influence. Another series: the same quadratic form
        ``grad(c)^T H^-1 grad(c) / n`` with the training fit and Hessian. That is *not* a self-influence, as the fit never
        saw these blocks, and ``mode="loo"`` has nothing to leave out of it.
        """
        check_is_fitted(self)
        if X is None:
            return self._shaped([-s for s in self._training_scores()])
        blocks, panel = self._blocks(X)
        if self._same(blocks):
            return self._shaped([-s for s in self._training_scores()], panel)
        points = self._at_level(self.attribution_.score_new(blocks), blocks, "time", panel=True)
        return self._shaped([-self._scaled(s) for s in points], panel)

    def decision_function(self, X: ArrayLike | Sequence[ArrayLike] | None = None) -> Scores:
        """``score_samples(X) - offset_``: negative where a point is flagged.

        A new series has higher scores than the one that was fitted, whose every block had its say in the fit. With the
        linear model its offset is therefore the same quantile of the scores that training points would have had unseen;
        other models know no such scores, and flag too much of a new series when they fit closely.
        """
        scores = self.score_samples(X)
        offset = self.offset_ if X is None or self._same(self._blocks(X)[0]) else self._new_offset()
        return [s - offset for s in scores] if isinstance(scores, list) else scores - offset

    def predict(self, X: ArrayLike | Sequence[ArrayLike] | None = None) -> Scores:
        """-1 for flagged points, +1 for the others (among them points without a score)."""
        decision = self.decision_function(X)
        flags = [np.where(d < 0, -1, 1) for d in (decision if isinstance(decision, list) else [decision])]
        return flags if isinstance(decision, list) else flags[0]

    def fit_predict(self, X: ArrayLike | Sequence[ArrayLike], y: Any = None, **_: Any) -> Scores:
        """Flags of the series it was fitted on."""
        return self.fit(X).predict()

    @property
    def decision_scores_(self) -> Scores:
        check_is_fitted(self)
        return self._shaped(self._training_scores())

    @property
    def contamination_(self) -> float:
        check_is_fitted(self)
        if self._fitted.contamination != "auto":
            return float(self._fitted.contamination)
        scores = np.concatenate(self._training_scores())
        return two_means(scores[np.isfinite(scores)])

    @property
    def threshold_(self) -> float:
        check_is_fitted(self)
        return threshold_at(self._training_scores(), self.contamination_)

    @property
    def offset_(self) -> float:
        return -self.threshold_

    @property
    def labels_(self) -> Scores:
        flags = self.predict()
        return [(f < 0).astype(int) for f in flags] if isinstance(flags, list) else (flags < 0).astype(int)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.impute is not None
        return tags

    def _at_level(self, values: np.ndarray, blocks: Blocks, level: str, panel: bool | None = None) -> Scores:
        if level not in ("time", "block"):
            raise ValueError(f"level must be 'time' or 'block', got {level!r}")
        parts = blocks.split(values)
        if level == "time":
            parts = [time_average(v, self._fitted.block_length, self._fitted.membership)[0] for v in parts]
        return self._shaped(parts, panel)

    def _shaped(self, parts: list[np.ndarray], panel: bool | None = None) -> Scores:
        return parts if (self.is_panel_ if panel is None else panel) else parts[0]

    def _training_scores(self) -> list[np.ndarray]:
        points = self._at_level(self.attribution_.self_influence(), self.blocks_, "time", panel=True)
        return [self._scaled(s) for s in points]

    def _same(self, blocks: Blocks) -> bool:
        return len(blocks.series) == len(self.blocks_.series) and all(map(np.array_equal, blocks.series, self.blocks_.series))

    def _new_offset(self) -> float:
        """Offset for a series that the fit has not seen."""
        if not isinstance(self.attribution_, LinearAttribution):
            return self.offset_
        points = self._at_level(self.attribution_.held_out_self(), self.blocks_, "time", panel=True)
        return -threshold_at([self._scaled(s) for s in points], self.contamination_)

    def _scaled(self, scores: np.ndarray) -> np.ndarray:
        """The official post-processing, with the constants of the training series."""
        if self._fitted.scaling is None:
            return scores
        training = self._at_level(self.attribution_.self_influence(), self.blocks_, "time", panel=True)
        return paper_scaling(scores, training, self._fitted.block_length)

    def _blocks(self, X: Any) -> tuple[Blocks, bool]:
        series, panel = self._series(X, reset=False)
        return Blocks([(z - self.mean_) / self.scale_ for z in series], self._fitted.block_length), panel

    def _series(self, X: Any, *, reset: bool) -> tuple[list[np.ndarray], bool]:
        panel = isinstance(X, list | tuple) and len(X) > 0 and all(getattr(z, "ndim", 0) >= 1 for z in X)
        series = [self._one(z, reset=reset and i == 0) for i, z in enumerate(X if panel else [X])]
        for z in series:
            if len(z) <= self._fitted.block_length + 1:
                raise ValueError(
                    f"a series of n_samples={len(z)} time points is too short for block_length={self._fitted.block_length}: "
                    f"it needs at least {self._fitted.block_length + 2}"
                )
        return series, panel

    def _one(self, X: Any, *, reset: bool) -> np.ndarray:
        one_d = getattr(X, "ndim", None) == 1 or (isinstance(X, list | tuple) and len(X) > 0 and np.isscalar(X[0]))
        if one_d and (reset or self.n_features_in_ == 1):
            X = np.asarray(X).reshape(-1, 1)
        z = validate_data(self, X, reset=reset, dtype=np.float64, order="C", ensure_all_finite=False, ensure_min_samples=2)
        if np.isinf(z).any():
            raise ValueError(f"X contains {np.isinf(z).sum()} infinite values (inf)")
        if np.isnan(z).any():
            if self._fitted.impute is None:
                raise ValueError(f"X contains {np.isnan(z).sum()} NaN: pass impute='linear' to interpolate them")
            z = fill_missing(z)
        return z
