"""The estimators' loop: full-batch or mini-batch Langevin dynamics with the drift in closed form."""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .closed_form import ClosedForm
from .langevin import langevin_step_
from .losses import Loss
from .manifolds import RENORMALISE_EVERY, Manifold
from .settings import inverse_temperature

LOOK_EVERY = 25  # steps between two looks at the loss: is it finite, has the held-out one improved?
PATIENCE = 10  # looks without improvement before early stopping


@dataclass
class Sample:
    """Inputs ``(n, D)``, a target whose last axis counts samples, and weights ``(n,)`` that sum to 1, on average in a part."""

    x: Tensor
    target: Tensor
    weight: Tensor

    def rows(self, index: Tensor) -> "Sample":
        """A part of it at the scale of the whole: its loss is that of all rows in the mean over parts, whatever the weights."""
        share = self.weight[index] * (len(self.x) / len(index))
        return Sample(self.x[index], self.target[..., index], share)


@dataclass
class Dynamics:
    """Everything that a run needs besides particles and data."""

    form: ClosedForm
    loss: Loss
    lr: float
    beta: float
    weight_decay: float
    manifold: Manifold | None
    steps: int
    anneal: str | None = None
    batch_size: int | None = None
    average_last: int = 0
    verbose: int = 0


@dataclass
class Path:
    """Where a run went: particles at its end, the late ones to average over, and the loss and energy before every step."""

    W: Tensor
    late: list[Tensor] = field(default_factory=list)
    loss: Tensor = field(default_factory=lambda: torch.empty(0))
    energy: Tensor = field(default_factory=lambda: torch.empty(0))


def run(
    W: Tensor, sample: Sample, dynamics: Dynamics, noise: torch.Generator, order: torch.Generator, held_out: Sample | None
) -> Path:
    """Moves ``W (K, m, 2, D)`` in place. Warns, and goes back to the last look, when the loss stops being finite."""
    d = dynamics
    losses = torch.empty(d.steps, dtype=W.dtype, device=W.device)
    energies = torch.empty_like(losses)
    batches = _batches(sample, d.batch_size, order)
    sound, best, waited, late = W.clone(), (math.inf, W.clone()), 0, []
    for step in range(d.steps):
        batch = next(batches)
        value, drift = d.form.drift(W, batch.x, batch.target, batch.weight, d.loss)
        losses[step] = value
        energies[step] = value + 0.5 * d.weight_decay / W.shape[1] * W.square().sum() if d.weight_decay else value
        beta = inverse_temperature(d.beta, d.anneal, step, d.steps)
        langevin_step_(W, drift, d.lr, beta, weight_decay=d.weight_decay, manifold=d.manifold, generator=noise)
        if d.manifold is not None and (step + 1) % RENORMALISE_EVERY == 0:
            W.copy_(d.manifold.projx(W))
        if step >= d.steps - d.average_last:
            late.append(W.clone())
        if (step + 1) % LOOK_EVERY and step + 1 < d.steps:
            continue
        if not bool(torch.isfinite(losses[step]) & torch.isfinite(W.sum())):
            warnings.warn(
                f"the free energy stopped being finite before step {step + 1} of {d.steps}; particles of step "
                f"{step // LOOK_EVERY * LOOK_EVERY} are kept. Try an lr below {d.lr:.3g}",
                RuntimeWarning,
                stacklevel=4,
            )
            return Path(sound, [], losses[: step + 1], energies[: step + 1])
        sound.copy_(W)
        if d.verbose and (step + 1) % max(LOOK_EVERY, d.steps // 10 // LOOK_EVERY * LOOK_EVERY) == 0:
            print(f"step {step + 1}/{d.steps}: loss {float(losses[step]):.5g}")
        if held_out is not None:
            outside = float(d.loss(d.form.outputs(W, held_out.x), held_out.target)[0] @ held_out.weight)
            waited = 0 if outside < best[0] else waited + 1
            if not waited:
                best = (outside, W.clone())
            elif waited == PATIENCE:
                break
    losses, energies = losses[: step + 1], energies[: step + 1]
    _warn_if_thrown_out(sample, d, W, losses)
    return Path(W, late, losses, energies) if held_out is None else Path(best[1], [], losses, energies)


def _warn_if_thrown_out(sample: Sample, d: Dynamics, W: Tensor, losses: Tensor) -> None:
    """Where neurons or the manifold are bounded, a step that is too long ends in a bad fit and not in infinity."""
    if d.batch_size is not None and d.batch_size < len(sample.x):
        return  # a few parts say little about the loss of the whole
    nothing = float(d.loss(W.new_zeros(len(W), len(sample.x)), sample.target)[0] @ sample.weight)
    end = float(losses[-LOOK_EVERY:].mean())
    if end > 2 * max(nothing, float(losses[0])):
        warnings.warn(
            f"the loss ended at {end:.3g}, above the {nothing:.3g} of a constant answer. "
            f"Try an lr below {d.lr:.3g}, or a larger beta",
            RuntimeWarning,
            stacklevel=5,
        )


def _batches(sample: Sample, size: int | None, order: torch.Generator) -> Iterator[Sample]:
    """The whole sample each time, or parts of it: every row once, in a new order, before any comes again."""
    n = len(sample.x)
    if size is None or size >= n:
        while True:
            yield sample
    while True:
        for index in torch.randperm(n, generator=order).to(sample.x.device).split(size):
            if len(index) == size:
                yield sample.rows(index)
