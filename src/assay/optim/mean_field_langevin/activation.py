"""Activations with their derivative in closed form: bounded smooth ReLU, ReLU, tanh, or any elementwise function."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

ActivationLike: TypeAlias = Literal["smooth_relu", "relu", "tanh"] | Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Activation:
    r"""An elementwise :math:`\varphi` and its slope.

    The smooth ReLU is :math:`\varphi(z) = s(z) - s(z - \iota)` with :math:`s(z) = \log(1 + e^{\kappa z}) / \kappa`: twice
    differentiable, :math:`0 \le \varphi \le \iota`, :math:`|\varphi'| \le 1`, :math:`|\varphi''| \le \kappa`. It is ReLU as
    both grow.

    Args:
        kind: ``"smooth_relu"``, ``"relu"``, ``"tanh"`` or an elementwise, differentiable callable.
        kappa: Sharpness of the smooth ReLU's two bends, > 0 and finite.
        iota: Its upper bound, > 0; infinity leaves it unbounded.
    """

    kind: ActivationLike = "smooth_relu"
    kappa: float = 5.0
    iota: float = 10.0

    def __post_init__(self) -> None:
        if self.kind not in ("smooth_relu", "relu", "tanh") and not callable(self.kind):
            raise ValueError(f"activation must be 'smooth_relu', 'relu', 'tanh' or a callable, got {self.kind!r}")
        if not (isinstance(self.kappa, Real) and 0 < float(self.kappa) < math.inf):
            raise ValueError(f"kappa must be positive and finite (activation='relu' is the limit), got {self.kappa!r}")
        if not (isinstance(self.iota, Real) and float(self.iota) > 0):
            raise ValueError(f"iota must be > 0, got {self.iota!r}")

    def __call__(self, z: Tensor) -> Tensor:
        """The value, for automatic differentiation."""
        if self.kind == "smooth_relu":
            ramp = F.softplus(z, beta=self.kappa, threshold=40)
            return ramp if math.isinf(self.iota) else ramp - F.softplus(z - self.iota, beta=self.kappa, threshold=40)
        if self.kind == "relu":
            return z.relu()
        if self.kind == "tanh":
            return z.tanh()
        return self.kind(z)

    def with_slope(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Value and derivative at ``z``, both new tensors of its shape."""
        if self.kind == "smooth_relu":
            return self._bounded_ramp(z)
        if self.kind == "relu":
            return z.relu(), (z > 0).to(z.dtype)
        if self.kind == "tanh":
            value = z.tanh()
            return value, 1 - value.square()
        with torch.enable_grad():
            leaf = z.detach().requires_grad_()
            value = self.kind(leaf)
            (slope,) = torch.autograd.grad(value.sum(), leaf)
        return value.detach(), slope.contiguous()  # of a sum, it may be one number seen many times

    def _bounded_ramp(self, z: Tensor) -> tuple[Tensor, Tensor]:
        value, slope = _ramp(z, self.kappa)
        # The second bend costs as much as the first, and away from it adds less than rounding: looking is ten times cheaper
        negligible = self.iota + math.log(torch.finfo(z.dtype).eps) / self.kappa
        if not math.isinf(self.iota) and z.numel() and bool(z.max() > negligible):
            above, bend = _ramp(z - self.iota, self.kappa)
            value.sub_(above)
            slope.sub_(bend)
        return value, slope


def _ramp(z: Tensor, kappa: float) -> tuple[Tensor, Tensor]:
    """``softplus`` and its slope from one sigmoid: ``s(z) = max(z, 0) - log σ(κ|z|) / κ``, accurate to rounding of 1."""
    slope = torch.mul(z, kappa).sigmoid_()
    upper = torch.sub(slope, 0.5).abs_().add_(0.5).log_()  # log σ(κ|z|): σ there is the larger of σ(κz) and 1 - σ(κz)
    return torch.sub(z.relu(), upper, alpha=1 / kappa), slope
