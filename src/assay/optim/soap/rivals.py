"""What the study sets beside SOAP: Shampoo, and SOAP with one of its ideas taken out."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from . import eigenbasis
from .bucket import Bucket
from .gradients import stacked_gradients
from .group import Group, sign
from .soap import SOAP


class Shampoo(Optimizer):
    r"""Shampoo on matrices, Adam on the rest: the reference that the paper compares with.

    The factors are SOAP's moving averages. Their roots :math:`L^{-p}, R^{-p}` come from ``eigh`` at the first step and
    then every `precondition_frequency` steps, with :math:`10^{-8}\lambda_{\max}` added to the eigenvalues; the momentum
    is preconditioned to :math:`L^{-p} M R^{-p}` and given the length of Adam's update. Decay is decoupled.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        betas: Decay of momentum, and of Adam's second moment and the factors.
        eps: Adam's.
        weight_decay: Decoupled decay.
        exponent: p: 1/4 is Shampoo's own, 1/2 the power that the paper's Claim 1 is about.
        precondition_frequency: Steps between two computations of the roots.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        exponent: float = 0.25,
        precondition_frequency: int = 10,
    ):
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "exponent": exponent, "precondition_frequency": precondition_frequency})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[tuple(p.shape)].append(p)
            for params in by_shape.values():
                self._step_stack(group, params)
        return loss

    def _step_stack(self, group: Group, params: list[Tensor]) -> None:
        """One step of ``k`` equal-shaped parameters. Their state lies, stacked, with the first of them."""
        (beta1, beta2), lr, state = group["betas"], group["lr"], self.state[params[0]]
        G = torch.stack([p.grad for p in params if p.grad is not None])
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(G), exp_avg_sq=torch.zeros_like(G))
            if G.ndim == 3:
                state.update(factors=[G.new_zeros(len(G), d, d) for d in G.shape[1:]], roots=[])
        state["step"] += 1
        M, V, t = state["exp_avg"].lerp_(G, 1 - beta1), state["exp_avg_sq"].lerp_(G.square(), 1 - beta2), state["step"]
        update = (M / (1 - beta1**t)) / ((V / (1 - beta2**t)).sqrt() + group["eps"])
        if G.ndim == 3:
            for axis, S in enumerate(state["factors"]):
                eigenbasis.add_gram(S, eigenbasis.unfolded(G, axis), beta2)
            if not state["roots"] or t % group["precondition_frequency"] == 0:
                state["roots"] = [inverse_root(S, group["exponent"]) for S in state["factors"]]
            left, right = state["roots"]
            direction = left @ M @ right
            length = torch.linalg.matrix_norm(direction, keepdim=True).clamp_min(torch.finfo(G.dtype).tiny)
            update = direction * (torch.linalg.matrix_norm(update, keepdim=True) / length)
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_add_(params, list(update.unbind()), alpha=-lr)


def inverse_root(S: Tensor, exponent: float) -> Tensor:
    """``S^-exponent`` of symmetric positive semi-definite matrices ``(k, d, d)``."""
    eigenvalues, Q = torch.linalg.eigh(S)
    floor = 1e-8 * eigenvalues[:, -1:]
    powers = (eigenvalues.clamp_min(0) + floor).clamp_min(torch.finfo(S.dtype).tiny).pow(-exponent)
    return (Q * powers[:, None, :]) @ Q.mT


class FrozenSecondMoment(SOAP):
    """SOAP whose denominator is the second moment of the last refresh; until the first one it is live, as in SOAP.

    The second moment itself goes on tracking: what is taken away is only its use between refreshes, the difference that
    the paper names between SOAP and Shampoo's stale preconditioner.
    """

    def _direction(self, part: Bucket, group: Group) -> list[Tensor]:
        frozen = [self.state[p].get("frozen") for p in part.params]
        if frozen[0] is None:
            return super()._direction(part, group)
        M = part.moments["exp_avg"].clone()
        rotated = eigenbasis.rotate(stacked_gradients(part.layout, part.params, sign(group)), part.bases)
        super()._direction(part, group)  # moments and factors advance as ever; its direction is not used
        M.lerp_(rotated, 1 - group["betas"][0])
        N = eigenbasis.rotate_back(M / (torch.stack(frozen).sqrt() + group["eps"]), part.bases)
        return list(part.layout.unfold(N.contiguous()))

    def _refresh(self, bucket: Bucket) -> None:
        super()._refresh(bucket)
        for p, V in zip(bucket.params, bucket.second[0], strict=True):
            self.state[p]["frozen"] = V.clone()  # permuted with the basis, like the second moment it was


class UnsortedSecondMoment(SOAP):
    """SOAP whose second moment stays where it is when a refresh sorts the columns of the basis."""

    def _refresh(self, bucket: Bucket) -> None:
        before = [x.clone() for x in bucket.second]
        super()._refresh(bucket)
        for x, old in zip(bucket.second, before, strict=True):
            x.copy_(old)
