"""The last angles of each class: a ring of its own length a class, written a batch at a time."""

import math

import torch
from torch import Tensor


def remember(ring: Tensor, ring_rows: Tensor, ring_size: Tensor, angle: Tensor, y: Tensor, rows: Tensor) -> None:
    """Writes a batch's angles over the oldest ones, in place.

    Args:
        ring: ``(K, places)``; class k uses its first ``ring_size[k]`` places.
        ring_rows: ``(K,)``, how many angles each class has ever had; grows by ``rows``.
        ring_size: ``(K,)``.
        angle: ``(B,)``.
        y: Their classes, ``(B,)``.
        rows: ``bincount(y)``, ``(K,)``.
    """
    order = torch.argsort(y, stable=True)
    nth = torch.empty_like(y)
    nth[order] = torch.arange(len(y), device=y.device) - (rows.cumsum(0) - rows)[y[order]]  # nth of its class in the batch
    fits = nth >= (rows - ring_size)[y]  # of more rows than there are places the last ones stay
    slot = (ring_rows[y] + nth) % ring_size[y]
    ring[y[fits], slot[fits]] = angle[fits].to(ring.dtype)
    ring_rows += rows


def fill(ring: Tensor, ring_rows: Tensor, ring_size: Tensor, angle: Tensor, y: Tensor, rows: Tensor) -> None:
    """Writes a whole data set's angles, in place; of a class with more than fit, evenly spaced ones of the sorted."""
    order = torch.argsort(angle)
    order = order[torch.argsort(y[order], stable=True)]
    first, held = rows.cumsum(0) - rows, torch.minimum(rows, ring_size)
    place = torch.arange(ring.shape[1], device=ring.device)
    step = (rows - 1).clamp_min(0)[:, None] * place / (held - 1).clamp_min(1)[:, None]
    index = (first[:, None] + step.round().long()).clamp_max(len(y) - 1)
    ring.copy_(torch.where(place < held[:, None], angle[order][index], 0.0))
    ring_rows.copy_(held)


def ring_quantile(ring: Tensor, ring_rows: Tensor, ring_size: Tensor, alpha: float) -> Tensor:
    """The α-quantile of each class's angles, linear between the two nearest; 0 for a class without any; ``(K,)``."""
    held = torch.minimum(ring_rows, ring_size)
    place = torch.arange(ring.shape[1], device=ring.device)
    ordered = torch.where(place < held[:, None], ring.float(), math.inf).sort(1).values
    at = alpha * (held - 1).clamp_min(0)
    low = at.floor().long()[:, None]
    high = torch.minimum(low + 1, (held - 1).clamp_min(0)[:, None])
    below, above = (torch.nan_to_num(ordered.gather(1, i)[:, 0], posinf=0.0) for i in (low, high))
    return below + (at - at.floor()) * (above - below)
