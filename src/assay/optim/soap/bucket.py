"""Equal-shaped parameters stacked, so that one batched product serves them all.

The stack is the storage; each parameter's entry in ``optimizer.state`` holds views of it in the parameter's own shape.
Whoever replaces or reloads an entry breaks the link, `current` notices, and the stack is built again from the entries.
"""

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor

from . import eigenbasis
from .gradients import stacked_gradients
from .layout import Layout

State = MutableMapping[str, Any]

_CPU_CHUNK = 1 << 20
"""Elements worked on at once: large matrices go one by one, so that temporaries stay in the CPU's cache."""
_DEVICE_CHUNK = 1 << 26


class Bucket:
    """Optimizer state of ``k`` parameters that share layout, dtype, device and step count."""

    def __init__(self, layout: Layout, params: list[Tensor], moments: dict[str, Tensor], factors: list, bases: list):
        self.layout, self.params = layout, params
        self.moments = (
            moments  # exp_avg and exp_avg_sq: (k, d_1, …, d_r); or exp_avg_sq_row (k, m) and exp_avg_sq_column (k, n)
        )
        self.factors, self.bases = factors, bases  # (k, d_a, d_a) or None, one an axis
        self._views: list[dict[str, Any]] = []

    @classmethod
    def begin(cls, layout: Layout, params: list[Tensor], shampoo_beta: float, sign: int) -> "Bucket":
        """The very first call: factors and their eigenbasis from the first gradient, moments zero, no parameter moves."""
        grad = stacked_gradients(layout, params, sign)
        factors: list[Tensor | None] = []
        for axis, (d, factored) in enumerate(zip(layout.dims, layout.factored, strict=True)):
            factors.append(grad.new_zeros(len(params), d, d) if factored else None)
            if factors[-1] is not None:
                eigenbasis.add_gram(factors[-1], eigenbasis.unfolded(grad, axis), shampoo_beta)
        bases = [None if S is None else eigenbasis.first_basis(S) for S in factors]
        moments = {"exp_avg": torch.zeros_like(grad)}
        if layout.rank_one:
            moments["exp_avg_sq_row"] = grad.new_zeros(grad.shape[:2])
            moments["exp_avg_sq_column"] = grad.new_zeros(len(params), layout.dims[1])
        else:
            moments["exp_avg_sq"] = torch.zeros_like(grad)
        return cls(layout, params, moments, factors, bases)

    @classmethod
    def gather(cls, layout: Layout, params: list[Tensor], states: list[State]) -> "Bucket":
        """Stacks the entries of parameters that already have state."""
        for state in states:
            check_entry(layout, state)
        moments = {name: torch.stack([_folded(layout, name, s[name]) for s in states]) for name in _moment_names(layout)}
        stacks = {
            name: [torch.stack([s[name][axis] for s in states]) if keep else None for axis, keep in enumerate(layout.factored)]
            for name in ("factors", "bases")
        }
        return cls(layout, params, moments, stacks["factors"], stacks["bases"])

    def publish(self, states: list[State]) -> None:
        """Points every parameter's entry at its slice of the stack."""
        self._views = []
        slices = {n: self.layout.unfold(x) if _shaped(n) else x.unbind() for n, x in self.moments.items()}
        for i, state in enumerate(states):
            lists = {
                n: [None if x is None else x[i] for x in xs] for n, xs in (("factors", self.factors), ("bases", self.bases))
            }
            self._views.append({**{n: xs[i] for n, xs in slices.items()}, **lists})
            state.update({n: list(v) if isinstance(v, list) else v for n, v in self._views[-1].items()})

    def current(self, states: list[State]) -> bool:
        """Whether every entry still is the view that `publish` put there."""
        return all(_same(s.get(n), v) for s, views in zip(states, self._views, strict=True) for n, v in views.items())

    def release(self, i: int, state: State) -> None:
        """Gives the i-th parameter its own copy of what is still a view, so that a stack it has left can be freed."""
        for name, view in self._views[i].items():
            if _same(state.get(name), view):
                state[name] = [None if x is None else x.clone() for x in view] if isinstance(view, list) else view.clone()

    @property
    def second(self) -> tuple[Tensor, ...]:
        return tuple(x for name, x in self.moments.items() if name != "exp_avg")

    def chunks(self) -> Iterator["Bucket"]:
        """Views of the stack, each small enough to work on at once."""
        device_limit = _CPU_CHUNK if self.params[0].device.type == "cpu" else _DEVICE_CHUNK
        size = max(1, device_limit // max(1, self.params[0].numel()))
        if size >= len(self.params):
            yield self
            return
        for start in range(0, len(self.params), size):
            part = slice(start, start + size)
            moments = {name: x[part] for name, x in self.moments.items()}
            factors, bases = ([None if x is None else x[part] for x in xs] for xs in (self.factors, self.bases))
            yield Bucket(self.layout, self.params[part], moments, factors, bases)

    def refresh(self) -> None:
        for part in self.chunks():
            eigenbasis.refresh(part.moments["exp_avg"], part.second, part.factors, part.bases)


def _same(value: Any, view: Any) -> bool:
    """Identity, of the members where it is a list: one of them may have been replaced by hand."""
    if isinstance(view, list):
        return isinstance(value, list) and len(value) == len(view) and all(a is b for a, b in zip(value, view, strict=True))
    return value is view


def _moment_names(layout: Layout) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq_row", "exp_avg_sq_column") if layout.rank_one else ("exp_avg", "exp_avg_sq")


def _shaped(name: str) -> bool:
    return name in ("exp_avg", "exp_avg_sq")


def _folded(layout: Layout, name: str, x: Tensor) -> Tensor:
    return layout.fold(x) if _shaped(name) else x


def check_entry(layout: Layout, state: State) -> None:
    """The options that shape the state must still be those under which it was made."""
    held = tuple(0 if S is None else len(S) for S in state.get("factors", ()))
    wanted = tuple(d if keep else 0 for d, keep in zip(layout.dims, layout.factored, strict=True))
    if held != wanted or any(name not in state for name in _moment_names(layout)):
        raise RuntimeError(
            f"a parameter's state has factors of sizes {held} (0: none), its group now asks for {wanted}"
            f"{' and a rank-one second moment' if layout.rank_one else ''}; max_precond_dim, merge_dims, precondition_1d, "
            "data_format, one_sided and factorized cannot change once a parameter has state"
        )
