"""Syre around any `torch.optim.Optimizer`: its weight decay pulls towards a frozen random point instead of 0."""

import math
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from .anchors import Scale, anchor_std, check_parameter, check_patterns, check_sigma
from .convention import convention
from .groups import DECAY, check_groups, decays, give_decay_back, keys_of, look, parameters_of, steps_taken, take_decay
from .pull import LOW_PRECISION, Anchor, is_sharded, local, pull_all, push_all
from .state import load_anchors, saved_anchors


class Syre:
    r"""Turns an optimizer's weight decay into a decay towards a frozen random point, which removes the loss's symmetries.

    From *Remove Symmetries to Control Model Expressivity and Improve Optimization* (Ziyin, Xu, Chuang; ICLR 2025). With the
    weights in use :math:`w = \theta + \theta_0` and :math:`\lambda` the group's ``weight_decay`` :math:`(\gamma = \lambda/2)`,

    .. math::
        \ell_r(w) = \mathbb E\,\ell(w, x) + \gamma \sum_i D_i\,(w_i - \theta_{0,i})^2, \qquad
        \theta_0 \sim \mathcal N(0, \sigma_0^2), \quad \sigma_0 = c/\sqrt d, \quad D_i = 1 + b\,\epsilon_i

    θ₀ and D are drawn once. Where the optimizer adds its decay to the gradient (SGD, Adam) so does this:
    :math:`g \leftarrow g + \lambda D\circ(w-\theta_0)`; where it shrinks the weights (AdamW, Muon, SOAP) this does so in the
    same place: :math:`w \leftarrow w - \mathrm{lr}\,\lambda D\circ(w-\theta_0)`. The network is deployed with w as it is.

    Args:
        optimizer: Any optimizer with step hooks. It is changed in place: each group's ``weight_decay`` becomes 0 and is kept
            as ``group["syre_weight_decay"]``. Groups without decay stay without.
        sigma: c, > 0. The published 0.01 shows only after about 1/(lr·λ) steps; 1 acts at once.
        scale: ``"fan_in"``: :math:`\sigma_0 = c/\sqrt d` for every tensor; ``"absolute"``: :math:`\sigma_0 = c`.
        d_spread: b, in [0, 1), with ε uniform on (-1, 1): needed against rotations only; at most a tenth of σ₀ is usual.
        seed: Of the anchors. They use no global generator. Where a model has several optimizers without names, give each
            its own: parameters of the same number would else share their draws.
        coupled: Whether the decay is added to the gradient; None: as the optimizer does it.
        weight_decay: λ in place of the groups' own, > 0; applies to the groups that decay, or to all where none does.
        store: ``"seed"``: anchors are drawn anew at each step and take no memory; ``"tensor"``: they are kept, which is
            faster and what accelerators, CUDA graphs and sharded parameters need. Same numbers.
        add_to_init: Add θ₀ to the weights now, so that θ keeps its usual initialisation. Pass False for pretrained weights.
        exclude: Parameters, or patterns of their names (``"*.norm.*"``), that keep ordinary decay towards 0. An optimizer
            knows names if it was built from ``model.named_parameters()``.
        decay_last: Whether an optimizer that shrinks the weights does so after its update; None: for SOAP only.
        anchor_dtype: Precision θ₀ is rounded to; None: each parameter's. bfloat16 halves the memory of kept anchors.

    Shapes:
        - parameters: any shape, dense, real floating-point; anchors have the same.

    Raises:
        TypeError: `optimizer` has no step hooks.
        ValueError: an argument out of its range; no group decays (a shift alone removes no symmetry); an optimizer that is
            wrapped already, or holds no parameters; a parameter that is sparse or not floating-point; an optimizer whose
            way of decaying is unknown; a pattern that matches no name; sharded parameters under ``store="seed"``.
        RuntimeError: at a step: a sparse gradient, or a group that was given its own ``weight_decay`` again.

    Example:
        >>> layer = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, weight_decay=0.05)
        >>> syre = Syre(optimizer, sigma=0.01)
        >>> layer(torch.ones(2, 4)).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
        >>> syre.anchor(layer.weight).shape
        torch.Size([3, 4])
    """

    def __init__(
        self,
        optimizer: Optimizer,
        sigma: float = 0.01,
        scale: Scale = "fan_in",
        d_spread: float = 0.0,
        seed: int = 0,
        coupled: bool | None = None,
        weight_decay: float | None = None,
        store: Literal["seed", "tensor"] = "seed",
        add_to_init: bool = True,
        exclude: Iterable[Tensor | str] = (),
        *,
        decay_last: bool | None = None,
        anchor_dtype: torch.dtype | None = None,
    ):
        if not hasattr(optimizer, "register_step_pre_hook"):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        check_sigma(sigma, scale)
        if not 0 <= d_spread < 1:
            raise ValueError(f"d_spread must lie in [0, 1), got {d_spread!r}")
        if store not in ("seed", "tensor"):
            raise ValueError(f"store must be 'seed' or 'tensor', got {store!r}")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ValueError(f"seed must be an integer, got {seed!r}")
        if anchor_dtype is not None and not anchor_dtype.is_floating_point:
            raise ValueError(f"anchor_dtype must be floating-point, got {anchor_dtype}")
        if weight_decay is not None and not 0 < weight_decay < math.inf:
            raise ValueError(
                f"weight_decay must be positive and finite, got {weight_decay!r}; without decay a shift removes no symmetry"
            )
        self.optimizer = optimizer
        self.sigma, self.scale, self.d_spread, self.seed = float(sigma), scale, float(d_spread), seed
        self.coupled, self.decay_last, self.weight_decay = coupled, decay_last, weight_decay
        self.store, self.anchor_dtype = store, anchor_dtype
        exclude = [exclude] if isinstance(exclude, Tensor | str) else list(exclude)
        self._patterns = tuple(e for e in exclude if isinstance(e, str))
        self._excluded = [e for e in exclude if isinstance(e, Tensor)]
        self._keys: dict[Tensor, str] = {}
        self._anchors: dict[Tensor, Anchor] = {}
        self._seen: tuple[Any, ...] = ()
        self._swapped: list[tuple[Tensor, Tensor, Tensor]] = []
        self._due: list[tuple[Any, Tensor, int | None]] = []

        self._check_optimizer()
        self._everything_decays = not decays(optimizer)
        self.adopt(add_to_init=add_to_init)
        self._hook()

    def _check_optimizer(self) -> None:
        """Everything that can be wrong with the optimizer, before anything is changed."""
        hooks = self.optimizer._optimizer_step_pre_hooks.values()
        if any(isinstance(getattr(hook, "__self__", None), Syre) for hook in hooks):
            raise ValueError("this optimizer is wrapped already; call remove() on its Syre first")
        check_groups(self.optimizer)
        for group in self.optimizer.param_groups:
            convention(self.optimizer, group, self.coupled, self.decay_last)
            for p in group["params"]:
                self._check_parameter(p)
        if self.weight_decay is None and not decays(self.optimizer):
            raise ValueError(
                "weight_decay is 0 in every group: a shift of the weights without decay removes no symmetry (Proposition 1). "
                "Give the optimizer a weight_decay, or pass one here"
            )
        named = any("param_names" in group for group in self.optimizer.param_groups)
        advice = "" if named else "it knows parameters by number only: build the optimizer from model.named_parameters()"
        check_patterns(self._patterns, keys_of(self.optimizer, {}).values(), advice)

    def _check_parameter(self, p: Tensor) -> None:
        check_parameter(local(p))
        if is_sharded(p) and self.store == "seed":
            raise ValueError('sharded parameters (DTensor, FSDP2) need store="tensor": a seed makes whole anchors only')

    # -- groups and anchors ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def adopt(self, add_to_init: bool = False) -> None:
        """Takes over parameters and groups that the optimizer was given since. Each step does this too.

        Args:
            add_to_init: Add the new anchors to their parameters' values, as the constructor does.
        """
        if look(self.optimizer) == self._seen and not add_to_init:
            return
        take_decay(self.optimizer, self.weight_decay, self._everything_decays)
        self._keys = keys_of(self.optimizer, self._keys)
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if group[DECAY] and p not in self._anchors:
                    self._check_parameter(p)
                    anchor = self._anchors[p] = self._new_anchor(p, self._keys[p])
                    if add_to_init and p.requires_grad:
                        for w, theta0, _ in anchor.pieces(local(p.detach()), p):
                            if theta0 is not None:
                                w.add_(theta0)
        self._seen = look(self.optimizer, taken=True)

    def _new_anchor(self, p: Tensor, key: str) -> Anchor:
        kept_plain = any(p is e for e in self._excluded) or any(fnmatchcase(key, pattern) for pattern in self._patterns)
        std = 0.0 if kept_plain else anchor_std(tuple(p.shape), self.sigma, self.scale)
        anchor = Anchor(key, self.seed, std, 0.0 if kept_plain else self.d_spread, self.anchor_dtype)
        if self.store == "tensor":
            anchor.keep(p.detach())
        return anchor

    def anchor(self, p: Tensor) -> Tensor:
        """θ₀ of a parameter, in its shape and on its device; zeros for one that was excluded."""
        if p not in self._anchors:
            raise ValueError(f"no anchor for this parameter of shape {tuple(p.shape)}: it is in no group that decays")
        theta0, _ = self._anchors[p].make(p.detach())
        return torch.zeros_like(p, requires_grad=False) if theta0 is None else theta0.clone()

    def spread(self, p: Tensor) -> Tensor:
        """D of a parameter, in its shape and on its device; ones without `d_spread`."""
        self.anchor(p)
        _, D = self._anchors[p].make(p.detach())
        return torch.ones_like(p, requires_grad=False) if D is None else D.clone()

    # -- the step -------------------------------------------------------------------------------------------------------

    def _hook(self) -> None:
        self._handles = [
            self.optimizer.register_step_pre_hook(self._before),
            self.optimizer.register_step_post_hook(self._after),
        ]

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.adopt()
        self._swapped.clear()  # left over where a step has raised
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._with_gradients(shrink=True)
            return None
        if len(args) > 1:
            return (args[0], self._around(closure), *args[2:]), kwargs
        return args, {**kwargs, "closure": self._around(closure)}

    def _around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, followed at each call by the part of the decay that needs its gradients."""
        calls = 0

        def anchored() -> Any:
            nonlocal calls
            self._give_back()
            with torch.enable_grad():
                loss = closure()
            with torch.no_grad():
                self._with_gradients(shrink=calls == 0)
                calls += 1
                if isinstance(self.optimizer, torch.optim.LBFGS):  # its line search compares losses
                    loss = loss + self.penalty()
            return loss

        return anchored

    def _with_gradients(self, shrink: bool) -> None:
        """Does what comes before the update: adds to gradients, or shrinks (once a step) the distance to the anchors."""
        self._due.clear()
        skipped, grad_scale = (getattr(self.optimizer, name, None) for name in ("found_inf", "grad_scale"))
        for group in self.optimizer.param_groups:
            held = [(p, self._anchors[p]) for p in group["params"] if p.grad is not None and p in self._anchors]
            if not group[DECAY] or not held:
                continue
            kind = convention(self.optimizer, group, self.coupled, self.decay_last)
            if kind.coupled:
                # A fused optimizer under GradScaler divides by the scale itself: the addition has to be scaled as well
                rate = group[DECAY] * (-1 if group.get("maximize") else 1)
                self._swapped += push_all(held, rate if grad_scale is None else grad_scale * rate)
            elif kind.last:
                self._due += [(kind.rate(group), p, steps_taken(self.optimizer, p)) for p, _ in held]
            elif shrink:
                rate = kind.rate(group)
                pull_all(held, rate if skipped is None else (1 - skipped) * rate)  # …and skips a step itself, too

    def _give_back(self) -> None:
        """Puts the user's own gradients back in place of those that the decay was added to."""
        for p, raw, grad in self._swapped:
            if p.grad is grad:
                p.grad = raw
        self._swapped.clear()

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._give_back()
        for rate, p, before in self._due:
            now = steps_taken(optimizer, p)
            if now is None or now != before:  # an optimizer that counts and did not count has left this one alone
                pull_all([(p, self._anchors[p])], rate)
        self._due.clear()

    @torch.no_grad()
    def penalty(self) -> Tensor:
        """γ·Σ D (w - θ₀)² over all anchored parameters, for logging; its gradient is what a coupled step adds."""
        total = torch.zeros(())
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if group[DECAY] and p in self._anchors:
                    for w, theta0, D in self._anchors[p].pieces(local(p.detach()), p):
                        exact = w.float() if w.dtype in LOW_PRECISION else w
                        square = (exact if theta0 is None else exact - theta0).square()
                        term = 0.5 * group[DECAY] * (square if D is None else square * D).sum()
                        total = total.to(term.device) + term  # parts of a model may lie on several devices
        return total

    # -- state ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Settings, and for each parameter in the optimizer's order its key, seed and σ₀, with θ₀ and D where kept.

        Weight decay is saved by the optimizer's own ``state_dict``, in its groups.
        """
        self.adopt()
        entries = saved_anchors(parameters_of(self.optimizer), self._keys, self._anchors)
        return {"sigma": self.sigma, "scale": self.scale, "d_spread": self.d_spread, "seed": self.seed, "params": entries}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over saved anchors; parameters are matched by name where both sides have names, else by their order.

        It does not touch the weights: load the model's and the optimizer's states as well, after building this.

        Raises:
            ValueError: the number of parameters or a shape differs.
        """
        self.adopt()
        params = parameters_of(self.optimizer)
        keys, anchors = load_anchors(state_dict["params"], params, self._keys, self.store == "tensor", self.anchor_dtype)
        self._keys.update(keys)
        self._anchors, self._seen = anchors, ()  # a parameter that the state has no anchor for is adopted at the next step
        self.sigma, self.scale = state_dict["sigma"], state_dict["scale"]
        self.d_spread, self.seed = state_dict["d_spread"], state_dict["seed"]

    def remove(self) -> None:
        """Unhooks, and gives the groups their ``weight_decay`` back. The weights stay as they are."""
        for handle in self._handles:
            handle.remove()
        give_decay_back(self.optimizer)

    def __getstate__(self) -> dict[str, Any]:
        return {**{name: value for name, value in self.__dict__.items() if name != "_handles"}, "_swapped": [], "_due": []}

    def __setstate__(self, state: dict[str, Any]) -> None:  # an optimizer's copy has no hooks
        self.__dict__.update(state)
        self._hook()

    def __repr__(self) -> str:
        return (
            f"Syre({type(self.optimizer).__name__}, sigma={self.sigma:g}, scale={self.scale!r}, d_spread={self.d_spread:g}, "
            f"seed={self.seed}, store={self.store!r}, anchors={len(self._anchors)})"
        )
