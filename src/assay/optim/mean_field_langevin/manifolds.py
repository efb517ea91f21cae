"""Where a particle may live: the interface, which is geoopt's, and the sphere."""

from typing import Literal, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

RENORMALISE_EVERY = 100  # steps after which rounding is taken off a particle's distance from its manifold


@runtime_checkable
class Manifold(Protocol):
    """Three of ``geoopt.Manifold``'s methods, so each of its manifolds is one; leading axes are a batch."""

    def projx(self, x: Tensor) -> Tensor:
        """The nearest point of the manifold (or a near one)."""
        ...

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        """``u`` projected onto the tangent space at ``x``."""
        ...

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        """Where a step along the tangent vector ``u`` leads from ``x``: the exponential map or a retraction."""
        ...


def is_manifold(value: object) -> TypeGuard[Manifold]:
    """Whether it has the three methods; a class has them too, but needs to be called first."""
    return isinstance(value, Manifold) and not isinstance(value, type)


class Sphere:
    r"""Spheres of one radius: :math:`P_w v = v - \langle w, v\rangle w/\rho^2`,
    :math:`\mathrm{Exp}_w(v) = \cos(\|v\|/\rho)\, w + \rho \sin(\|v\|/\rho)\, v/\|v\|`.

    Args:
        radius: :math:`\rho > 0`.
        joint_axes: How many trailing axes make up one point, ≥ 1. With particles ``(m, 2, D)``, 1 puts each of a particle's
            two vectors on a sphere of its own (a product of two), 2 puts the pair on one.
        retraction: ``"exp"``, or ``"normalize"``: ``w + v`` scaled back, which is off by ``O(‖v‖³)``.

    Example:
        >>> w = Sphere(2.0).projx(torch.tensor([3.0, 4.0]))
        >>> w, Sphere(2.0).proju(w, torch.tensor([1.0, 0.0]))
        (tensor([1.2000, 1.6000]), tensor([ 0.6400, -0.4800]))
    """

    def __init__(self, radius: float = 1.0, joint_axes: int = 1, retraction: Literal["exp", "normalize"] = "exp"):
        if not 0 < radius < float("inf"):
            raise ValueError(f"radius must be positive and finite, got {radius}")
        if joint_axes < 1:
            raise ValueError(f"joint_axes must be at least 1, got {joint_axes}")
        if retraction not in ("exp", "normalize"):
            raise ValueError(f"retraction must be 'exp' or 'normalize', got {retraction!r}")
        self.radius, self.joint_axes, self.retraction = float(radius), int(joint_axes), retraction
        self._axes = tuple(range(-self.joint_axes, 0))

    def __repr__(self) -> str:
        return f"Sphere(radius={self.radius:g}, joint_axes={self.joint_axes}, retraction={self.retraction!r})"

    def projx(self, x: Tensor) -> Tensor:
        return x * (self.radius / torch.linalg.vector_norm(x, dim=self._axes, keepdim=True))

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        return torch.addcmul(u, x, (x * u).sum(self._axes, keepdim=True), value=-1 / self.radius**2)

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        if self.retraction == "normalize":
            return self.projx(x + u)
        angle = torch.linalg.vector_norm(u, dim=self._axes, keepdim=True) / self.radius
        return torch.addcmul(angle.cos() * x, torch.sinc(angle / torch.pi), u)  # sinc: sin(angle) / angle, right at 0
