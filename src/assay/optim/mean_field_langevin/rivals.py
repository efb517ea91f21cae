"""What the study measures mean-field Langevin dynamics by: kernels, fixed features, other ways to train, ablations."""

import warnings
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import RidgeCV
from sklearn.metrics.pairwise import euclidean_distances
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPRegressor
from torch import Tensor, nn

from .estimators import MeanFieldLangevinRegressor
from .manifolds import Sphere
from .network import MeanFieldNet
from .optimizer import MeanFieldLangevin


class RBFRidge(RegressorMixin, BaseEstimator):
    """Kernel ridge regression; width and penalty by exact leave-one-out cross-validation over 8 × 15 values.

    Some of the study's problems pick an end of the grid. The error is flat there: nine values of the width from 1e-3 on and
    penalties from 1e-8 on change, on one draw of each, the leave-one-out error by less than 4 % and the test error by less
    than 5 %, either way.
    """

    def fit(self, X: Any, y: Any) -> Self:
        self.X_, self.mean_ = X, y.mean()
        squared = euclidean_distances(X, squared=True)
        best = np.inf
        for gamma in np.logspace(-1.5, 1.0, 8) / X.var(0).sum():  # about one over half the mean squared distance of two rows
            values, V = np.linalg.eigh(np.exp(-gamma * squared))
            projected = V.T @ (y - self.mean_)
            for alpha in np.logspace(-5, 2, 15):
                shrunk = V / (values.clip(0) + alpha)
                dual = shrunk @ projected
                error = np.square(dual / (shrunk * V).sum(1)).mean()  # of predicting each row from all others
                if error < best:
                    best, self.gamma_, self.alpha_, self.dual_ = error, gamma, alpha, dual
        self.loo_error_ = best
        return self

    def predict(self, X: Any) -> Any:
        return self.mean_ + np.exp(-self.gamma_ * euclidean_distances(X, self.X_, squared=True)) @ self.dual_


class RandomFeatureRidge(RegressorMixin, BaseEstimator):
    """Ridge regression on as many fixed ReLU neurons as the network has; their scale and the penalty by leave-one-out."""

    def __init__(self, n_features: int, random_state: int):
        self.n_features = n_features
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Self:
        rng = np.random.default_rng(self.random_state)
        drawn = rng.normal(size=(X.shape[1] + 1, self.n_features)) / np.sqrt(X.var(0).sum())
        fits = []
        for bias in (0.3, 1.0, 3.0):
            weights = drawn * np.r_[np.ones(X.shape[1]), bias * np.sqrt(X.var(0).sum())][:, None]
            ridge = RidgeCV(np.logspace(-3, 4, 15)).fit(features(X, weights), y)
            fits.append((-ridge.best_score_, bias, weights, ridge))
        *_, self.weights_, self.ridge_ = min(fits, key=lambda fit: fit[0])
        return self

    def predict(self, X: Any) -> Any:
        return self.ridge_.predict(features(X, self.weights_))


def features(X: Any, weights: Any) -> Any:
    return np.maximum(np.c_[X, np.ones(len(X))] @ weights, 0)


class TunedOnHeldOut(RegressorMixin, BaseEstimator):
    """The best of several regressors on a fifth of the rows, then fitted to all of them."""

    def __init__(self, candidates: Any, random_state: int):
        self.candidates = candidates
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Self:
        X_in, X_out, y_in, y_out = train_test_split(X, y, test_size=0.2, random_state=self.random_state)
        losses = [np.square(model.fit(X_in, y_in).predict(X_out) - y_out).mean() for model in self.candidates]
        self.best_ = self.candidates[int(np.argmin(losses))].fit(X, y)
        return self

    def predict(self, X: Any) -> Any:
        return self.best_.predict(X)

    def index_directions(self, k: int) -> Any:
        return self.best_.index_directions(k)


