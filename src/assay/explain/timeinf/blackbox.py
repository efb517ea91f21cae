"""Influence of blocks on any differentiable forecaster, by Gauss-Newton on per-sample Jacobians."""

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from .blocks import Blocks
from .forecaster import Forecaster

Hessian = Literal["auto", "dense", "cg", "exact"]
DENSE_LIMIT = 4096  # parameters up to which "auto" factorises the p x p matrix: 128 MB in float64
KEPT = 2**24  # numbers of the (n, p) gradient matrix that are kept, 128 MB; beyond it gradients are taken anew
SOLVED = 2**23  # numbers in the right-hand sides that conjugate gradients solve for at once: five such arrays of 64 MB
CG_TOLERANCE, CG_STEPS = 1e-8, 100


class TorchAttribution:
    r"""Influence under ``module`` at its present parameters, of which it keeps a copy.

    With the Jacobian :math:`J_b` of the forecast of block :math:`b` by the :math:`p` parameters and
    :math:`\nabla\ell(b) = -J_b^\top r_b`:

    .. math:: H = \tfrac1n \sum_b J_b^\top J_b + (ridge + damping) I, \qquad
              I(b, c) = \tfrac1n \nabla\ell(c)^\top H^{-1} \nabla\ell(b).

    ``hessian``: ``"dense"`` factorises :math:`H`; ``"cg"`` solves by conjugate gradients and stores no :math:`p \times p`
    matrix; ``"auto"`` is dense up to 4,096 parameters; ``"exact"`` puts the Hessian of the loss itself in place of
    Gauss-Newton, and raises when it is not positive definite there.

    Test influence is one solve. Self-influence is one a block: by ``"cg"`` as many at once as 64 MB hold, each batch with
    its own passes over all blocks, so time grows with :math:`n^2` while memory does not; a warning gives an estimate once
    the first of several batches is done. ``"dense"`` is linear in :math:`n`, for :math:`8 p^2` bytes.
    """

    def __init__(self, module: nn.Module, blocks: Blocks, *, ridge: float, damping: float, hessian: Hessian):
        # Second derivatives need the digits, and oneDNN's recurrent kernels have none
        self.forecaster = Forecaster(module, blocks, double=hessian == "exact")
        self.blocks = blocks
        self.shift = ridge + damping
        self.size, self.device = self.forecaster.size, self.forecaster.device
        self.dense = hessian in ("dense", "exact") or (hessian == "auto" and self.size <= DENSE_LIMIT)
        self._kept: Tensor | None = None
        self._cholesky = self._factorise(exact=hessian == "exact") if self.dense else None
        self._self: np.ndarray | None = None

    @property
    def module(self) -> nn.Module:
        """The copy that the influences belong to."""
        return self.forecaster.module

    def self_influence(self) -> np.ndarray:
        if self._self is None:
            self._self = self.score_new(self.blocks)
        return self._self

    def score_new(self, blocks: Blocks) -> np.ndarray:
        """``grad^T H^-1 grad / n``; for the training blocks this is self-influence."""
        values = np.empty(blocks.n)
        if self.dense:
            for where, g in self._gradients(blocks):
                values[where] = (g.T * self._solve(g.T)).sum(0).cpu().numpy() / self.blocks.n
            return values
        columns = max(1, SOLVED // self.size)
        started = time.perf_counter()
        for where, g in self._gathered(blocks, columns):
            values[where] = (g.T * self._solve(g.T)).sum(0).cpu().numpy() / self.blocks.n
            if where.start == 0 and where.stop < blocks.n:
                self._warn_of_time(blocks.n, columns, time.perf_counter() - started)
        return values

    def influence_on(self, evaluation: Blocks) -> np.ndarray:
        total = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        for _, g in self._gradients(evaluation):
            total += g.sum(0)
        direction = self._solve(total[:, None] / evaluation.n)[:, 0]  # one solve for all blocks
        values = np.empty(self.blocks.n)
        for where, g in self._gradients(self.blocks):
            values[where] = (g @ direction).cpu().numpy() / self.blocks.n
        return values

    def _gradients(self, blocks: Blocks) -> Iterator[tuple[slice, Tensor]]:
        """Chunks of ``-grad`` of the blocks' losses, ``J^T r``: ``(c, p)``. The sign falls out of every product."""
        if blocks is self.blocks and self._kept is not None:
            yield slice(0, blocks.n), self._kept
            return
        for where, J, R in self.forecaster.jacobians(blocks):
            yield where, torch.einsum("bdp,bd->bp", J, R)

    def _gathered(self, blocks: Blocks, rows: int) -> Iterator[tuple[slice, Tensor]]:
        """The same gradients ``rows`` at a time, whatever the chunks of the Jacobians: right-hand sides of one solve."""
        batch, start, count = torch.empty(min(rows, blocks.n), self.size, dtype=torch.float64, device=self.device), 0, 0
        for _, g in self._gradients(blocks):
            while len(g):
                taken = g[: len(batch) - count]
                batch[count : count + len(taken)] = taken
                count, g = count + len(taken), g[len(taken) :]
                if count == len(batch) or start + count == blocks.n:
                    yield slice(start, start + count), batch[:count]
                    start, count = start + count, 0

    def _warn_of_time(self, n: int, columns: int, seconds: float) -> None:
        batches = math.ceil(n / columns)
        warnings.warn(
            f"self-influence of {n} blocks by conjugate gradients is {batches} batches of {columns} solves, each with passes "
            f"over all {self.blocks.n} blocks; the first took {seconds:.1f} s, so all take about {seconds * batches:.0f} s. "
            f"hessian='dense' takes one pass and {8 * self.size**2 / 1e9:.2g} GB; influence_on is one solve either way",
            UserWarning,
            stacklevel=4,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}  # a saved detector stays small

    def _solve(self, V: Tensor) -> Tensor:
        if self._cholesky is not None:
            return torch.cholesky_solve(V, self._cholesky)
        return conjugate_gradients(self._gauss_newton, V)

    def _gauss_newton(self, V: Tensor) -> Tensor:
        product = self.shift * V
        for _, J, _ in self.forecaster.jacobians(self.blocks):
            rows = J.flatten(0, 1)
            product.addmm_(rows.T, rows @ V, alpha=1 / self.blocks.n)
        return product

    def _factorise(self, *, exact: bool) -> Tensor:
        H = torch.zeros(self.size, self.size, dtype=torch.float64, device=self.device)
        if exact:
            for curvature in self.forecaster.loss_hessians(self.blocks):
                H += curvature / self.blocks.n
        else:
            kept = []
            for _, J, R in self.forecaster.jacobians(self.blocks):
                rows = J.flatten(0, 1)
                H += rows.T @ rows / self.blocks.n
                if self.blocks.n * self.size <= KEPT:
                    kept.append(torch.einsum("bdp,bd->bp", J, R))
            self._kept = torch.cat(kept) if kept else None
        H.diagonal().add_(self.shift)
        factor, failed = torch.linalg.cholesky_ex(H)
        if failed:
            least = torch.linalg.eigvalsh(H)[0].item()
            raise ValueError(
                f"the Hessian is not positive definite, its least eigenvalue with damping is {least:.3g}: raise damping above "
                f"{max(0.0, self.shift - least):.3g}" + (", train longer, or use hessian='dense'" if exact else "")
            )
        return factor


def conjugate_gradients(product: Callable[[Tensor], Tensor], V: Tensor) -> Tensor:
    """Solve ``H X = V`` for all columns of ``V`` at once; ``product`` gives ``H X``, with ``H`` positive definite."""
    X, residual = torch.zeros_like(V), V.clone()
    direction, energy = residual.clone(), V.square().sum(0)
    goal = (CG_TOLERANCE**2 * energy).clamp_min(torch.finfo(V.dtype).tiny)
    for _ in range(CG_STEPS):
        if (energy <= goal).all():
            return X
        curved = product(direction)
        step = energy / (direction * curved).sum(0).clamp_min(torch.finfo(V.dtype).tiny)
        X += step * direction
        residual -= step * curved
        previous, energy = energy, residual.square().sum(0)
        direction = residual + energy / previous.clamp_min(torch.finfo(V.dtype).tiny) * direction
    if (energy > goal).any():
        worst = (energy / V.square().sum(0)).max().sqrt().item()
        warnings.warn(f"conjugate gradients stopped after {CG_STEPS} steps at a relative residual of {worst:.1e}", stacklevel=2)
    return X


def train(module: nn.Module, blocks: Blocks, *, ridge: float, seed: int, **fit_params: Any) -> nn.Module:
    """A trained copy of ``module``: Adam on the mean of half squared errors, weight decay ``ridge``.

    ``fit_params``: ``epochs`` (100), ``lr`` (1e-3), ``batch_size`` (32).
    """
    settings = {"epochs": 100, "lr": 1e-3, "batch_size": 32}
    if unknown := set(fit_params) - set(settings):
        raise ValueError(f"fit_params knows {sorted(settings)}, got {sorted(unknown)}")
    settings |= fit_params
    module = copy.deepcopy(module).train()
    reference = next(module.parameters())
    lags = [torch.tensor(x, dtype=reference.dtype, device=reference.device) for _, x, _ in blocks.chunks(blocks.n)]
    X = torch.cat(lags).unflatten(1, (blocks.block_length, blocks.channels))
    Y = torch.cat([torch.tensor(y, dtype=reference.dtype, device=reference.device) for _, _, y in blocks.chunks(blocks.n)])
    free: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
    # The function behind torch.optim.Adam: making the class imports torch's compiler, which takes seconds
    means, squares = [torch.zeros_like(p) for p in free], [torch.zeros_like(p) for p in free]
    steps = [torch.zeros(()) for _ in free]
    rule: dict[str, Any] = {"lr": settings["lr"], "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": ridge}
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # dropout draws from the global generator
        for _ in range(int(settings["epochs"])):
            for rows in torch.randperm(len(X), generator=generator).split(int(settings["batch_size"])):
                loss = 0.5 * (Y[rows] - module(X[rows])).square().sum(1).mean()
                slopes = torch.autograd.grad(loss, free, allow_unused=True, materialize_grads=True)
                with torch.no_grad():
                    adam(free, list(slopes), means, squares, [], steps, amsgrad=False, maximize=False, **rule)
    return module
