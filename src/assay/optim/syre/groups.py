"""The optimizer's groups: what can be wrong with them, and the weight decay that is taken from them and given back."""

import warnings
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

DECAY = "syre_weight_decay"
"""The key under which a group keeps the weight decay that was taken from it; schedules may change it."""


def check_groups(optimizer: Optimizer) -> None:
    """Refuses an optimizer without parameters and one that would decay twice.

    Raises:
        ValueError: either.
    """
    if not any(group["params"] for group in optimizer.param_groups):
        raise ValueError("this optimizer holds no parameters")
    for number, group in enumerate(optimizer.param_groups):
        if group.get("weight_decay", 0) and DECAY in group:
            raise ValueError(_double(number, group))


def decays(optimizer: Optimizer) -> bool:
    return any(group.get("weight_decay", 0) or group.get(DECAY, 0) for group in optimizer.param_groups)


def look(optimizer: Optimizer, taken: bool = False) -> tuple[Any, ...]:
    """What tells whether groups have changed: their parameters, their own decay (0 once `taken`) and whether ours acts."""
    return tuple(
        (tuple(map(id, g["params"])), 0 if taken else g.get("weight_decay", 0), bool(g.get(DECAY, -1)))
        for g in optimizer.param_groups
    )


def take_decay(optimizer: Optimizer, replacement: float | None, for_all: bool) -> None:
    """Moves each group's ``weight_decay`` to `DECAY`; `replacement` stands in where a group decays, or everywhere.

    Raises:
        RuntimeError: a group has both.
    """
    for number, group in enumerate(optimizer.param_groups):
        own = group.get("weight_decay", 0)
        if own and DECAY in group:
            raise RuntimeError(_double(number, group))
        if DECAY not in group:
            group[DECAY] = replacement if replacement is not None and (own or for_all) else own
            if "weight_decay" in group:
                group["weight_decay"] = type(own)(0) if isinstance(own, int | float) else 0.0


def give_decay_back(optimizer: Optimizer) -> None:
    """Undoes `take_decay`; groups that it has not seen keep what they have."""
    for group in optimizer.param_groups:
        if DECAY not in group:
            continue
        decay = group.pop(DECAY)
        if "weight_decay" in group:
            group["weight_decay"] = decay
        elif decay:
            warnings.warn(f"{type(optimizer).__name__} has no weight_decay of its own: it now has none", stacklevel=3)


def keys_of(optimizer: Optimizer, known: dict[Tensor, str]) -> dict[Tensor, str]:
    """`known` with a key for each parameter that has none: its name, else its number in order of appearance."""
    names: dict[Tensor, str] = {}
    for group in optimizer.param_groups:
        names.update(zip(group["params"], group.get("param_names", ()), strict=False))
    keys = dict(known)
    for p in parameters_of(optimizer):
        if p not in keys:
            keys[p] = names.get(p) or str(len(keys))
    return keys


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def steps_taken(optimizer: Optimizer, p: Tensor) -> int | None:
    """The optimizer's own count of a parameter's steps; None where it keeps none that can be read without waiting."""
    if p not in optimizer.state:
        return 0
    count = optimizer.state[p].get("step")
    return count if isinstance(count, int) else None


def _double(number: int, group: dict[str, Any]) -> str:
    return (
        f"group {number} has weight_decay={group['weight_decay']} beside syre_weight_decay={group[DECAY]} and would decay "
        "twice; set group['syre_weight_decay'] instead and leave weight_decay at 0"
    )
