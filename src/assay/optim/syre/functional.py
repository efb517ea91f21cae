r"""Syre without an optimizer: the penalty as a function, and θ + θ₀ as a parametrization of a module."""

import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .anchors import Named, anchor_std, check_parameter, check_patterns, check_sigma, draw, pairs


def syre_penalty(
    named_params: Named, anchors: Mapping[str, Tensor], gamma: float, d: Mapping[str, Tensor] | None = None
) -> Tensor:
    r"""The regulariser :math:`\gamma \sum_i D_i (w_i - \theta_{0,i})^2`, differentiable.

    From *Remove Symmetries to Control Model Expressivity and Improve Optimization* (ICLR 2025). Under SGD it is a
    ``weight_decay`` of 2γ towards θ₀; under Adam it goes through the preconditioner, which `Syre` on AdamW avoids.

    Args:
        named_params: A mapping, or pairs, of name and tensor: the weights w in use.
        anchors: θ₀ by name, as `draw_anchors` makes them; parameters without one are left out.
        gamma: γ, finite and ≥ 0.
        d: D by name; 1 where absent.

    Shapes: an anchor and a D have their parameter's shape; the result is a scalar.

    Raises:
        ValueError: `gamma` out of its range, an anchor without a parameter, or one of another shape.

    Example:
        >>> w = {"w": torch.tensor([1.0, 2.0])}
        >>> syre_penalty(w, {"w": torch.tensor([0.0, 1.0])}, gamma=0.5)
        tensor(1.)
    """
    if not 0 <= gamma < math.inf:
        raise ValueError(f"gamma must be finite and at least 0, got {gamma!r}")
    params = dict(pairs(named_params))
    if stray := sorted(set(anchors) - set(params)):
        raise ValueError(f"anchors hold {stray[0]!r}, which is no parameter")
    total = torch.zeros(())
    for name, theta0 in anchors.items():
        w = params[name]
        D = None if d is None else d.get(name)
        for what, x in (("anchor", theta0), ("d", D)):
            if x is not None and x.shape != w.shape:
                raise ValueError(f"the {what} of {name!r} has shape {tuple(x.shape)}, the parameter {tuple(w.shape)}")
        square = (w - theta0).square()
        total = total.to(w.device) + (square if D is None else D * square).sum()
    return gamma * total


class AnchorShift(nn.Module):
    """The parametrization ``θ → θ + θ₀``; assigning to the parameter sets θ so that the sum is what was assigned."""

    theta0: Tensor

    def __init__(self, theta0: Tensor):
        super().__init__()
        self.register_buffer("theta0", theta0)

    def forward(self, theta: Tensor) -> Tensor:
        return theta + self.theta0

    def right_inverse(self, w: Tensor) -> Tensor:
        return w - self.theta0


@torch.no_grad()
def parametrize_syre(
    module: nn.Module, sigma: float = 0.01, seed: int = 0, *, add_to_init: bool = True, exclude: Iterable[str] = ()
) -> nn.Module:
    r"""Replaces every trainable floating-point parameter by :math:`\theta + \theta_0` with θ to be trained; in place.

    From *Remove Symmetries to Control Model Expressivity and Improve Optimization* (ICLR 2025), the equations as printed:
    any optimizer's own weight decay now acts on θ, hence draws the weights in use towards θ₀. Build the optimizer
    afterwards. ``torch.nn.utils.parametrize.remove_parametrizations`` bakes the sum in.

    Args:
        module: Any module; its parameters become ``parametrizations.<name>.original``.
        sigma: c of :math:`\sigma_0 = c/\sqrt d`, > 0.
        seed: Of the anchors: those of `Syre` over ``named_parameters()`` with this seed.
        add_to_init: θ keeps the present values; False: the sum does.
        exclude: Patterns of names (``"norm*"``) left as they are. Frozen parameters are left as they are, too.

    Shapes: unchanged.

    Returns:
        `module`.

    Raises:
        ValueError: `sigma` out of its range, a pattern that matches no name, or a module that has been through this already.

    Example:
        >>> net = parametrize_syre(torch.nn.Linear(4, 3))
        >>> optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.05)
        >>> [name for name, _ in net.named_parameters()]
        ['parametrizations.weight.original', 'parametrizations.bias.original']
    """
    check_sigma(sigma, "fan_in")
    patterns = [exclude] if isinstance(exclude, str) else list(exclude)
    if any(isinstance(m, AnchorShift) for m in module.modules()):
        raise ValueError("this module has been through parametrize_syre already")
    check_patterns(patterns, [name for name, _ in module.named_parameters()])
    anchors: dict[int, Tensor] = {}
    found = []  # before anything changes; a shared parameter is found at each of its places, and has one anchor
    for prefix, owner in list(module.named_modules()):
        for name, p in list(owner.named_parameters(recurse=False)):
            key = f"{prefix}.{name}" if prefix else name
            if not (p.requires_grad and p.is_floating_point()) or any(fnmatchcase(key, pattern) for pattern in patterns):
                continue
            check_parameter(p)
            if id(p) not in anchors:
                std = anchor_std(tuple(p.shape), sigma)
                anchors[id(p)] = draw(seed, key, tuple(p.shape), std).to(p.device, p.dtype)
            found.append((owner, name, p))
    initial = {id(p): p.clone() for _, _, p in found}
    for owner, name, p in found:
        shift = AnchorShift(anchors[id(p)])
        parametrize.register_parametrization(owner, name, shift)
        theta = getattr(owner.parametrizations, name).original
        theta.copy_(initial[id(p)] if add_to_init else initial[id(p)] - shift.theta0)
    return module
