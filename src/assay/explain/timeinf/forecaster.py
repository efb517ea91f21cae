"""A torch forecaster at fixed parameters, read by blocks: Jacobians of its forecasts, and the curvature of its loss."""

import copy
import warnings
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from .blocks import Blocks

CHUNK = 2**23  # numbers in the Jacobians held at once, 64 MB in float64
BATCHED_ROWS = 16  # blocks of a batched backward pass, whose cost grows with the square of them
PROBED = 16  # blocks on which the way of differentiating is tried out


class Forecaster:
    """A copy of ``module`` in evaluation mode with per-block Jacobians.

    Jacobians come from ``vmap`` where it can run the module, else from one forward and a batched backward pass over 16
    blocks (recurrent layers, whose kernels have no usable ``vmap`` rule), else from a forward and backward pass a block:
    data-dependent control flow, or a forecast that changes with the other blocks of its batch. ``way`` says which.
    """

    def __init__(self, module: nn.Module, blocks: Blocks, *, double: bool):
        self.module = copy.deepcopy(module).eval()
        if double:
            self.module.double()
        parameters = dict(self.module.named_parameters())
        self.names = [name for name, p in parameters.items() if p.requires_grad]
        if not self.names:
            raise ValueError("model has no parameter that requires a gradient, so nothing to differentiate by")
        self.size = sum(parameters[name].numel() for name in self.names)
        self.dtype, self.device = parameters[self.names[0]].dtype, parameters[self.names[0]].device
        self._check_forward(blocks)
        self.way = self._settle(blocks)

    def jacobians(self, blocks: Blocks) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Chunks of ``(where, J, R)``: ``J`` is ``(c, D, p)``, the residual ``R`` ``(c, D)``, both float64."""
        differentiate = {"vmap": self._vmapped, "batched": self._batched_backward, "looped": self._looped}[self.way]
        rows = max(1, CHUNK // (self.size * blocks.channels))
        for where, x, y in self.tensors(blocks, min(rows, BATCHED_ROWS) if self.way == "batched" else rows):
            J, predicted = differentiate(x)
            yield where, J.double(), (y - predicted).double()

    def loss_hessians(self, blocks: Blocks) -> Iterator[Tensor]:
        """Chunks of the summed Hessian of the loss, ``(p, p)`` each."""
        free = self._free()
        select = torch.eye(self.size, dtype=self.dtype, device=self.device)
        for _, x, y in self.tensors(blocks, 1 if self.way == "looped" else 1024):
            with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
                loss = 0.5 * (y - self.module(x)).square().sum()
                slopes = torch.autograd.grad(loss, free, create_graph=True, allow_unused=True, materialize_grads=True)
                slope = torch.cat([g.flatten() for g in slopes])
                rows = torch.autograd.grad(
                    slope, free, select, is_grads_batched=True, allow_unused=True, materialize_grads=True
                )
            H = torch.cat([r.flatten(1) for r in rows], 1).double()
            yield (H + H.T) / 2

    def tensors(self, blocks: Blocks, rows: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        for where, lags, targets in blocks.chunks(rows):
            x = torch.tensor(lags, dtype=self.dtype, device=self.device).unflatten(1, (blocks.block_length, blocks.channels))
            yield where, x, torch.tensor(targets, dtype=self.dtype, device=self.device)

    def _settle(self, blocks: Blocks) -> Literal["vmap", "batched", "looped"]:
        """The fastest way that works on the first blocks, with one warning where that is not the expected one."""
        _, x, _ = next(self.tensors(blocks, PROBED))
        reason = ""
        if not any(isinstance(part, nn.RNNBase) for part in self.module.modules()):
            try:
                self._vmapped(x[:2])
                return "vmap"
            except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
                reason = f"torch.func.vmap cannot run this model ({_first_line(error)})"
                if "control flow" in str(error):  # a branch that a whole batch takes together is not each block's own
                    return self._slower("looped", reason)
        try:
            together = self._batched_backward(x)[1]
        except (RuntimeError, NotImplementedError) as error:
            return self._slower("looped", f"a batched backward pass cannot run this model ({_first_line(error)})")
        alone = torch.cat([self._forecast(one[None]) for one in x])
        tolerance = torch.finfo(self.dtype).eps ** 0.5
        if not torch.allclose(together, alone, rtol=tolerance, atol=tolerance * float(alone.abs().max())):
            return self._slower("looped", reason or "the forecast of a block changes with the other blocks of its batch")
        return self._slower("batched", reason) if reason else "batched"

    @staticmethod
    def _slower(way: Literal["batched", "looped"], reason: str) -> Literal["batched", "looped"]:
        instead = "a backward pass over 16 blocks at a time" if way == "batched" else "a backward pass a block"
        warnings.warn(
            f"{reason}: its gradients come from {instead}, with the same numbers but slower", UserWarning, stacklevel=7
        )
        return way

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

    def _looped(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The same for one block and channel at a time: what always works."""
        free = self._free()
        J = torch.empty(len(x), x.shape[2], self.size, dtype=self.dtype, device=self.device)
        predicted = torch.empty(J.shape[:2], dtype=self.dtype, device=self.device)
        with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
            for b in range(len(x)):
                out = self.module(x[b : b + 1])[0]
                predicted[b] = out.detach()
                for d in range(len(out)):
                    rows = torch.autograd.grad(out[d], free, retain_graph=True, allow_unused=True, materialize_grads=True)
                    J[b, d] = torch.cat([r.flatten() for r in rows])
        return J, predicted

    def _forecast(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.module(x)

    def _free(self) -> list[nn.Parameter]:
        parameters = dict(self.module.named_parameters())
        return [parameters[name] for name in self.names]

    def _check_forward(self, blocks: Blocks) -> None:
        _, x, y = next(self.tensors(blocks, 2))
        with torch.enable_grad():
            out = self.module(x)
        if not isinstance(out, Tensor) or out.shape != y.shape:
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(f"model must map lags {tuple(x.shape)} to forecasts {tuple(y.shape)}, it returned {got}")
        if not out.requires_grad:
            raise ValueError("model is not differentiable: its forecast carries no gradient to its parameters")
        if not out.isfinite().all():
            raise ValueError("model returned a forecast that is not finite")


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    first = text[0] if text else type(error).__name__
    return first if len(first) <= 160 else first[:157] + "..."
