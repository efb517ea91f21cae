r"""The two forms of the anchored pull, and the pieces in which a parameter meets its anchor.

With θ₀ = 0 and D = 1 both do, to the last bit, what `torch.optim` does for ordinary weight decay.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor

from .anchors import BLOCK, draw, draw_spread, normal_blocks, spread_blocks

Rate = float | Tensor
LOW_PRECISION = (torch.float16, torch.bfloat16)


@dataclass
class Anchor:
    """θ₀ and D of one parameter: a recipe, and the tensors themselves where they are kept.

    Attributes:
        key: The parameter's name, or its number in order of creation.
        seed: Of the anchor.
        std: σ₀; 0 for a parameter that keeps ordinary decay.
        spread: b of D = 1 + b·ε.
        dtype: Precision that θ₀ is rounded to; None: the parameter's.
        theta0: θ₀ where it is kept.
        D: D where it is kept.
    """

    key: str
    seed: int
    std: float
    spread: float = 0.0
    dtype: torch.dtype | None = None
    theta0: Tensor | None = None
    D: Tensor | None = None

    def make(self, p: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """θ₀ and D for `p`, in its shape and on its device; None for 0 and for 1."""
        shape, dtype = tuple(p.shape), self.dtype or p.dtype
        theta0 = self.theta0
        if theta0 is None and self.std:
            theta0 = _placed(draw(self.seed, self.key, shape, self.std).to(dtype), p)
        D = self.D
        if D is None and self.spread:
            D = _placed(draw_spread(self.seed, self.key, shape, self.spread), p)
        return theta0, D

    def keep(self, p: Tensor) -> None:
        """Makes θ₀ and D and holds on to them."""
        self.theta0, self.D = self.make(p)

    def pieces(self, w: Tensor, p: Tensor) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None]]:
        """``(w, θ₀, D)`` in parts small enough for the cache, where they are contiguous on the CPU; else whole.

        `w` is what is to be read or written: the (local part of the) parameter.
        """
        kept = (self.theta0 is not None or not self.std) and (self.D is not None or not self.spread)
        flat_alike = w.is_contiguous() and all(x is None or x.is_contiguous() for x in (self.theta0, self.D))
        if w.device.type != "cpu" or not flat_alike or not w.numel() or (kept and w.numel() <= BLOCK):
            theta0, D = self.make(p)
            yield w, None if theta0 is None else local(theta0), None if D is None else local(D)
            return
        flat = w.view(-1).split(BLOCK)
        if kept:
            parts = (repeat(None) if x is None else local(x).view(-1).split(BLOCK) for x in (self.theta0, self.D))
            yield from zip(flat, *parts, strict=False)
            return
        noise = normal_blocks(self.seed, self.key, w.numel()) if self.std else repeat(None)
        spreads = spread_blocks(self.seed, self.key, w.numel(), self.spread) if self.spread else repeat(None)
        for part, z, D in zip(flat, noise, spreads, strict=False):
            yield part, None if z is None else z.mul_(self.std).to(self.dtype or w.dtype), D


def local(x: Tensor) -> Tensor:
    """The shard that this rank holds of a DTensor; any other tensor as it is."""
    return x.to_local() if is_sharded(x) else x  # type: ignore[attr-defined]


def is_sharded(x: Tensor) -> bool:
    return hasattr(x, "device_mesh") and hasattr(x, "to_local")


def _placed(x: Tensor, p: Tensor) -> Tensor:
    """On the device of `p`, laid out like it in memory; of a sharded parameter each rank cuts out its own part."""
    if is_sharded(p):
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
        return distribute_tensor(x.to(mesh.device_type), mesh, placements, src_data_rank=None)
    return torch.empty_like(p, dtype=x.dtype, requires_grad=False).copy_(x)


def pull_all(held: Iterable[tuple[Tensor, Anchor]], rate: Rate) -> None:
    """`pull` for parameters with their anchors; kept anchors of ordinary size are worked on together."""
    together, others = _sorted(held)
    for p, anchor in others:
        for part in anchor.pieces(local(p), p):
            pull(*part, rate)
    if together:
        ws, anchors = [local(p) for p, _ in together], [local(x) for _, x in together]
        torch._foreach_mul_(ws, 1 - rate)
        _add_scaled_all(ws, anchors, rate)


def push_all(held: Iterable[tuple[Tensor, Anchor]], rate: Rate) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Gives each parameter a gradient of its own with `push` done to it; returns parameter, old and new gradient.

    Raises:
        RuntimeError: a gradient is sparse.
    """
    swapped: list[tuple[Tensor, Tensor, Tensor]] = []
    held = list(held)
    for p, _ in held:
        if p.grad is not None and p.grad.layout != torch.strided:
            raise RuntimeError(
                f"the decay cannot be added to a {p.grad.layout} gradient of a parameter of shape {tuple(p.shape)}; use dense "
                "gradients or give its group no weight_decay"
            )
    together, others = _sorted(held)
    for p, anchor in others:
        assert p.grad is not None
        grad = torch.empty_like(p, dtype=p.grad.dtype, requires_grad=False).copy_(p.grad)  # laid out like its parameter
        w, g, start = local(p.detach()), local(grad), 0
        for part, theta0, D in anchor.pieces(w, p):
            push(g if part.shape == w.shape else g.view(-1)[start : start + part.numel()], part, theta0, D, rate)
            start += part.numel()
        swapped.append((p, p.grad, grad))
    if together:
        grads = [p.grad.clone() for p, _ in together if p.grad is not None]
        local_grads = [local(g) for g in grads]
        _add_scaled_all(local_grads, [local(p.detach()) for p, _ in together], rate)
        _add_scaled_all(local_grads, [local(x) for _, x in together], -rate)
        swapped += [(p, p.grad, g) for (p, _), g in zip(together, grads, strict=True) if p.grad is not None]
    for p, _, grad in swapped:
        p.grad = grad
    return swapped


