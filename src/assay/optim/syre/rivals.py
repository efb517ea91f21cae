"""What the study measures Syre by: hooks on an optimizer, or changes to a model, a few lines each."""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .anchors import anchor_std


def decay_towards(optimizer: Optimizer, target: Callable[[Tensor], Tensor], decay: float) -> None:
    """Adds ``decay · (w - target(w))`` to every gradient before each step."""

    @torch.no_grad()
    def add(*_: Any) -> None:
        for p in parameters_of(optimizer):
            if p.grad is not None:
                p.grad.add_(p - target(p), alpha=decay)

    optimizer.register_step_pre_hook(add)


def to_the_start(optimizer: Optimizer) -> Callable[[Tensor], Tensor]:
    """L2-init (Kumar et al. 2023): the weights as they are now."""
    start = {p: p.detach().clone() for p in parameters_of(optimizer)}
    return lambda p: start[p]


def to_noise(sigma: float) -> Callable[[Tensor], Tensor]:
    """A point of an anchor's variance, drawn anew at every step: noise with weight decay, and no symmetry removed."""
    return lambda p: anchor_std(tuple(p.shape), sigma) * torch.randn_like(p)


def hold_fixed(optimizer: Optimizer, fraction: float, gain: float) -> None:
    """W-asymmetric networks (Lim et al. 2024): a random share of each matrix is set to random values and stays there."""
    held = []
    for p in parameters_of(optimizer):
        if p.ndim > 1:
            fixed = torch.rand_like(p) < fraction
            held.append((p, fixed, gain * anchor_std(tuple(p.shape), 1.0) * torch.randn_like(p)))

    @torch.no_grad()
    def put_back(*_: Any) -> None:
        for p, fixed, values in held:
            p.copy_(torch.where(fixed, values, p))

    put_back()
    optimizer.register_step_post_hook(put_back)


class DropWeights(nn.Module):
    """DropConnect (Wan et al. 2013) as a parametrization: each use of a matrix in training loses a share of its entries."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, weight: Tensor) -> Tensor:
        return nn.functional.dropout(weight, self.rate, self.training)


def drop_connect(model: nn.Module, rate: float) -> None:
    for layer in [m for m in model.modules() if isinstance(m, nn.Linear)]:
        nn.utils.parametrize.register_parametrization(layer, "weight", DropWeights(rate))


class ReDo:
    """Recycles dormant units (Sokar et al. 2023): fresh incoming weights, outgoing ones at 0, momentum cleared.

    A unit is dormant where its mean |activation| on the last batch is at most `tau` times its layer's mean.
    """

    def __init__(self, model: nn.Sequential, optimizer: Optimizer, every: int, tau: float):
        self.optimizer, self.every, self.tau, self.steps = optimizer, every, tau, 0
        self.layers = hidden_layers(model)
        self.activity: dict[nn.Module, Tensor] = {}
        for _, activation, _ in self.layers:
            activation.register_forward_hook(self._see)
        optimizer.register_step_post_hook(self._recycle)

    def _see(self, activation: nn.Module, _: Any, out: Tensor) -> None:
        if activation.training:
            self.activity[activation] = out.detach().abs().mean(0)

    @torch.no_grad()
    def _recycle(self, *_: Any) -> None:
        self.steps += 1
        if self.steps % self.every:
            return
        for into, activation, out_of in self.layers:
            activity = self.activity[activation]
            dormant = activity <= self.tau * activity.mean()
            fresh = nn.Linear(into.in_features, into.out_features).to(into.weight)
            into.weight[dormant], into.bias[dormant] = fresh.weight[dormant], 0.0
            out_of.weight[:, dormant] = 0.0
            for p, where in ((into.weight, (dormant,)), (into.bias, (dormant,)), (out_of.weight, (slice(None), dormant))):
                buffer = self.optimizer.state[p].get("momentum_buffer")
                if buffer is not None:
                    buffer[where] = 0.0


def hidden_layers(model: nn.Module) -> list[tuple[nn.Linear, nn.Module, nn.Linear]]:
    """A stack's hidden layers as (linear, activation, next linear); empty for anything else."""
    if not isinstance(model, nn.Sequential):
        return []
    linear = [i for i, m in enumerate(model) if isinstance(m, nn.Linear)]
    return [(model[i], model[i + 1], model[j]) for i, j in pairwise(linear) if j == i + 2]  # type: ignore[misc]


def parameters_of(optimizer: Optimizer) -> Iterable[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
