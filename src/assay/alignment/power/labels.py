"""Labels that follow the policy: a pair that it keeps disbelieving stops producing gradient."""

import hashlib
import operator
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .loss import at_least_float32, checked_gamma, same_shape


def update_labels(labels: Tensor, margins: Tensor, gamma: float) -> Tensor:
    """One visit: ``ℓ ← (1 − γ) ℓ + γ σ(m)``, kept in [0, 1], without gradient.

    Rashidinejad and Tian, "Sail into the Headwind", ICLR 2025, arXiv 2412.09544.

    Args:
        labels: In [0, 1].
        margins: `power_margin` of the current policy.
        gamma: In [0, 1).

    Shapes:
        Both ``(B,)``, and so the result, in the labels' dtype; ``σ`` is taken in float32 or wider.

    Raises:
        ValueError: ``gamma`` outside its range, or shapes differ.

    Example:
        >>> update_labels(torch.tensor([1.0]), torch.tensor([0.0]), gamma=0.5)
        tensor([0.7500])
    """
    checked_gamma(gamma)
    same_shape(labels=labels, margins=margins)
    return ((1 - gamma) * labels.detach() + gamma * at_least_float32(margins.detach()).sigmoid().to(labels)).clamp(0, 1)


class DynamicLabels:
    """A soft label for every pair of a data set, found by the pair's id, updated at each visit.

    Rashidinejad and Tian, "Sail into the Headwind", ICLR 2025, arXiv 2412.09544.

    ``ℓ_i ← (1 − γ) ℓ_i + γ σ(m_i)``, the fixed point being ``ℓ_i = σ(m_i)``, where the preference gradient of pair ``i`` is
    zero. A pair that comes ``k`` times in one call is visited ``k`` times with its mean ``σ(m)``, whatever the order.

    Args:
        n_or_ids: How many pairs (their ids are then 0 … n − 1), or their ids: all different, hashable, none missing.
        gamma: In [0, 1). The larger, the sooner a pair that the policy does not take up is let go.
        init: Where labels start: a number in [0, 1] or one for each pair, ``(n,)``. At ½ nothing is ever learnt.

    Shapes:
        ``labels`` float32 ``(n,)`` and ``visits`` int32 ``(n,)``, on the CPU.

    Raises:
        ValueError: no pair, doubled or missing ids, ``gamma`` or ``init`` outside their ranges.

    Example:
        >>> labels = DynamicLabels(["a", "b"], gamma=0.5)
        >>> labels.step(["b"], torch.tensor([-9.0])), labels.below(0.6)
        (tensor([0.5001]), ['b'])
    """

    def __init__(self, n_or_ids: int | Iterable[Hashable] | Tensor, gamma: float = 0.1, init: float | Tensor = 1.0):
        self.gamma = checked_gamma(gamma)
        given: Any = n_or_ids.tolist() if isinstance(n_or_ids, Tensor) else n_or_ids
        self.ids: Sequence[Any] = range(given) if isinstance(given, int) else list(given)
        self._at = None if isinstance(self.ids, range) else _index(self.ids)
        if not len(self.ids):
            raise ValueError("there must be at least one pair, got none")
        start = torch.as_tensor(init, dtype=torch.float32, device="cpu")
        if start.ndim and start.shape != (len(self.ids),):
            raise ValueError(f"init must be a number or have one for each of {len(self.ids)} pairs, got {tuple(start.shape)}")
        if not bool(((start >= 0) & (start <= 1)).all()):
            raise ValueError("init must be in [0, 1]")
        self.labels = start.expand(len(self.ids)).clone()
        self.visits = torch.zeros(len(self.ids), dtype=torch.int32)

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"DynamicLabels({len(self)} pairs, gamma={self.gamma}, {int((self.labels < 0.5).sum())} below 0.5)"

    def positions(self, ids: Sequence[Hashable] | Tensor) -> Tensor:
        """Where in ``labels`` the ids are, int64 ``(B,)``; KeyError for an id that is not there."""
        if self._at is None:
            at = torch.as_tensor(ids).detach().cpu()
            if len(at) and (at.is_floating_point() or at.dtype == torch.bool):
                raise KeyError(f"ids must be whole numbers in 0 … {len(self) - 1}, got {str(at.dtype).removeprefix('torch.')}")
            at = at.long()
            if len(at) and not 0 <= int(at.min()) <= int(at.max()) < len(self):
                raise KeyError(f"ids must be in 0 … {len(self) - 1}, got {int(at.min())} … {int(at.max())}")
            return at
        wanted = ids.tolist() if isinstance(ids, Tensor) else ids
        missing = [i for i in wanted if i not in self._at]
        if missing:
            raise KeyError(f"no pair has the id {missing[0]!r}")
        return torch.tensor([self._at[i] for i in wanted], dtype=torch.int64)

    def of(self, ids: Sequence[Hashable] | Tensor) -> Tensor:
        """The labels as they are, float32 ``(B,)`` on the CPU."""
        return self.labels[self.positions(ids)]

    def step(self, ids: Sequence[Hashable] | Tensor, margins: Tensor) -> Tensor:
        """Visits these pairs and gives their new labels, float32 ``(B,)``, on the margins' device.

        Raises:
            KeyError: an unknown id.
            ValueError: not one margin for each id.
            FloatingPointError: a margin is NaN. Nothing is changed by any of these.
        """
        return self.step_at(self.positions(ids), margins)

    def step_at(self, positions: Tensor, margins: Tensor) -> Tensor:
        """`step` by position instead of id."""
        if margins.shape != positions.shape:
            raise ValueError(f"there must be one margin for each of {len(positions)} ids, got shape {tuple(margins.shape)}")
        probability = margins.detach().float().sigmoid().cpu()
        if bool(probability.isnan().any()):
            raise FloatingPointError(f"{int(probability.isnan().sum())} of {len(probability)} margins are NaN")
        where, back, count = positions.cpu().unique(return_inverse=True, return_counts=True)
        mean = torch.zeros(len(where)).index_add_(0, back, probability) / count
        keep = (1 - self.gamma) ** count.float()
        self.labels[where] = (keep * self.labels[where] + (1 - keep) * mean).clamp(0, 1)
        self.visits[where] += count.int()
        return self.labels[where][back].to(margins.device)

    def below(self, threshold: float) -> list[Any]:
        """The ids whose label is below the threshold, the least believed first."""
        rows = (self.labels < threshold).nonzero()[:, 0]
        return [self.ids[i] for i in rows[self.labels[rows].argsort()].tolist()]

    def state_dict(self) -> dict[str, Any]:
        """Labels, visits, and a digest of the ids, so that labels never land on other pairs."""
        return {"labels": self.labels.clone(), "visits": self.visits.clone(), "ids": self._digest()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up `state_dict`; ValueError when it was made for other pairs."""
        if state["ids"] != self._digest() or state["labels"].shape != self.labels.shape:
            raise ValueError(
                f"these labels belong to {len(state['labels'])} other pairs than the {len(self)} here (ids differ)"
            )
        self.labels = state["labels"].detach().float().cpu().clone()
        self.visits = state["visits"].detach().int().cpu().clone()

    def _digest(self) -> str:
        return hashlib.sha256("\x1f".join(map(repr, self.ids)).encode()).hexdigest()[:16]


def _index(ids: Sequence[Hashable]) -> dict[Hashable, int]:
    missing = [row for row, i in enumerate(ids) if i is None or i != i]
    if missing:
        raise ValueError(f"every pair needs an id, {len(missing)} have none (first in row {missing[0]})")
    at = dict(zip(ids, range(len(ids)), strict=True))
    if len(at) < len(ids):
        doubled = next(i for row, i in enumerate(ids) if operator.ne(at[i], row))
        raise ValueError(f"ids must be different, {len(ids) - len(at)} are repeated, among them {doubled!r}")
    return at
