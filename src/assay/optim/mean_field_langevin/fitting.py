"""From an estimator's arguments and its data to a fitted network."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from torch import Tensor

from .activation import Activation
from .closed_form import ClosedForm, largest_eigenvalue
from .losses import Loss
from .settings import check_settings, checked_manifold
from .training import Dynamics, Path, Sample, run

Array = NDArray[np.float64]
FULL_BATCH, MINI_BATCH = 20_000, 4096  # rows up to which every step sees all of them; rows of a step beyond
SMALL = 2**16  # activations of a step up to which float64 costs next to nothing: a step is then all overhead
LOOKED_AT = 2000  # rows that directions are read off


@dataclass(frozen=True)
class Fitted:
    """A trained network in its inputs' own units. Answers are in float64 whatever it was trained in."""

    form: ClosedForm
    W: Tensor  # (K, m, 2, D), float64, on the CPU
    ensemble: Tensor  # the same, or all late iterates side by side, (K, m · late, 2, D)
    center: Array
    scale: Array
    intercept: bool

    def inputs(self, X: Array) -> Tensor:
        return with_constant((X - self.center) / self.scale, self.intercept)

    def outputs(self, X: Array) -> Array:
        """``(K, n)``."""
        with torch.no_grad():
            return self.form.outputs(self.ensemble, self.inputs(X)).numpy()

    def directions(self, X: Array, weight: Array) -> tuple[Array, Array]:
        """Eigenvalues, falling, and eigenvectors, as rows, of the weighted mean outer product of the outputs' gradients.

        There are as many as columns of ``X``, or as gradients if those are fewer; the rest of the spectrum is 0.
        """
        every = -(-len(X) // LOOKED_AT)
        rows, share = X[::every], weight[::every] / weight[::every].sum()
        with torch.no_grad():
            gradients = self.form.input_gradients(self.ensemble, self.inputs(rows))[..., : X.shape[1]].numpy()
        G = (gradients * np.sqrt(share)[:, None]).reshape(-1, X.shape[1]) / self.scale
        _, singular, V = np.linalg.svd(G, full_matrices=False)
        return singular**2, V * np.sign(V[np.arange(len(V)), np.abs(V).argmax(1)])[:, None]


def is_rounding(spread: Any, values: Array) -> Any:
    """Whether the standard deviation of ``values``, of each column, is nothing but rounding: they are constant."""
    return spread <= 16 * np.sqrt(len(values)) * np.finfo(np.float64).eps * np.abs(values).max(0)


def with_constant(X: Array, intercept: bool) -> Tensor:
    return torch.from_numpy(np.c_[X, np.ones(len(X))] if intercept else np.ascontiguousarray(X))


def fit_network(estimator: Any, X: Array, target: Array, weight: Array, loss: Loss) -> tuple[Fitted, Path, float]:
    """Trains on ``X (n, d)``, ``target (n,)`` or ``(K, n)`` and ``weight (n,)``; also gives the path and the learning rate.

    Rows without weight are left out, so they might as well not be there.
    """
    check_settings(estimator)
    manifold, decay = checked_manifold(estimator)
    kept = weight > 0
    X, target, weight = X[kept], target[..., kept], weight[kept] / weight.sum()
    center, scale = np.zeros(X.shape[1]), np.ones(X.shape[1])
    if estimator.standardize:
        center = weight @ X
        scale = np.sqrt(weight @ np.square(X - center))
        scale[is_rounding(scale, X)] = 1.0
    random = check_random_state(estimator.random_state)
    seeds = random.randint(2**31, size=4)
    K, m = 1 if target.ndim == 1 else len(target), int(estimator.n_particles)
    small = len(X) * 2 * m * K <= SMALL
    dtype = {"float32": torch.float32, "float64": torch.float64}.get(estimator.dtype, torch.float64 if small else torch.float32)
    device = torch.device(estimator.device)

    def sample(rows: NDArray[np.intp]) -> Sample:
        parts = (with_constant((X[rows] - center) / scale, estimator.fit_intercept), target[..., rows], weight[rows])
        x, y, w = (torch.as_tensor(part).to(device, dtype) for part in parts)
        return Sample(x, y, w / w.sum())

    every = np.arange(len(X))
    held_out = None
    if estimator.early_stopping:
        inside, outside = train_test_split(every, test_size=estimator.validation_fraction, random_state=int(seeds[3]))
        data, held_out = sample(inside), sample(outside)
    else:
        data = sample(every)

    form = ClosedForm(Activation(estimator.activation, estimator.kappa, estimator.iota), float(estimator.output_scale))
    top = largest_eigenvalue(data.x, data.weight)
    lr = float(estimator.lr) if estimator.lr != "auto" else 1 / (loss.curvature * form.output_scale**2 * top + decay or 1.0)
    batch = estimator.batch_size
    if batch is None and len(data.x) > FULL_BATCH:
        batch = MINI_BATCH
    start = torch.Generator(device).manual_seed(int(seeds[0]))
    W = torch.randn((K, m, 2, data.x.shape[1]), generator=start, dtype=dtype, device=device) / X.shape[1] ** 0.5
    if manifold is not None:
        W = manifold.projx(W)
    dynamics = Dynamics(
        form,
        loss,
        lr,
        float(estimator.beta),
        decay,
        manifold,
        int(estimator.max_iter),
        anneal=estimator.anneal,
        batch_size=batch,
        average_last=0 if estimator.early_stopping else min(int(estimator.average_last), int(estimator.max_iter)),
        verbose=int(estimator.verbose),
    )
    noise = torch.Generator(device).manual_seed(int(seeds[1]))
    order = torch.Generator().manual_seed(int(seeds[2]))
    with torch.no_grad():
        path = run(W, data, dynamics, noise, order, held_out)
    last = path.W.double().cpu()
    ensemble = torch.cat([late.double().cpu() for late in path.late], 1) if path.late else last
    return Fitted(form, last, ensemble, center, scale, bool(estimator.fit_intercept)), path, lr


def store(estimator: Any, fitted: Fitted, path: Path, lr: float, X: Array, weight: Array) -> None:
    """Sets the attributes that both estimators have after fit."""
    estimator.network_ = fitted
    estimator.particles_ = fitted.W.movedim(0, 1).squeeze(1).numpy()
    estimator.loss_curve_ = path.loss.double().cpu().numpy()
    estimator.free_energy_path_ = path.energy.double().cpu().numpy()
    estimator.n_iter_ = len(path.loss)
    estimator.lr_ = lr
    strengths, V = fitted.directions(X[weight > 0], weight[weight > 0])
    estimator.direction_strengths_, estimator.directions_ = strengths, V
    estimator.effective_dimension_ = _effective_dimension(X, weight, strengths, V)


def first_directions(estimator: Any, k: int) -> Array:
    found = len(estimator.directions_)
    if not 1 <= k <= found:
        raise ValueError(f"k must lie in [1, {found}], got {k}")
    return estimator.directions_[:k].copy()


def _effective_dimension(X: Array, weight: Array, strengths: Array, V: Array) -> float:
    """With as many directions as the gradients seem to have: the participation ratio of their strengths."""
    total = strengths.sum()
    k = 1 if total == 0 else max(1, round(float(total**2 / np.square(strengths).sum())))
    return variance_ratio(X, V[:k], weight)


def variance_ratio(X: Array, U: Array, weight: Array | None = None) -> float:
    """``tr(Σ) / tr(U Σ Uᵀ)`` of the rows of ``X`` without forming ``Σ``; infinite if they do not vary along ``U``."""
    share = np.full(len(X), 1 / len(X)) if weight is None else weight / weight.sum()
    centred = X - share @ X
    relevant = share @ np.square(centred @ U.T).sum(1)
    return float(share @ np.square(centred).sum(1) / relevant) if relevant > 0 else float("inf")
