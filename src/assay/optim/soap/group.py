"""One parameter group: its options checked, its parameters sorted, its update applied."""

import math
import numbers
from collections import defaultdict
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from .layout import layout_of

Group = dict[str, Any]


def sorted_by_kind(group: Group, params: list[Tensor], states: Any) -> dict[tuple, list[Tensor]]:
    """Parameters that can be worked on together: same layout, dtype, device and step count (None before the first)."""
    kinds: dict[tuple, list[Tensor]] = defaultdict(list)
    options = (
        group["max_precond_dim"],
        group["merge_dims"],
        group["precondition_1d"],
        group["data_format"],
        group["one_sided"],
        group["factorized"],
    )
    for number, p in enumerate(params):
        layout = layout_of(tuple(p.shape), *options)
        alone = number if group["foreach"] is False else -1
        kinds[layout, p.dtype, p.device, alone, states[p].get("step")].append(p)
    return kinds


def apply_directions(group: Group, params: list[Tensor], directions: list[Tensor], t: int) -> None:
    """θ ← (θ - α N)(1 - lr·weight_decay), rounded once where the parameter has low precision."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    alpha = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t) if group["correct_bias"] else lr
    if group["normalize_grads"]:
        directions = [N / (1e-30 + N.square().mean().sqrt()) for N in directions]
    low = params[0].dtype != directions[0].dtype
    theta = [p.to(directions[0].dtype) for p in params] if low else params
    torch._foreach_add_(theta, directions, alpha=-alpha)
    if group["weight_decay"]:
        torch._foreach_mul_(theta, 1 - lr * group["weight_decay"])
    if low:
        torch._foreach_copy_(params, theta)


def without_autocast(usable: list[list[Tensor]]) -> ExitStack:
    """Turns autocast off on the parameters' devices: the state's products need the digits of the dtype it has."""
    stack = ExitStack()
    for device in {p.device.type for params in usable for p in params}:
        if torch.amp.is_autocast_available(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def shampoo_beta(group: Group) -> float:
    return group["shampoo_beta"] if group["shampoo_beta"] >= 0 else group["betas"][1]


def sign(group: Group) -> int:
    return -1 if group["maximize"] else 1


def check_group(group: Group) -> None:
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr must be a number or a tensor of one element, got shape {tuple(lr.shape)}")
    if not 0 <= float(lr) < math.inf:
        raise ValueError(f"lr must be finite and at least 0, got {lr!r}")
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas!r}")
    if not 0 < group["eps"] < math.inf:
        raise ValueError(f"eps must be positive and finite, got {group['eps']!r}")
    if not 0 <= group["weight_decay"] < math.inf:
        raise ValueError(f"weight_decay must be finite and at least 0, got {group['weight_decay']!r}")
    if not group["shampoo_beta"] < 1:
        raise ValueError(f"shampoo_beta must be below 1 (negative: use betas[1]), got {group['shampoo_beta']!r}")
    for name in ("precondition_frequency", "max_precond_dim"):
        value = group[name]
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    if group["data_format"] not in ("channels_first", "channels_last"):
        raise ValueError(f"data_format must be 'channels_first' or 'channels_last', got {group['data_format']!r}")
