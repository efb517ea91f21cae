"""A linear head fixed to a simplex: every two class directions enclose the same, largest possible angle."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ETFLinear(nn.Module):
    r"""A linear layer without bias whose weights are a random simplex equiangular tight frame and are never trained.

    Neural collapse brings class means and weights to such a frame; fixing the head to it is how *Multiplicative Logit
    Adjustment ...* (Hasegawa & Sato, ICLR 2025) trains, and what makes its theory apply. With :math:`V` an orthonormal
    basis of the complement of :math:`\mathbf 1` in :math:`R^K` and :math:`Q` a random ``(d, K−1)`` matrix with orthonormal
    columns,

    .. math:: W = \sqrt{K/(K-1)}\, V Q^\top, \qquad W W^\top = \tfrac{K}{K-1} (I - \mathbf 1\mathbf 1^\top / K).

    Args:
        in_features: d, at least ``out_features − 1``.
        out_features: K, at least 2.
        scale: Length of every weight row, > 0.
        generator: Where the orientation is drawn from; torch's global generator by default.
        device: Where the weight lives.
        dtype: Its type.

    Shapes:
        - input ``(*, d)``, output ``(*, K)``.

    Raises:
        ValueError: fewer than K − 1 features: so many directions do not fit.

    Example:
        >>> head = ETFLinear(64, 10)
        >>> (head.weight @ head.weight.T)[0, :3].round(decimals=4)
        tensor([ 1.0000, -0.1111, -0.1111])
        >>> list(head.parameters())
        []
    """

    weight: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scale: float = 1.0,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if out_features < 2:
            raise ValueError(f"out_features must be at least 2, got {out_features}")
        if in_features < out_features - 1:
            raise ValueError(
                f"{out_features} simplex directions need in_features ≥ {out_features - 1}, got {in_features}: "
                "widen the last layer"
            )
        if not 0 < scale < math.inf:
            raise ValueError(f"scale must be positive and finite, got {scale!r}")
        self.in_features, self.out_features, self.scale = in_features, out_features, scale
        K = out_features
        draws = torch.randn(K, K, generator=generator, dtype=torch.float64)
        draws[:, 0] = 1.0  # the first basis vector is 1, the others are V
        V = torch.linalg.qr(draws)[0][:, 1:]  # (K, K-1)
        Q = torch.linalg.qr(torch.randn(in_features, K - 1, generator=generator, dtype=torch.float64))[0]  # (d, K-1)
        weight = scale * math.sqrt(K / (K - 1)) * V @ Q.T
        self.register_buffer("weight", weight.to(device=device, dtype=dtype or torch.get_default_dtype()))

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(features, self.weight)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, scale={self.scale:g}"
