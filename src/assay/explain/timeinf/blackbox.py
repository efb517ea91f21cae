"""Influence of blocks on any differentiable forecaster, by Gauss-Newton on per-sample Jacobians."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from .blocks import Blocks

Hessian = Literal["auto", "dense", "cg", "exact"]
DENSE_LIMIT = 4096  # parameters up to which "auto" factorises the p x p matrix: 128 MB in float64
KEPT = 2**24  # numbers of the (n, p) gradient matrix that are kept, 128 MB; beyond it gradients are taken anew
CG_TOLERANCE, CG_STEPS = 1e-8, 100


class TorchAttribution:
    r"""Influence under ``module`` at its present parameters.

    With the Jacobian :math:`J_b` of the forecast of block :math:`b` by the :math:`p` parameters and
    :math:`\nabla\ell(b) = -J_b^\top r_b`:

    .. math:: H = \tfrac1n \sum_b J_b^\top J_b + (ridge + damping) I, \qquad
              I(b, c) = \tfrac1n \nabla\ell(c)^\top H^{-1} \nabla\ell(b).

    ``hessian``: ``"dense"`` factorises :math:`H`; ``"cg"`` solves by conjugate gradients and stores no :math:`p \times p`
    matrix; ``"auto"`` is dense up to 4,096 parameters; ``"exact"`` puts the Hessian of the loss itself in place of
    Gauss-Newton, and raises when it is not positive definite there.
    """

    def __init__(self, module: nn.Module, blocks: Blocks, *, ridge: float, damping: float, hessian: Hessian):
        self.module = copy.deepcopy(module).eval()
        if hessian == "exact":
            self.module.double()  # second derivatives need the digits, and oneDNN's recurrent kernels have none
        self.blocks = blocks
        self.shift = ridge + damping
        self.names = [name for name, p in self.module.named_parameters() if p.requires_grad]
        if not self.names:
            raise ValueError("model has no parameter that requires a gradient, so nothing to differentiate by")
        parameters = dict(self.module.named_parameters())
        self.size = sum(parameters[name].numel() for name in self.names)
        self.dtype, self.device = parameters[self.names[0]].dtype, parameters[self.names[0]].device
        # The vmap rules of recurrent kernels are missing or slow; a batched backward pass serves them
        self.recurrent = any(isinstance(part, nn.RNNBase) for part in self.module.modules())
        self._check_forward()
        self.dense = hessian in ("dense", "exact") or (hessian == "auto" and self.size <= DENSE_LIMIT)
        self._kept: Tensor | None = None
        self._cholesky = self._factorise(exact=hessian == "exact") if self.dense else None
        self._self: np.ndarray | None = None

    def self_influence(self) -> np.ndarray:
        if self._self is None:
            self._self = self.score_new(self.blocks)
        return self._self

    def score_new(self, blocks: Blocks) -> np.ndarray:
        """``grad^T H^-1 grad / n``; for the training blocks this is self-influence."""
        values = np.empty(blocks.n)
        for where, g in self._gradients(blocks):
            values[where] = (g.T * self._solve(g.T)).sum(0).cpu().numpy() / self.blocks.n
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
        for where, J, R in self._jacobians(blocks):
            yield where, torch.einsum("bdp,bd->bp", J, R)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}  # a saved detector stays small

    def _solve(self, V: Tensor) -> Tensor:
        if self._cholesky is not None:
            return torch.cholesky_solve(V, self._cholesky)
        return conjugate_gradients(self._gauss_newton, V)

    def _gauss_newton(self, V: Tensor) -> Tensor:
        product = self.shift * V
        for _, J, _ in self._jacobians(self.blocks):
            product += torch.einsum("bdp,bdk->pk", J, torch.einsum("bdp,pk->bdk", J, V)) / self.blocks.n
        return product

    def _factorise(self, *, exact: bool) -> Tensor:
        H = torch.zeros(self.size, self.size, dtype=torch.float64, device=self.device)
        if exact:
            for curvature in self._loss_hessians():
                H += curvature / self.blocks.n
        else:
            kept = []
            for _, J, R in self._jacobians(self.blocks):
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

    def _jacobians(self, blocks: Blocks) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Chunks of ``(where, J, R)``: ``J`` is ``(c, D, p)``, the residual ``R`` ``(c, D)``, both float64."""
        rows = 16 if self.recurrent else max(1, 2**23 // (self.size * blocks.channels))
        for where, x, y in self._tensors(blocks, rows):
            J, predicted = self._batched_backward(x) if self.recurrent else self._vmapped(x)
            yield where, J.double(), (y - predicted).double()

    def _vmapped(self, x: Tensor) -> tuple[Tensor, Tensor]:
        fixed = {k: v.detach() for k, v in (*self.module.named_parameters(), *self.module.named_buffers())}
        free = {name: fixed.pop(name) for name in self.names}

        def forecast(free: dict[str, Tensor], one: Tensor) -> tuple[Tensor, Tensor]:
            out = functional_call(self.module, {**fixed, **free}, (one[None],))[0]
            return out, out

        J, predicted = vmap(jacrev(forecast, has_aux=True), (None, 0))(free, x)
        return torch.cat([J[name].flatten(2) for name in self.names], -1), predicted

    def _batched_backward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The same from one forward pass and one vmapped backward pass; cost grows with ``c``, so chunks are small."""
        free = self._free()
        with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):  # cuDNN has no backward pass in eval mode
            predicted = self.module(x)  # (c, D)
            select = torch.eye(predicted.numel(), dtype=predicted.dtype, device=predicted.device)
            rows = torch.autograd.grad(
                predicted.flatten(), free, select, is_grads_batched=True, allow_unused=True, materialize_grads=True
            )
        return torch.cat([r.flatten(1) for r in rows], 1).unflatten(0, predicted.shape), predicted.detach()

    def _loss_hessians(self) -> Iterator[Tensor]:
        free = self._free()
        select = torch.eye(self.size, dtype=self.dtype, device=self.device)
        for _, x, y in self._tensors(self.blocks, 1024):
            with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
                loss = 0.5 * (y - self.module(x)).square().sum()
                slope = torch.cat(
                    [
                        g.flatten()
                        for g in torch.autograd.grad(loss, free, create_graph=True, allow_unused=True, materialize_grads=True)
                    ]
                )
                rows = torch.autograd.grad(
                    slope, free, select, is_grads_batched=True, allow_unused=True, materialize_grads=True
                )
            H = torch.cat([r.flatten(1) for r in rows], 1).double()
            yield (H + H.T) / 2

    def _free(self) -> list[nn.Parameter]:
        parameters = dict(self.module.named_parameters())
        return [parameters[name] for name in self.names]

    def _tensors(self, blocks: Blocks, rows: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        for where, lags, targets in blocks.chunks(rows):
            x = torch.tensor(lags, dtype=self.dtype, device=self.device).unflatten(1, (blocks.block_length, blocks.channels))
            yield where, x, torch.tensor(targets, dtype=self.dtype, device=self.device)

    def _check_forward(self) -> None:
        _, x, y = next(self._tensors(self.blocks, 2))
        with torch.enable_grad():
            out = self.module(x)
        if not isinstance(out, Tensor) or out.shape != y.shape:
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(f"model must map lags {tuple(x.shape)} to forecasts {tuple(y.shape)}, it returned {got}")
        if not out.requires_grad:
            raise ValueError("model is not differentiable: its forecast carries no gradient to its parameters")
        if not out.isfinite().all():
            raise ValueError("model returned a forecast that is not finite")


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
    optimizer = torch.optim.Adam(module.parameters(), lr=settings["lr"], weight_decay=ridge)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # dropout draws from the global generator
        for _ in range(int(settings["epochs"])):
            for rows in torch.randperm(len(X), generator=generator).split(int(settings["batch_size"])):
                loss = 0.5 * (Y[rows] - module(X[rows])).square().sum(1).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return module
