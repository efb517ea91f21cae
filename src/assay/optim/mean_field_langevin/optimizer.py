"""Mean-field Langevin dynamics as a torch optimizer, for any module whose parameters hold exchangeable particles."""

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .langevin import langevin_step_
from .manifolds import RENORMALISE_EVERY, Manifold, is_manifold


class MeanFieldLangevin(Optimizer):
    r"""Noisy gradient descent on particles, at the time scale of one particle.

    Mousavi-Hosseini, Wu and Erdogdu, "Learning Multi-Index Models with Neural Networks via Mean-Field Langevin Dynamics",
    ICLR 2025 (arXiv 2408.07254). With :math:`m` particles :math:`w_j` and a loss :math:`\hat J` that averages over them,

    .. math:: w_j \leftarrow w_j - \eta\,[m \nabla_{w_j} \hat J + \lambda w_j] + \sqrt{2\eta/\beta}\; \xi_j,
              \qquad \xi_j \sim N(0, I)

    or on a manifold, where drift and noise are projected onto the tangent space and the step follows the exponential map.
    This samples the minimiser of :math:`J(\mu) + \beta^{-1} H(\mu)`, so weight decay and noise are no afterthoughts: together
    they are the prior :math:`N(0, (\lambda\beta)^{-1} I)`.

    Args:
        params: Tensors of particles, named parameters or groups. A group may have options of its own, except `generator`.
        lr: :math:`\eta > 0`; a schedule may take it down to 0, where nothing moves.
        beta: Inverse temperature, > 0; infinity gives gradient descent.
        weight_decay: :math:`\lambda \ge 0`, inside the drift and not divided by the width; 0 on a manifold.
        particle_dim: The axis that counts particles. Its length is :math:`m`.
        scale_by_width: Multiply gradients by :math:`m`. False where the loss sums over particles.
        manifold: A `Manifold` for one particle, e.g. ``Sphere()`` or one of geoopt's: it sees the tensor with
            `particle_dim` moved to the front. Particles have to lie on it at the start.
        generator: Source of the noise. By default a private one, seeded once from torch's global generator.

    Shapes:
        - parameters: any, real, float32 or float64, with at least ``particle_dim + 1`` axes.

    Raises:
        ValueError: an argument out of its range; `weight_decay` on a manifold; particles off the manifold.
        RuntimeError: a gradient that is sparse or not finite; nothing has moved then.

    Warns:
        RuntimeWarning: a state dict from another kind of device, whose noise cannot be gone on with.

    The state of the generator is in ``state_dict()``: a run that is resumed draws what it would have drawn. Under data
    parallelism every rank has to draw the same noise: pass generators of one seed, or seed torch alike before this is made.

    Example:
        >>> W = torch.nn.Parameter(torch.zeros(500, 3))
        >>> optimizer = MeanFieldLangevin([W], lr=0.1, beta=4.0, weight_decay=1.0, generator=torch.Generator().manual_seed(0))
        >>> for _ in range(100):
        ...     W.grad = torch.zeros_like(W)  # no data: the prior N(0, 1/4), but for the step's size
        ...     optimizer.step()
        >>> round(W.std().item(), 1)
        0.5
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        beta: float,
        weight_decay: float = 0.0,
        particle_dim: int = 0,
        scale_by_width: bool = True,
        manifold: Manifold | None = None,
        generator: torch.Generator | None = None,
    ):
        defaults = {
            "lr": lr,
            "beta": beta,
            "weight_decay": weight_decay,
            "particle_dim": particle_dim,
            "scale_by_width": scale_by_width,
            "manifold": manifold,
        }
        check_group(defaults)
        super().__init__(params, defaults)
        if generator is None:
            device = self.param_groups[0]["params"][0].device
            generator = torch.Generator(device).manual_seed(int(torch.randint(2**62, ())))
        self.generator = generator

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every particle that has a gradient; `closure`, if given, re-evaluates the model."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            check_group(group, resting=True)  # a schedule may start or end at a rate of 0
        moving = [(group, p, p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for _, p, grad in moving:
            if grad.is_sparse:
                raise RuntimeError("MeanFieldLangevin takes dense gradients only")
            if not bool(torch.isfinite(grad.sum())):
                raise RuntimeError(f"the gradient of a parameter of shape {tuple(p.shape)} is not finite: try a smaller lr")
        for group, p, grad in moving:
            self._move(group, p, grad)
        return loss

    def _move(self, group: dict[str, Any], p: Tensor, grad: Tensor) -> None:
        axis, manifold, state = group["particle_dim"], group["manifold"], self.state[p]
        drift = grad * p.shape[axis] if group["scale_by_width"] else grad
        particles = p.movedim(axis, 0)
        langevin_step_(
            particles,
            drift.movedim(axis, 0),
            float(group["lr"]),
            group["beta"],
            weight_decay=group["weight_decay"],
            manifold=manifold,
            generator=self.generator,
        )
        state["step"] = state.get("step", 0) + 1
        if manifold is not None and state["step"] % RENORMALISE_EVERY == 0:
            particles.copy_(manifold.projx(particles))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for p in group["params"]:
            try:
                check_particles(p, group)
            except ValueError:
                del self.param_groups[-1]
                raise

    def state_dict(self) -> dict[str, Any]:
        """As in torch, and the generator's state under ``"noise"``. Manifolds are not saved: they come from the constructor."""
        saved = super().state_dict()
        groups = [{k: v for k, v in group.items() if k != "manifold"} for group in saved["param_groups"]]
        return {**saved, "param_groups": groups, "noise": self.generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        manifolds = [group["manifold"] for group in self.param_groups]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "noise"})
        for group, manifold in zip(self.param_groups, manifolds, strict=True):
            group["manifold"] = manifold
        if "noise" in state_dict:
            try:
                self.generator.set_state(state_dict["noise"].cpu())
            except RuntimeError:  # a CPU's state has another size than a GPU's
                warnings.warn(
                    f"the saved noise is not of a generator on {self.generator.device}: the optimizer keeps its own, so the "
                    "run goes on with other noise than it would have had",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "noise": (str(self.generator.device), self.generator.get_state())}

    def __setstate__(self, state: dict[str, Any]) -> None:  # copy.deepcopy and pickle: the copy goes on by itself
        noise = state.pop("noise", None)
        super().__setstate__(state)
        if noise is not None:
            self.generator = torch.Generator(noise[0])
            self.generator.set_state(noise[1])