class ScaledTarget(RegressorMixin, BaseEstimator):
    """Any regressor on a target of mean 0 and variance 1."""

    def __init__(self, model: Any):
        self.model = model

    def fit(self, X: Any, y: Any) -> Self:
        self.mean_, self.scale_ = y.mean(), y.std()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # its epochs are a budget, meant to run out
            self.model.fit(X, (y - self.mean_) / self.scale_)
        return self

    def predict(self, X: Any) -> Any:
        return self.mean_ + self.scale_ * self.model.predict(X)


def adam_mlp(width: int, random_state: int) -> Any:
    """scikit-learn's network of as many neurons under Adam: weight decay and early stopping or not, on held-out rows."""
    options = {
        "hidden_layer_sizes": (width,),
        "learning_rate_init": 3e-3,
        "max_iter": 150,
        "tol": 0.0,
        "random_state": random_state,
    }
    tries = [*({"alpha": alpha} for alpha in (1e-3, 1.0, 3.0, 10.0)), {"alpha": 1e-3, "early_stopping": True}]
    return ScaledTarget(TunedOnHeldOut([MLPRegressor(**options, **one) for one in tries], random_state))


def one_pass_sgd(width: int, random_state: int) -> Any:
    """The same network on the sphere, a row at a time, each row once; the rate on held-out rows."""
    return TunedOnHeldOut([OnePass(width, lr, random_state) for lr in (0.001, 0.003, 0.01, 0.03, 0.1)], random_state)


class OnePass(MeanFieldLangevinRegressor):
    def __init__(self, width: int = 100, rate: float = 0.01, random_state: Any = None):
        super().__init__(width, beta=float("inf"), lr=rate, batch_size=1, random_state=random_state)
        self.width = width
        self.rate = rate

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        self.max_iter = len(X)
        return super().fit(X, y, sample_weight)


class AmbientSphere:
    """The sphere without tangent projections: drift and noise act in the surrounding space, then the length is put back."""

    def projx(self, x: Tensor) -> Tensor:
        return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        return u

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        return self.projx(x + u)


class TrainedSecondLayer(RegressorMixin, BaseEstimator):
    """The same particles with output weights that are trained too, by gradient descent, from 1."""

    def __init__(self, n_particles: int, steps: int, beta: float, random_state: int):
        self.n_particles = n_particles
        self.steps = steps
        self.beta = beta
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Self:
        probe = MeanFieldLangevinRegressor(1, max_iter=1).fit(X, y)  # for its units and its step
        self.mean_, self.scale_ = probe.target_mean_, probe.target_scale_
        generator, sphere = torch.Generator().manual_seed(self.random_state), Sphere()
        self.net_ = Weighted(X.shape[1], self.n_particles, manifold=sphere, generator=generator)
        groups = [
            {"params": self.net_.net.particles, "manifold": sphere},
            {"params": self.net_.weights, "beta": float("inf")},
        ]
        optimizer = MeanFieldLangevin(groups, probe.lr_, self.beta, generator=generator)
        x, target = torch.as_tensor(X).float(), torch.as_tensor((y - self.mean_) / self.scale_).float()
        for _ in range(self.steps):
            optimizer.zero_grad()
            (0.5 * (self.net_(x) - target).square().mean()).backward()
            optimizer.step()
        return self

    @torch.no_grad()
    def predict(self, X: Any) -> Any:
        return self.mean_ + self.scale_ * self.net_(torch.as_tensor(X).float()).double().numpy()


class Weighted(nn.Module):
    def __init__(self, d: int, m: int, **options: Any):
        super().__init__()
        self.net = MeanFieldNet(d, m, **options)
        self.weights = nn.Parameter(torch.ones(m, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, x.new_ones(len(x), 1)], dim=1)
        neurons = self.net.activation(x @ self.net.particles.flatten(0, 1).mT)
        signed = self.weights * self.weights.new_tensor([1.0, -1.0])
        return neurons @ signed.flatten() * (self.net.output_scale / len(signed))
