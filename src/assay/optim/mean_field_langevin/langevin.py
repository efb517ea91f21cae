"""One step of Langevin dynamics in place, Euclidean or on a manifold. The optimizer and the estimators share it."""

import math

import torch
from torch import Tensor

from .manifolds import Manifold


def langevin_step_(
    w: Tensor,
    drift: Tensor,
    lr: float,
    beta: float,
    *,
    weight_decay: float = 0.0,
    manifold: Manifold | None = None,
    generator: torch.Generator | None = None,
) -> None:
    r"""Moves particles ``w`` along ``-drift``, the gradient at the scale of one particle.

    .. math:: w \leftarrow w - \eta (drift + \lambda w) + \sqrt{2\eta/\beta}\, \xi \qquad\text{or}\qquad
              w \leftarrow \mathrm{Exp}_w\big(P_w(-\eta\, drift + \sqrt{2\eta/\beta}\, \xi)\big)

    The noise does not depend on the number of particles: a particle's temperature is :math:`1/\beta`.
    """
    move = torch.mul(drift, -lr)
    if not math.isinf(beta):
        move.add_(_noise_like(w, generator), alpha=math.sqrt(2 * lr / beta))
    if manifold is None:
        w.mul_(1 - lr * weight_decay).add_(move)
    else:  # the projection is linear, so one of the sum is one of the drift and one of the noise
        w.copy_(manifold.expmap(w, manifold.proju(w, move)))


def _noise_like(w: Tensor, generator: torch.Generator | None) -> Tensor:
    """Drawn where the generator lives, so one generator gives the same noise to any device."""
    device = w.device if generator is None else generator.device
    return torch.empty(w.shape, dtype=w.dtype, device=device).normal_(generator=generator).to(w.device)