def check_group(group: dict[str, Any], *, resting: bool = False) -> None:
    lr = float(group["lr"])
    if not (0 < lr < math.inf or (resting and lr == 0)):
        raise ValueError(f"lr must be positive and finite, got {group['lr']}")
    if not group["beta"] > 0:
        raise ValueError(f"beta must be > 0 (infinity for no noise), got {group['beta']}")
    if not 0 <= group["weight_decay"] < math.inf:
        raise ValueError(f"weight_decay must be finite and at least 0, got {group['weight_decay']}")
    if group.get("manifold") is not None:
        if not is_manifold(group["manifold"]):
            raise ValueError(f"manifold must have projx, proju and expmap, got {group['manifold']!r}")
        if group["weight_decay"] != 0:
            raise ValueError(f"weight_decay has no meaning on a manifold and must be 0 there, got {group['weight_decay']}")


def check_particles(p: Tensor, group: dict[str, Any]) -> None:
    if p.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"particles must be float32 or float64 (noise drowns in the rounding of less), got {p.dtype}")
    axis = group["particle_dim"]
    if not -p.ndim <= axis < p.ndim:
        raise ValueError(f"particle_dim must lie in [{-p.ndim}, {p.ndim}) for a parameter of {p.ndim} axes, got {axis}")
    if group["manifold"] is not None:
        with torch.no_grad():
            particles = p.detach().movedim(axis, 0)
            on = group["manifold"].projx(particles)
            off = float((on - particles).abs().max() / on.abs().max())
        if not off <= 1e-3:
            raise ValueError(
                f"particles must start on the manifold, one is {off:.2g} of their size off: set them to manifold.projx(p)"
            )
