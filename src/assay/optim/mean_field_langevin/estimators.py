"""Mean-field Langevin dynamics as scikit-learn estimators."""

from typing import Any, Literal, Self

import numpy as np
from scipy.special import expit, softmax
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, column_or_1d, validate_data

from .activation import ActivationLike
from .fitting import first_directions, fit_network, is_rounding, store
from .losses import LOGISTIC, REGRESSION, SOFTMAX
from .manifolds import Manifold, Sphere

Space = Literal["sphere", "joint_sphere", "euclidean"] | Manifold
Precision = Literal["auto", "float32", "float64"]


class MeanFieldLangevinRegressor(RegressorMixin, BaseEstimator):
    r"""Regression by a two-layer network whose neurons are particles of a Langevin diffusion.

    Mousavi-Hosseini, Wu and Erdogdu, "Learning Multi-Index Models with Neural Networks via Mean-Field Langevin Dynamics",
    ICLR 2025 (arXiv 2408.07254). With :math:`\tilde x = (x, 1)` and particles :math:`w_j = (\omega_{1,j}, \omega_{2,j})`,

    .. math:: \hat y(x) &= \frac{R}{m} \sum_j \varphi(\langle\omega_{1,j}, \tilde x\rangle)
                           - \varphi(\langle\omega_{2,j}, \tilde x\rangle) \\
              w_j &\leftarrow w_j - \eta\,[m \nabla_{w_j} \hat J + \lambda w_j] + \sqrt{2\eta/\beta}\; \xi_j

    with :math:`\hat J` the mean loss; on the sphere without :math:`\lambda`, projected onto the tangent space, along the
    exponential map. The target is centred and scaled to unit variance for training, and put back by ``predict``.

    Args:
        n_particles: Width :math:`m \ge 1`.
        manifold: ``"sphere"``: both vectors of a particle on a sphere of their own. ``"joint_sphere"``: the pair on one.
            ``"euclidean"``. Or any `Manifold`, such as geoopt's; it sees particles ``(1, m, 2, d + 1)``.
        loss: ``"squared"`` (half of it), or ``"pseudo_huber"`` with its bend at one standard deviation of the target.
        activation: ``"smooth_relu"``, ``"relu"``, ``"tanh"`` or an elementwise, differentiable callable on tensors.
        kappa, iota: Sharpness and upper bound of the smooth ReLU, > 0; `kappa` is finite.
        beta: Inverse temperature :math:`\beta > 0`; infinity gives plain gradient descent.
        weight_decay: :math:`\lambda \ge 0` of Euclidean particles, 1e-4 if None; None or 0 on a manifold.
        lr: :math:`\eta > 0`; ``"auto"``: one over the loss's curvature times :math:`R^2 \lambda_\max(\tilde X^\top\tilde X)/n`.
        max_iter: Steps, ≥ 1.
        batch_size: Rows of a step; None: all up to 20,000, and 4,096 where there are more.
        output_scale: :math:`R > 0`.
        fit_intercept: Whether :math:`\tilde x` has the constant 1.
        standardize: Centre and scale the columns of ``X``. It changes their covariance, so the effective dimension too.
        radius: Of the spheres, > 0.
        anneal: Raise :math:`\beta` while training: ``"log"`` as :math:`1 + \log(1 + t)`, ``"geometric"`` a hundredfold.
        average_last: Predict with the mean over this many last iterates; 0 or 1: the last one alone.
        early_stopping: Hold out `validation_fraction` of the rows and keep the particles that fit them best; stops after
            250 steps without gain. `average_last` is then ignored.
        validation_fraction: In (0, 1).
        random_state: Of the start, the noise, batches and the split.
        device: Where to train.
        dtype: To train in. ``"auto"``: float32, or float64 where a step has at most 65,536 activations, for then it is free.
        verbose: Prints the loss ten times.
        scale_target: Also scale the target; False only centres it.

    Shapes:
        - ``X``: ``(n, d)``, ``d ≥ 2`` on a sphere; ``y``, ``sample_weight``: ``(n,)``.

    Attributes:
        particles_: ``(m, 2, d + 1)``; the last column is the bias, if there is one.
        loss_curve_: Mean loss before every step, in units of the scaled target.
        free_energy_path_: That plus :math:`\frac{\lambda}{2m} \sum_j \|w_j\|^2`: the free energy but for its entropy, which
            a few hundred points in :math:`2(d+1)` dimensions do not determine.
        n_iter_, lr_: Steps taken, and their length.
        directions_, direction_strengths_: Eigenvectors, as rows, and eigenvalues of the mean outer product of the fit's
            gradients over the training rows, weighted; of 2,000 of them where there are more. No more than there are
            rows (times outputs): beyond them the spectrum is 0. See `index_directions`.
        effective_dimension_: Of the training inputs, in the units given, with as many of these directions as their
            strengths count for, :math:`(\sum s)^2 / \sum s^2` rounded.
        target_mean_, target_scale_: What was taken off ``y``.
        network_: The fitted network, which the answers come from.

    Raises:
        ValueError: an argument out of its range; NaN in ``X`` or ``y``; a weight decay on a manifold.

    Warns:
        RuntimeWarning: the free energy stopped being finite: training ends there, with the particles of the last look. Or
            the loss ended at more than twice that of a constant answer.

    Example:
        >>> X = np.random.default_rng(0).normal(size=(300, 10))
        >>> model = MeanFieldLangevinRegressor(n_particles=50, max_iter=800, random_state=0)
        >>> model.fit(X[:200], np.tanh(X[:200, 0])).score(X[200:], np.tanh(X[200:, 0])) > 0.8
        True
        >>> bool(abs(model.index_directions(1)[0, 0]) > 0.9)
        True
    """

    def __init__(
        self,
        n_particles: int = 200,
        manifold: Space = "sphere",
        loss: Literal["squared", "pseudo_huber"] = "squared",
        activation: ActivationLike = "smooth_relu",
        kappa: float = 5.0,
        iota: float = 10.0,
        beta: float = 2e3,
        weight_decay: float | None = None,
        lr: float | Literal["auto"] = "auto",
        max_iter: int = 2500,
        batch_size: int | None = None,
        output_scale: float = 4.0,
        fit_intercept: bool = True,
        standardize: bool = False,
        radius: float = 1.0,
        anneal: Literal["log", "geometric"] | None = None,
        average_last: int = 0,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        random_state: Any = None,
        device: Any = "cpu",
        dtype: Precision = "auto",
        verbose: int = 0,
        *,
        scale_target: bool = True,
    ):
        self.n_particles = n_particles
        self.manifold = manifold
        self.loss = loss
        self.activation = activation
        self.kappa = kappa
        self.iota = iota
        self.beta = beta
        self.weight_decay = weight_decay
        self.lr = lr
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.output_scale = output_scale
        self.fit_intercept = fit_intercept
        self.standardize = standardize
        self.radius = radius
        self.anneal = anneal
        self.average_last = average_last
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.random_state = random_state
        self.device = device
        self.dtype = dtype
        self.verbose = verbose
        self.scale_target = scale_target

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Trains from a fresh draw of particles."""
        if self.loss not in REGRESSION:
            raise ValueError(f"loss must be 'squared' or 'pseudo_huber', got {self.loss!r}")
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, order="C")
        y = column_or_1d(y, warn=True).astype(np.float64)
        check_columns(self, X)
        weight = checked_weight(sample_weight, X)
        self.target_mean_ = float(np.average(y, weights=weight))
        spread = float(np.sqrt(np.average(np.square(y - self.target_mean_), weights=weight)))
        self.target_scale_ = spread if self.scale_target and not is_rounding(spread, y) else 1.0
        target = (y - self.target_mean_) / self.target_scale_
        store(self, *fit_network(self, X, target, weight, REGRESSION[self.loss]), X, weight)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """``(n,)``, in float64."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        return self.target_mean_ + self.target_scale_ * self.network_.outputs(X)[0]

    def index_directions(self, k: int) -> np.ndarray:
        """The ``k`` orthonormal directions along which the fit varies most, ``(k, d)``."""
        check_is_fitted(self)
        return first_directions(self, k)


