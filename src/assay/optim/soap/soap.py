"""SOAP as a `torch.optim.Optimizer`."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from . import eigenbasis
from .bucket import Bucket, check_entry
from .gradients import finite_gradients, stacked_gradients, state_dtype
from .group import Group, apply_directions, check_group, shampoo_beta, sign, sorted_by_kind, without_autocast
from .layout import DataFormat, Layout


class SOAP(Optimizer):
    r"""Adam in the slowly changing eigenbasis of Shampoo's preconditioner.

    From *SOAP: Improving and Stabilizing Shampoo using Adam* (Vyas et al., ICLR 2025). For a matrix with gradient
    :math:`G` and bases :math:`Q_L, Q_R`,

    .. math::
        \hat G &= Q_L^\top G\, Q_R, \qquad
        \hat M \leftarrow \beta_1 \hat M + (1-\beta_1)\hat G, \qquad
        \hat V \leftarrow \beta_2 \hat V + (1-\beta_2)\hat G \odot \hat G \\
        \theta &\leftarrow \Big(\theta - \mathrm{lr}\tfrac{\sqrt{1-\beta_2^t}}{1-\beta_1^t}\;
            Q_L \frac{\hat M}{\sqrt{\hat V} + \epsilon} Q_R^\top\Big)(1 - \mathrm{lr}\cdot\mathrm{weight\_decay}) \\
        L &\leftarrow \beta_s L + (1-\beta_s) G G^\top, \qquad R \leftarrow \beta_s R + (1-\beta_s) G^\top G

    and every `precondition_frequency` steps :math:`Q \leftarrow \mathrm{QR}(L Q)`, with the columns sorted by eigenvalue.
    Tensors with more axes get one factor an axis; 1-D parameters and axes that are too long are left to plain Adam. The
    first call for a parameter only measures its basis and does not move it.

    Args:
        params: Parameters, named parameters or parameter groups.
        lr: Learning rate, ≥ 0. The default suits large batches; tiny batches want less.
        betas: Decay of the first and of the second moment, each in [0, 1).
        eps: Added to the square root of the second moment, > 0.
        weight_decay: Decoupled decay, ≥ 0, applied after the step.
        shampoo_beta: Decay of the factors, in [0, 1); negative: the second of `betas`.
        precondition_frequency: Steps between two refreshes of the basis, an integer ≥ 1. Can be scheduled.
        max_precond_dim: Longest axis that gets a factor, ≥ 1. Keep it below a vocabulary's size.
        merge_dims: First multiply neighbouring axes while the product stays within `max_precond_dim`. With the default
            limit this makes one axis of a whole small matrix.
        precondition_1d: Give 1-D parameters a factor too.
        normalize_grads: Scale every update to unit RMS; helps at frequencies near 100, hurts near 10.
        correct_bias: Adam's bias correction.
        data_format: ``"channels_last"`` moves the last axis of 4-D parameters to second place before merging.
        one_sided: Keep only the factor of the shortest axis that is longer than 1 (the first of equals).
        factorized: Keep the second moment of tensors with two axes as row and column averages (Adafactor's).
        maximize: Ascend instead of descend.
        foreach: ``False`` works parameter by parameter; otherwise parameters of equal shape are stacked and share one
            batched product, which takes temporary memory of one stack.
        error_if_nonfinite: Raise on a gradient that is not finite. Otherwise its parameter sits that step out, its state
            untouched, and a warning says so once.

    Shapes:
        - parameters: any shape, real floating dtype; gradients dense and of the same shape.
        - state: `exp_avg` and `exp_avg_sq` (rotated) in the parameter's shape, or `exp_avg_sq_row` ``(m,)`` and
          `exp_avg_sq_column` ``(n,)``; `factors` and `bases`, lists with ``(d, d)`` or None an axis after merging. All
          of it is float32, or float64 for float64 parameters, also after ``load_state_dict``.

    Raises:
        ValueError: an argument out of its range, a parameter that is complex or not floating.
        RuntimeError: a sparse gradient; a non-finite one under `error_if_nonfinite`; an option that shapes the state
            changed after the state exists.

    Example:
        >>> layer = torch.nn.Linear(4, 3)
        >>> optimizer = SOAP(layer.parameters(), lr=3e-3)
        >>> layer(torch.ones(2, 4)).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
        >>> [tuple(Q.shape) for Q in optimizer.basis(layer.weight)]
        [(3, 3), (4, 4)]
    """

    _advance: Callable[..., Tensor] = staticmethod(eigenbasis.advance)
    _warned = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        shampoo_beta: float = -1.0,
        precondition_frequency: int = 10,
        max_precond_dim: int = 10000,
        merge_dims: bool = False,
        precondition_1d: bool = False,
        normalize_grads: bool = False,
        correct_bias: bool = True,
        data_format: DataFormat = "channels_first",
        one_sided: bool = False,
        factorized: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        error_if_nonfinite: bool = False,
    ):
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "shampoo_beta": shampoo_beta,
            "precondition_frequency": precondition_frequency,
            "max_precond_dim": max_precond_dim,
            "merge_dims": merge_dims,
            "precondition_1d": precondition_1d,
            "normalize_grads": normalize_grads,
            "correct_bias": correct_bias,
            "data_format": data_format,
            "one_sided": one_sided,
            "factorized": factorized,
            "maximize": maximize,
            "foreach": foreach,
            "error_if_nonfinite": error_if_nonfinite,
        }
        check_group(defaults)
        self._forget_buckets()
        super().__init__(params, defaults)

    # -- torch.optim.Optimizer ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimization step; `closure`, if given, re-evaluates the model with gradients enabled."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            check_group(group)
        usable = self._usable_parameters()  # looks at every gradient and option before any parameter moves
        with without_autocast(usable):
            for group, params in zip(self.param_groups, usable, strict=True):
                for (layout, *_, t), members in sorted_by_kind(group, params, self.state).items():
                    if layout.plain:
                        self._step_plain(group, layout, members, t)
                    else:
                        self._step_bucket(group, layout, members, t)
        return loss

    def add_param_group(self, param_group: Group) -> None:
        check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if p.is_complex() or not p.is_floating_point():
                del self.param_groups[-1]
                raise ValueError(f"SOAP optimizes real floating-point parameters, got {p.dtype} of shape {tuple(p.shape)}")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but state stays float32 or float64: torch's own casts it all to the parameter's dtype."""
        loaded: dict[str, Any] = {}

        def capture(_: Optimizer, saved: dict[str, Any]) -> None:
            loaded.update(saved)

        def restore(_: Optimizer) -> None:
            ids = (i for group in loaded["param_groups"] for i in group["params"])
            for i, p in zip(ids, (p for group in self.param_groups for p in group["params"]), strict=True):
                if i in loaded["state"]:
                    self.state[p] = {name: _moved(value, p) for name, value in loaded["state"][i].items()}
            self._forget_buckets()

        before = self.register_load_state_dict_pre_hook(capture)  # the last pre-hook: it sees what the user's hooks made
        after = self.register_load_state_dict_post_hook(restore, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:  # copy.deepcopy and pickle bring the state, never the stacks
        super().__setstate__(state)
        self._forget_buckets()

    # -- inspection -----------------------------------------------------------------------------------------------------

    def basis(self, p: Tensor) -> list[Tensor | None]:
        """The eigenbasis of every axis of `p` after merging, ``(d, d)``; None where it is the identity."""
        if p not in self.state:
            raise ValueError("this parameter has no basis yet: it is measured on the first step that gives it a gradient")
        return list(self.state[p]["bases"])

    def state_bytes(self) -> dict[str, int]:
        """Memory held beyond the weights: ``moments``, ``factors`` and ``bases``."""
        total = dict.fromkeys(("moments", "factors", "bases"), 0)
        for state in self.state.values():
            for name, value in state.items():
                tensors = value if isinstance(value, list) else [value]
                kind = name if name in total else "moments"
                total[kind] += sum(x.numel() * x.element_size() for x in tensors if isinstance(x, Tensor))
        return total

    def compile(self, **kwargs: Any) -> None:
        """Compiles the work between refreshes with ``torch.compile(fullgraph=True, **kwargs)``; the refresh stays eager.

        Each kind of stack (shape, factored axes) is compiled once. A network with more than eight kinds needs
        ``torch._dynamo.config.recompile_limit`` raised to their number. A copy of the optimizer is not compiled.
        """
        self._advance = torch.compile(eigenbasis.advance, fullgraph=True, **kwargs)

    # -- the step -------------------------------------------------------------------------------------------------------

    def _step_bucket(self, group: Group, layout: Layout, params: list[Tensor], t: int | None) -> None:
        states = [self.state[p] for p in params]
        if t is None:
            bucket = Bucket.begin(layout, params, shampoo_beta(group), sign(group))
            self._keep(bucket, states)
        else:
            bucket = self._bucket(layout, params, states)
            for part in bucket.chunks():
                apply_directions(group, part.params, self._direction(part, group), t + 1)
            if (t + 1) % group["precondition_frequency"] == 0:
                self._refresh(bucket)
        for state in states:
            state["step"] = 0 if t is None else t + 1

    def _direction(self, part: Bucket, group: Group) -> list[Tensor]:
        """Folds the gradients into the state and returns the update's direction for each parameter."""
        grad = stacked_gradients(part.layout, part.params, sign(group))
        N = self._advance(
            grad,
            part.moments["exp_avg"],
            part.second,
            part.factors,
            part.bases,
            *group["betas"],
            shampoo_beta(group),
            group["eps"],
        )
        return list(part.layout.unfold(N.contiguous()))

    def _refresh(self, bucket: Bucket) -> None:
        bucket.refresh()

    def _step_plain(self, group: Group, layout: Layout, params: list[Tensor], t: int | None) -> None:
        """Adam for parameters without a basis. Its first call is skipped too, so that all parameters keep one count."""
        states = [self.state[p] for p in params]
        for p, state in zip(params, states, strict=True):
            if t is None:
                empty = torch.zeros_like(p, dtype=state_dtype(p))
                none: list[Tensor | None] = [None] * len(layout.dims)
                state.update(exp_avg=empty, exp_avg_sq=empty.clone(), factors=none, bases=list(none))
            check_entry(layout, state)
            state["step"] = 0 if t is None else t + 1
        if t is None:
            return
        beta1, beta2 = group["betas"]
        grads = [sign(group) * p.grad.to(state_dtype(p)) if p.grad is not None else p for p in params]
        first, second = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, value=1 - beta2)
        roots = torch._foreach_sqrt(second)
        torch._foreach_add_(roots, group["eps"])
        apply_directions(group, params, list(torch._foreach_div(first, roots)), t + 1)

    # -- stacks ---------------------------------------------------------------------------------------------------------

    def _forget_buckets(self) -> None:
        self._buckets: dict[tuple[int, ...], Bucket] = {}

    def _bucket(self, layout: Layout, params: list[Tensor], states: list[Any]) -> Bucket:
        bucket = self._buckets.get(tuple(map(id, params)))
        if bucket is None or bucket.layout != layout or not bucket.current(states):
            bucket = Bucket.gather(layout, params, states)
            self._keep(bucket, states)
        return bucket

    def _keep(self, bucket: Bucket, states: list[Any]) -> None:
        """Publishes a new stack; stacks that share a parameter with it (gradients came and went) are dissolved."""
        ids = set(map(id, bucket.params))
        for key, old in list(self._buckets.items()):
            if not ids.isdisjoint(key):
                for i, p in enumerate(old.params):
                    if id(p) not in ids and p in self.state:  # a parameter may have been dropped, or its state reset
                        old.release(i, self.state[p])
                del self._buckets[key]
        bucket.publish(states)
        self._buckets[tuple(map(id, bucket.params))] = bucket

    def _usable_parameters(self) -> list[list[Tensor]]:
        """Each group's parameters that have a finite gradient."""
        usable, refused = finite_gradients(self.param_groups)
        if refused:
            number, p = refused[0]
            message = (
                f"{len(refused)} gradients are not finite, or so large that their squares are not; "
                f"the first belongs to a parameter of shape {tuple(p.shape)} in group {number}"
            )
            if any(self.param_groups[n]["error_if_nonfinite"] for n, _ in refused):
                raise RuntimeError(message)
            if not self._warned:
                warnings.warn(f"{message}. These parameters sit the step out; this is said once.", RuntimeWarning, stacklevel=5)
                self._warned = True
        return usable


def _moved(value: Any, p: Tensor) -> Any:
    """A copy on the parameter's device in the dtype of its state, for tensors and lists of tensors and None."""
    if isinstance(value, Tensor):
        return value.to(p.device, state_dtype(p) if value.is_floating_point() else value.dtype, copy=True)
    return [_moved(v, p) for v in value] if isinstance(value, list) else value
