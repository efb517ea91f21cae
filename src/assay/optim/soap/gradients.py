"""Gradients as SOAP takes them: dense, finite, and in the precision of the state."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .layout import Layout

Numbered = tuple[int, Tensor]


def state_dtype(p: Tensor) -> torch.dtype:
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def stacked_gradients(layout: Layout, params: list[Tensor], sign: int) -> Tensor:
    """``(k, d_1, …, d_r)`` in the dtype of the state: low precision is cast up before anything is squared."""
    grads = [layout.fold(p.grad) for p in params if p.grad is not None]
    grad = torch.stack(grads).to(state_dtype(params[0]))
    return grad if sign > 0 else grad.neg_()


def finite_gradients(groups: Sequence[dict[str, Any]]) -> tuple[list[list[Tensor]], list[Numbered]]:
    """Each group's parameters with a finite gradient, and the refused ones with the number of their group.

    One NaN in a factor would stay for ever, so refusing comes before anything is folded in. The test is on the squared
    norm, which is the trace that a factor would gain: a gradient whose outer product overflows is refused too.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[Numbered]] = defaultdict(list)
    for number, group in enumerate(groups):
        for p in group["params"]:
            if p.grad is None or p.numel() == 0:
                continue
            if p.grad.layout != torch.strided:
                raise RuntimeError(f"SOAP needs dense gradients, got {p.grad.layout} for a parameter of shape {tuple(p.shape)}")
            kinds[p.device, state_dtype(p)].append((number, p))
    usable: list[list[Tensor]] = [[] for _ in groups]
    refused: list[Numbered] = []
    for (_, dtype), entries in kinds.items():
        norms = torch._foreach_norm([p.grad for _, p in entries if p.grad is not None], 2, dtype=dtype)
        finite = torch.stack(list(norms)).square().isfinite().tolist()  # the only wait for the device in a step
        for (number, p), ok in zip(entries, finite, strict=True):
            if ok:
                usable[number].append(p)
            else:
                refused.append((number, p))
    return usable, refused
