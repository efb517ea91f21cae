"""The two-layer network as a torch module: an average over particles, with no trained output layer."""

from numbers import Integral

import torch
from torch import Tensor, nn

from .activation import Activation, ActivationLike
from .manifolds import Manifold


class MeanFieldNet(nn.Module):
    r"""An average over ``n_particles`` pairs of neurons, one adding and one subtracting.

    From arXiv 2408.07254. With :math:`\tilde x = (x, 1)` and :math:`w_j = (\omega_{1,j}, \omega_{2,j})`,

    .. math:: \hat y(x) = \frac{R}{m} \sum_j \varphi(\langle\omega_{1,j}, \tilde x\rangle)
              - \varphi(\langle\omega_{2,j}, \tilde x\rangle)

    Args:
        d_in: Inputs :math:`d \ge 1`.
        n_particles: Width :math:`m \ge 1`.
        activation: ``"smooth_relu"``, ``"relu"``, ``"tanh"`` or an elementwise callable.
        output_scale: :math:`R > 0`.
        manifold: Start on this manifold: the nearest points to a Gaussian draw, which on a `Sphere` are uniform. By default
            particles start as :math:`N(0, I/d)`.
        n_outputs: Stacked outputs, each with neurons of its own.
        kappa, iota: Sharpness and bound of the smooth ReLU.
        bias: Whether :math:`\tilde x` has the constant 1.
        generator: Source of the initial draw.

    Shapes:
        - input ``(B, d)``; output ``(B,)``, or ``(B, n_outputs)`` if there are several.
        - ``particles``: ``(m, 2, d + 1)``, or ``(m, n_outputs, 2, d + 1)``.

    Raises:
        ValueError: an argument out of range; an input of another width.

    Example:
        >>> net = MeanFieldNet(5, 100)
        >>> net(torch.zeros(3, 5)).shape, net.particles.shape
        (torch.Size([3]), torch.Size([100, 2, 6]))
    """

    def __init__(
        self,
        d_in: int,
        n_particles: int,
        activation: ActivationLike = "smooth_relu",
        output_scale: float = 4.0,
        *,
        manifold: Manifold | None = None,
        n_outputs: int = 1,
        kappa: float = 5.0,
        iota: float = 10.0,
        bias: bool = True,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        for name, value in (("d_in", d_in), ("n_particles", n_particles), ("n_outputs", n_outputs)):
            if not (isinstance(value, Integral) and value >= 1):
                raise ValueError(f"{name} must be at least 1 and whole, got {value!r}")
        if not 0 < output_scale < float("inf"):
            raise ValueError(f"output_scale must be positive and finite, got {output_scale}")
        self.activation = Activation(activation, kappa, iota)
        self.d_in, self.output_scale, self.bias = d_in, float(output_scale), bias
        outputs = () if n_outputs == 1 else (n_outputs,)
        drawn = torch.randn((n_particles, *outputs, 2, d_in + bias), generator=generator) / d_in**0.5
        self.particles = nn.Parameter(drawn if manifold is None else manifold.projx(drawn))

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 2 or x.shape[1] != self.d_in:
            raise ValueError(f"x must be (B, {self.d_in}), got shape {tuple(x.shape)}")
        if self.bias:
            x = torch.cat([x, x.new_ones(len(x), 1)], dim=1)
        neurons = self.activation(x @ self.particles.flatten(0, -2).mT)  # (B, m · outputs · 2)
        plus, minus = neurons.unflatten(1, self.particles.shape[:-1]).mean(1).unbind(-1)
        return self.output_scale * (plus - minus)

    def extra_repr(self) -> str:
        return f"{self.d_in}, {len(self.particles)}, {self.activation.kind!r}, output_scale={self.output_scale:g}"