def _sorted(held: Iterable[tuple[Tensor, Anchor]]) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Anchor]]]:
    """Parameters with a kept θ₀ that need nothing special, and the others. On the CPU large ones go by cache-sized parts."""
    together, others = [], []
    for p, anchor in held:
        theta0 = anchor.theta0
        plain = theta0 is not None and not anchor.spread and p.dtype == theta0.dtype and p.dtype not in LOW_PRECISION
        if plain and theta0 is not None and (p.device.type != "cpu" or p.numel() <= BLOCK):
            together.append((p, theta0))
        else:
            others.append((p, anchor))
    return together, others


def _add_scaled_all(xs: list[Tensor], ys: list[Tensor], rate: Rate) -> None:
    if isinstance(rate, Tensor):
        torch._foreach_add_(xs, torch._foreach_mul(ys, rate))
    else:
        torch._foreach_add_(xs, ys, alpha=rate)


def pull(w: Tensor, theta0: Tensor | None, D: Tensor | None, rate: Rate) -> None:
    """w ← w - rate·D∘(w - θ₀), in place; low precision is rounded once."""
    if w.dtype in LOW_PRECISION:
        exact = w.float()
        pull(exact, theta0, D, rate)
        w.copy_(exact)
    elif D is None:
        w.mul_(1 - rate)
        if theta0 is not None:
            _add_scaled(w, theta0, rate)
    else:
        _add_scaled(w, (w if theta0 is None else w - theta0) * D, -rate)


def push(grad: Tensor, w: Tensor, theta0: Tensor | None, D: Tensor | None, rate: Rate) -> None:
    """grad ← grad + rate·D∘(w - θ₀), in place: the gradient of rate/2·‖w - θ₀‖² added."""
    if D is not None:
        _add_scaled(grad, (w if theta0 is None else w - theta0) * D, rate)
        return
    _add_scaled(grad, w, rate)
    if theta0 is not None:
        _add_scaled(grad, theta0, -rate)


def _add_scaled(x: Tensor, y: Tensor, rate: Rate) -> None:
    if isinstance(rate, Tensor):  # a learning rate held in a tensor must not be read: it may be captured in a graph
        x.add_(y * rate.to(y.dtype))
    else:
        x.add_(y, alpha=rate)
