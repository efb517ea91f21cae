"""Long tails of one's own making, and their exact counter-measure: drawing rare classes more often."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from .checks import checked_number


def make_long_tailed(targets: Any, imbalance_factor: float, seed: int = 0) -> Tensor:
    r"""Rows to keep so that class k of K has :math:`n_k = n_{max} \cdot IF^{-k/(K-1)}` of them.

    Classes are in sorted order, the first has most rows; :math:`n_{max}` is the largest that every class can meet.

    Args:
        targets: A label for each row, ``(n,)``: tensor, array or list; text labels too.
        imbalance_factor: IF, largest over smallest class, ≥ 1.
        seed: Which rows of a class stay.

    Returns:
        Indices ``(m,)`` int64, ascending.

    Raises:
        ValueError: fewer than two classes, or a class that would be left without a row.

    Example:
        >>> y = torch.arange(3).repeat(100)
        >>> torch.bincount(y[make_long_tailed(y, 25)]).tolist()
        [100, 20, 4]
    """
    labels = np.asarray(targets.cpu() if isinstance(targets, Tensor) else targets)
    if labels.ndim != 1 or len(labels) == 0:
        raise ValueError(f"targets must be a vector with at least one label, got shape {labels.shape}")
    checked_number("imbalance_factor", imbalance_factor, 1, math.inf)
    classes, index, rows = np.unique(labels, return_inverse=True, return_counts=True)
    if len(classes) < 2:
        raise ValueError("targets must hold at least two classes")
    share = imbalance_factor ** -(np.arange(len(classes)) / (len(classes) - 1))
    n_max = int(np.floor((rows / share + 1e-9).min()))
    keep = np.minimum(np.floor(n_max * share + 0.5).astype(int), rows)
    if keep.min() < 1:
        raise ValueError(f"imbalance_factor {imbalance_factor:g} leaves class {classes[keep.argmin()]} without a row")
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    order = shuffled[np.argsort(index[shuffled], kind="stable")]  # grouped by class, random within
    nth = np.arange(len(labels)) - np.repeat(np.cumsum(rows) - rows, rows)
    kept = order[nth < np.repeat(keep, rows)]
    return torch.from_numpy(np.sort(kept))


class LongTailSampler(Sampler[int]):
    r"""Draws rows so that each class comes as often as it should, exactly; for ``DataLoader(sampler=...)``.

    Class k gets a share :math:`\propto n_k^{1-\beta}` of the epoch, rounded by largest remainders. Within a class every row
    comes equally often, up to one.

    Args:
        labels: Class index of each row, ``(n,)``.
        balance: β in [0, 1]: 0 draws as the data are, ½ by the square root of the counts, 1 all classes alike.
        num_samples: Rows of an epoch over all processes; by default as many as there are.
        seed: With the epoch it decides the order; the same on every process.
        num_replicas: Processes that share an epoch; each gets every ``num_replicas``-th row, all the same number.
        rank: This process, in [0, num_replicas).

    Raises:
        ValueError: labels that are no class indices, numbers out of range.

    Example:
        >>> y = torch.tensor([0] * 90 + [1] * 9 + [2])
        >>> torch.bincount(y[list(LongTailSampler(y, num_samples=300))]).tolist()
        [100, 100, 100]
    """

    def __init__(
        self,
        labels: Any,
        balance: float = 1.0,
        num_samples: int | None = None,
        *,
        seed: int = 0,
        num_replicas: int = 1,
        rank: int = 0,
    ):
        self.labels = torch.as_tensor(labels).detach().cpu()
        if self.labels.ndim != 1 or self.labels.is_floating_point() or len(self.labels) == 0 or int(self.labels.min()) < 0:
            raise ValueError(
                f"labels must be a vector of class indices ≥ 0, got {self.labels.dtype} {tuple(self.labels.shape)}"
            )
        self.balance = checked_number("balance", balance, 0, 1)
        self.total = len(self.labels) if num_samples is None else int(num_samples)
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank must lie in [0, num_replicas = {num_replicas}), got {rank}")
        if self.total < num_replicas:
            raise ValueError(f"num_samples must be at least num_replicas = {num_replicas}, got {self.total}")
        self.num_replicas, self.rank, self.seed, self.epoch = num_replicas, rank, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Call before each epoch, as with ``DistributedSampler``; without it the epochs count themselves."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.total // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + 1_000_003 * self.epoch)
        self.epoch += 1
        rows = torch.bincount(self.labels)
        weight = torch.where(rows > 0, rows.double() ** (1 - self.balance), 0.0)
        share = self.total * weight / weight.sum()
        quota = share.floor().long()
        rest = (share - quota).argsort(descending=True, stable=True)[: self.total - int(quota.sum())]
        quota[rest] += 1
        # Each class's rows in random order, again and again: the i-th pick of class k is place i mod n_k of its order.
        shuffled = torch.randperm(len(self.labels), generator=generator)
        grouped = shuffled[torch.argsort(self.labels[shuffled], stable=True)]
        owner = torch.repeat_interleave(quota)
        nth = torch.arange(self.total) - torch.repeat_interleave(quota.cumsum(0) - quota, quota)
        picked = grouped[(rows.cumsum(0) - rows)[owner] + nth % rows[owner]]
        picked = picked[torch.randperm(self.total, generator=generator)]
        mine = picked[self.rank :: self.num_replicas][: len(self)]
        return iter(mine.tolist())
