"""Batches that several processes hold parts of, as one batch: with gradients, and with parts of different length."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _AllGather(torch.autograd.Function):
    """Concatenates every process's rows; the gradient of a row is summed over the processes that used it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], group: Any) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        ctx.rank = dist.get_rank(group)
        padded = x.new_zeros((max(sizes), *x.shape[1:]))
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        start = sum(ctx.sizes[: ctx.rank])
        return total[start : start + ctx.sizes[ctx.rank]], None, None


def world_size(group: Any = None) -> int:
    """Processes in the group; 1 where nothing is distributed."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def row_counts(rows: int, device: torch.device, group: Any = None) -> list[int]:
    """How many rows each process of the group has, in the order of their ranks."""
    mine = torch.tensor([rows], device=device)
    counts = [torch.empty_like(mine) for _ in range(world_size(group))]
    dist.all_gather(counts, mine, group=group)
    return torch.cat(counts).tolist()


def all_rows(x: Tensor, sizes: list[int], group: Any = None) -> Tensor:
    """Every process's rows in the order of their ranks, with gradients to each process's own.

    With ``DistributedDataParallel``, which averages gradients over processes, the mean over processes of a loss on all rows
    has then exactly the gradient that one process with all rows would compute.
    """
    return _AllGather.apply(x, sizes, group)


def from_first(x: Tensor, group: Any = None) -> Tensor:
    """The group's first process's tensor, in place of everyone's own."""
    dist.broadcast(x, dist.get_global_rank(group, 0) if group is not None else 0, group=group)
    return x
