"""Outputs, drift and input gradients of the network in closed form: two matrix products, no automatic differentiation."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .activation import Activation
from .losses import Loss

TILE = 200 * 2**20  # bytes of one (rows, 2m) array beyond which rows are taken in parts
DIRECT = 1024  # columns up to which the largest eigenvalue comes from the whole spectrum


@dataclass(frozen=True)
class ClosedForm:
    """The network's formula; particles are ``W (K, m, 2, D)``, inputs ``(n, D)`` with the constant already in them.

    A particle's two vectors are two rows of one ``(2m, D)`` matrix, with signs ``+R/m`` and ``-R/m`` in turn.
    """

    activation: Activation
    output_scale: float

    def outputs(self, W: Tensor, x: Tensor) -> Tensor:
        """``(K, n)``."""
        return torch.cat([_mean(self.activation(_project(rows, W)), W) for rows in x.split(_rows(W))], 1) * self.output_scale

    def drift(self, W: Tensor, x: Tensor, target: Tensor, weight: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
        """The mean loss, a scalar, and ``m ∇`` of it by every particle, ``(K, m, 2, D)``.

        ``weight (n,)`` weighs samples and sums to 1; the last axis of ``target`` counts samples.
        """
        rows = _rows(W)
        if len(x) <= rows:
            total, drift = self._unsigned_drift(W, x, target, weight, loss)
        else:
            total, drift = x.new_zeros(()), torch.zeros_like(W)
            for part in zip(x.split(rows), target.split(rows, -1), weight.split(rows), strict=True):
                value, summand = self._unsigned_drift(W, *part, loss)
                total, drift = total + value, drift.add_(summand)
        return total, drift.mul_(W.new_tensor([[self.output_scale], [-self.output_scale]]))

    def _unsigned_drift(self, W: Tensor, x: Tensor, target: Tensor, weight: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
        value, slope = self.activation.with_slope(_project(x, W))  # (K, n, 2m)
        losses, residual = loss(self.output_scale * _mean(value, W), target)
        slope *= (residual * weight)[..., None]
        return losses @ weight, _product(slope.mT, x).view_as(W)

    def input_gradients(self, W: Tensor, x: Tensor) -> Tensor:
        """Gradients of every output by the inputs, ``(K, n, D)``."""
        signed = (W * W.new_tensor([1.0, -1.0])[:, None]).flatten(1, 2) * (self.output_scale / W.shape[1])
        slopes = [self.activation.with_slope(_project(rows, W))[1] for rows in x.split(_rows(W))]
        return torch.cat([slope @ signed for slope in slopes], 1)


def _project(x: Tensor, W: Tensor) -> Tensor:
    """``(K, n, 2m)``."""
    vectors = W.flatten(1, 2)
    return torch.mm(x, vectors[0].T)[None] if len(W) == 1 else torch.matmul(x, vectors.mT)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``(K, p, n)`` by ``(n, q)``. A batch of one is no batch: the batched product has one thread for each of its entries."""
    return torch.mm(a[0], b)[None] if len(a) == 1 else torch.matmul(a, b)


def _mean(value: Tensor, W: Tensor) -> Tensor:
    """Average of the signed pairs, ``(K, n)``."""
    return value @ _signs(W.shape[1], value.dtype, value.device)


@lru_cache(maxsize=8)
def _signs(m: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``(1/m, -1/m, 1/m, …)``."""
    return torch.tensor([1 / m, -1 / m], dtype=dtype, device=device).repeat(m)


def _rows(W: Tensor) -> int:
    return max(1, TILE // (W[..., 0].numel() * W.element_size()))


def largest_eigenvalue(x: Tensor, weight: Tensor) -> float:
    """Of ``xᵀ diag(weight) x``: exactly up to 1,024 columns, by 100 steps of power iteration beyond, which come from below."""
    scaled = x.double() * weight.double().sqrt()[:, None]
    if not bool(scaled.square().sum().isfinite()):
        raise ValueError("X holds numbers whose squares are too large for float64: scale it, or use standardize=True")
    if x.shape[1] <= DIRECT:
        return max(0.0, float(torch.linalg.eigvalsh(scaled.mT @ scaled)[-1]))
    v = torch.randn(x.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(x.device)
    for _ in range(100):
        v = scaled.mT @ (scaled @ (v / torch.linalg.vector_norm(v).clamp(min=1e-300)))
    return float(torch.linalg.vector_norm(v))