class MeanFieldLangevinClassifier(ClassifierMixin, BaseEstimator):
    r"""Classification by the network of `MeanFieldLangevinRegressor`, under the logistic loss.

    Two classes have one output, the log-odds; ``K > 2`` classes have ``K`` stacked outputs with neurons of their own, under
    softmax and cross-entropy: one particle is then the neurons of all outputs, so the particle picture stays.

    Args:
        n_particles: Width of every output.
        See `MeanFieldLangevinRegressor` for the others; there is no choice of loss and no scaling of the target.

    Shapes:
        - ``X``: ``(n, d)``; ``y``: ``(n,)`` of any labels; ``sample_weight``: ``(n,)``.

    Attributes:
        classes_: The sorted classes.
        particles_: ``(m, 2, d + 1)``, or ``(m, K, 2, d + 1)`` for more than two classes.
        The others as in the regressor.

    Raises:
        ValueError: as the regressor; fewer than two classes.

    Example:
        >>> X = np.random.default_rng(0).normal(size=(400, 10))
        >>> model = MeanFieldLangevinClassifier(n_particles=50, max_iter=400, random_state=0)
        >>> model.fit(X[:300], X[:300, 0] > 0).score(X[300:], X[300:, 0] > 0) > 0.9
        True
    """

    def __init__(
        self,
        n_particles: int = 200,
        manifold: Space = "sphere",
        activation: ActivationLike = "smooth_relu",
        kappa: float = 5.0,
        iota: float = 10.0,
        beta: float = 2e3,
        weight_decay: float | None = None,
        lr: float | Literal["auto"] = "auto",
        max_iter: int = 2500,
        batch_size: int | None = None,
        output_scale: float = 4.0,
        fit_intercept: bool = True,
        standardize: bool = False,
        radius: float = 1.0,
        anneal: Literal["log", "geometric"] | None = None,
        average_last: int = 0,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        random_state: Any = None,
        device: Any = "cpu",
        dtype: Precision = "auto",
        verbose: int = 0,
    ):
        self.n_particles = n_particles
        self.manifold = manifold
        self.activation = activation
        self.kappa = kappa
        self.iota = iota
        self.beta = beta
        self.weight_decay = weight_decay
        self.lr = lr
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.output_scale = output_scale
        self.fit_intercept = fit_intercept
        self.standardize = standardize
        self.radius = radius
        self.anneal = anneal
        self.average_last = average_last
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.random_state = random_state
        self.device = device
        self.dtype = dtype
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Trains from a fresh draw of particles."""
        X, y = validate_data(self, X, y, dtype=np.float64, order="C")
        check_classification_targets(y)
        y = column_or_1d(y, warn=True)
        check_columns(self, X)
        weight = checked_weight(sample_weight, X)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(np.unique(codes[weight > 0])) < 2:
            raise ValueError(f"y must hold at least two classes (with weight), got one class: {self.classes_[:1].tolist()}")
        binary = len(self.classes_) == 2
        target = codes.astype(np.float64) if binary else np.eye(len(self.classes_))[:, codes]
        store(self, *fit_network(self, X, target, weight, LOGISTIC if binary else SOFTMAX), X, weight)
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """Log-odds ``(n,)`` of the second of two classes, or logits ``(n, K)``."""
        check_is_fitted(self)
        outputs = self.network_.outputs(validate_data(self, X, reset=False, dtype=np.float64))
        return outputs[0] if len(outputs) == 1 else outputs.T

    def predict_proba(self, X: Any) -> np.ndarray:
        """``(n, K)``."""
        values = self.decision_function(X)
        return np.stack([expit(-values), expit(values)], axis=1) if values.ndim == 1 else softmax(values, axis=1)

    def predict(self, X: Any) -> np.ndarray:
        """``(n,)``."""
        values = self.decision_function(X)
        return self.classes_[(values > 0).astype(int) if values.ndim == 1 else values.argmax(1)]

    def index_directions(self, k: int) -> np.ndarray:
        """The ``k`` orthonormal directions along which the outputs vary most, ``(k, d)``."""
        check_is_fitted(self)
        return first_directions(self, k)


def checked_weight(sample_weight: Any, X: np.ndarray) -> np.ndarray:
    weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    if not weight.sum() > 0:
        raise ValueError("sample_weight must hold a positive number")
    return weight


def check_columns(estimator: Any, X: np.ndarray) -> None:
    manifold = estimator.manifold
    if (isinstance(manifold, Sphere) or manifold in ("sphere", "joint_sphere")) and X.shape[1] < 2:
        raise ValueError(f"manifold={manifold!r} needs at least two columns of X, got n_features = {X.shape[1]}")
