"""How the reference follows the policy: one in-place pass over the weights every few optimiser steps."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from .lora import average_product

LOW_PRECISION = (torch.bfloat16, torch.float16)
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")


class ReferenceUpdater:
    """Moves a reference model towards the policy that is being trained, every ``every`` optimiser steps.

    "Learn Your Reference Model for Real Good Alignment", ICLR 2025, arXiv 2404.09656.

    After optimiser step t with ``t mod every == 0``: ``θ_ref ← α θ + (1−α) θ_ref`` (soft) or ``θ_ref ← θ`` (hard, with the
    buffers). The reference is frozen and put into evaluation mode. Works with any training loop.

    Args:
        policy: The model being trained, or its tensors by name.
        reference: The model that follows, or its tensors by the same names.
        mode: ``"soft"`` or ``"hard"``. Default soft.
        alpha: Share of the policy in a soft update, in (0, 1). Default 0.6; hard does not use it.
        every: Optimiser steps between updates (τ), at least 1. Default 512: about an eighth of the run is a good start.
        start_step: No update before this step. Default 0.
        kl_budget: Nats. If given, an update that is due happens only if the ``drift`` handed to `step` exceeds it.
        master_dtype: A reference of lower precision gets a copy in this type that is what is averaged; without one (None) a
            bf16 reference loses every movement below about 0.3 % of a weight. Costs 4 bytes a weight then.
        low_rank: Pairs of names ``(A, B)`` of LoRA factors whose product ``B A`` is averaged, not the factors.
        check_finite: Look at the policy's weights before an update, which takes it half as long again.

    Shapes:
        Tensors of one name have the same shape; with FSDP both must be sharded alike, each process updates its shards.

    Raises:
        ValueError: an argument out of range; policy and reference share a tensor, or differ in names or shapes.
        FloatingPointError: at an update, weights of the policy that are not finite. The reference is left as it was.

    Example:
        >>> policy, reference = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        >>> updater = ReferenceUpdater(policy, reference, mode="hard", every=2)
        >>> updater.step(), updater.step(), torch.equal(policy.weight, reference.weight)
        (False, True, True)
    """

    def __init__(
        self,
        policy: nn.Module | Mapping[str, Tensor],
        reference: nn.Module | Mapping[str, Tensor],
        mode: str = "soft",
        alpha: float = 0.6,
        every: int = 512,
        start_step: int = 0,
        kl_budget: float | None = None,
        master_dtype: torch.dtype | None = torch.float32,
        low_rank: Sequence[tuple[str, str]] = (),
        check_finite: bool = True,
    ):
        check_schedule(mode=mode, alpha=alpha, every=every, start_step=start_step, kl_budget=kl_budget)
        if master_dtype is not None and not master_dtype.is_floating_point:
            raise ValueError(f"master_dtype must be a floating-point type or None, got {master_dtype}")
        if policy is reference:
            raise ValueError("reference must be another object than policy: give it a frozen copy, copy.deepcopy(policy)")
        self.mode, self.alpha, self.every = mode, 1.0 if mode == "hard" else float(alpha), int(every)
        self.start_step, self.kl_budget, self.check_finite = start_step, kl_budget, check_finite
        self.steps = 0
        """Optimiser steps seen."""
        self.syncs = 0
        """Updates made: what was computed with the reference is stale once it has changed."""
        ours, theirs = tensors_of(policy), tensors_of(reference)
        _check_alike(ours, theirs)
        _refuse_shared(ours, theirs)
        self._policy = {name: ours[name] for name in theirs}
        self._reference = theirs
        for tensor in theirs.values():
            tensor.requires_grad_(False)
        modules = reference.modules() if isinstance(reference, nn.Module) else ()
        self._fsdp = any(type(module).__name__ == "FullyShardedDataParallel" for module in modules)
        self._buffers: dict[str, tuple[Tensor, Tensor]] = {}
        if isinstance(policy, nn.Module) and isinstance(reference, nn.Module):
            reference.eval()
            old, new = dict(_clean(reference.named_buffers())), dict(_clean(policy.named_buffers()))
            self._buffers = {k: (new[k], b) for k, b in old.items() if k in new and new[k].shape == b.shape}
        self._masters = {
            name: tensor.detach().to(master_dtype)
            for name, tensor in theirs.items()
            if master_dtype is not None and tensor.dtype in LOW_PRECISION and tensor.dtype != master_dtype
        }
        self._low_rank = [tuple(pair) for pair in low_rank]
        unknown = [name for pair in self._low_rank for name in pair if name not in theirs]
        if unknown:
            raise ValueError(f"low_rank names no tensor of the reference: {', '.join(unknown[:3])}")

    @property
    def sharded(self) -> bool:
        """Whether a process holds a part of the weights only."""
        return self._fsdp or any(hasattr(tensor, "to_local") for tensor in self._reference.values())

    def step(self, drift: float | None = None) -> bool:
        """Call once after each optimiser step (not after those a gradient scaler skipped); True if the reference moved.

        Args:
            drift: For ``kl_budget``: the running estimate of the KL to the reference, in nats; its size counts.
        """
        self.steps += 1
        if self.steps % self.every or self.steps < self.start_step:
            return False
        if self.kl_budget is not None:
            if drift is None:
                raise ValueError("kl_budget needs step(drift=...), the running KL to the reference")
            if not abs(drift) > self.kl_budget:
                return False
        self.sync()
        return True

    @torch.no_grad()
    def sync(self) -> None:
        """Moves the reference now."""
        if self.check_finite:
            self._refuse_non_finite()
        factors = {name for pair in self._low_rank for name in pair}
        for pair in self._low_rank:
            self._sync_product(*pair)
        buckets: dict[Any, list[str]] = defaultdict(list)
        for name, ref in self._reference.items():
            if name not in factors:
                pol = self._policy[name]
                same = name not in self._masters and pol.dtype == ref.dtype and pol.device == ref.device
                buckets[(ref.dtype, ref.device) if same else None].append(name)
        for kind, names in buckets.items():
            ours = [local(self._policy[name]) for name in names]
            theirs = [local(self._reference[name]) for name in names]
            if kind is not None and self.mode == "hard":
                torch._foreach_copy_(theirs, ours)
            elif kind is not None:
                torch._foreach_lerp_(theirs, ours, self.alpha)
            else:  # another type or device: average in the master's, or in float32, and round once
                for name, pol, ref in zip(names, ours, theirs, strict=True):
                    wide = local(self._masters[name]) if name in self._masters else ref.to(_wide(ref.dtype))
                    wide.lerp_(pol.to(wide), self.alpha)
                    ref.copy_(wide)
        if self.mode == "hard":
            for pol, ref in self._buffers.values():
                ref.copy_(pol)
        self.syncs += 1

    def _sync_product(self, a: str, b: str) -> None:
        ours = self._policy[a], self._policy[b]
        theirs = self._masters.get(a, self._reference[a]), self._masters.get(b, self._reference[b])
        for name, new in zip((a, b), average_product(*ours, *theirs, self.alpha), strict=True):
            self._put(name, new)

    def _put(self, name: str, value: Tensor) -> None:
        if name in self._masters:
            local(self._masters[name]).copy_(local(value))
        local(self._reference[name]).copy_(local(value))

    def _refuse_non_finite(self) -> None:
        """By sums, which infinities and NaN survive: one read of the weights, about half an update's time."""
        names = [name for name, tensor in self._policy.items() if tensor.is_floating_point()]
        sums = [local(self._policy[name]).sum(dtype=_wide(self._policy[name].dtype)) for name in names]
        doubtful = [name for name, total in zip(names, _together(sums), strict=True) if not math.isfinite(total)]
        bad = [name for name in doubtful if not local(self._policy[name]).isfinite().all()]  # a sum may overflow
        if bad:
            raise FloatingPointError(
                f"the policy has weights that are not finite, in {len(bad)} of {len(names)} tensors, first {bad[0]}; "
                "the reference keeps its own"
            )

    def state_dict(self) -> dict[str, Any]:
        """Counters and the reference's weights, in the masters' precision where there are masters."""
        tensors = {name: self._masters.get(name, tensor).detach() for name, tensor in self._reference.items()}
        return {"steps": self.steps, "syncs": self.syncs, "reference": tensors}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over counters and weights; the schedule stays the one this was made with."""
        _check_alike(dict(state["reference"]), self._reference, "the stored state", "this reference")
        self.steps, self.syncs = int(state["steps"]), int(state["syncs"])
        for name, value in state["reference"].items():
            self._put(name, value)


def check_schedule(
    *, mode: str, alpha: float, every: int, start_step: int = 0, kl_budget: float | None = None
) -> None:  # fmt: skip
    """Raises a ValueError that names the argument which makes no sense."""
    if mode not in ("soft", "hard"):
        raise ValueError(f"mode must be 'soft' or 'hard', got {mode!r}")
    if mode == "soft" and alpha == 1:
        raise ValueError("alpha=1 replaces the reference: that is mode='hard'; a soft update takes an alpha in (0, 1)")
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha must be in (0, 1) (or mode='hard'), got {alpha}")
    if isinstance(every, bool) or not isinstance(every, Integral) or every < 1:
        raise ValueError(f"every, the optimiser steps between updates, must be a whole number of at least 1, got {every!r}")
    if not isinstance(start_step, Integral) or start_step < 0:
        raise ValueError(f"start_step must be a whole number of at least 0, got {start_step!r}")
    if kl_budget is not None and not 0 < kl_budget < math.inf:
        raise ValueError(f"kl_budget must be a positive number of nats, got {kl_budget}")


def tensors_of(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters by name, each once: a tied tensor would be averaged twice under two names."""
    if isinstance(model, nn.Module):
        return dict(_clean(model.named_parameters(remove_duplicate=True)))
    return dict(model)


def _together(numbers: list[Tensor]) -> list[float]:
    """As Python numbers, with one wait for each device."""
    by_device: dict[Any, list[int]] = defaultdict(list)
    for i, number in enumerate(numbers):
        by_device[number.device].append(i)
    values = [0.0] * len(numbers)
    for places in by_device.values():
        for i, value in zip(places, torch.stack([numbers[i].double() for i in places]).tolist(), strict=True):
            values[i] = value
    return values


def local(tensor: Tensor) -> Tensor:
    """This process's shard of a DTensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _clean(named: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    for name, tensor in named:
        for wrapper in _WRAPPERS:  # DDP, torch.compile and FSDP add these to the names of one side only
            name = name.removeprefix(wrapper).replace("." + wrapper, ".")
        yield name, tensor


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in LOW_PRECISION else dtype


def _check_alike(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], us: str = "the policy", them: str = "the reference"
) -> None:  # fmt: skip
    if not theirs:
        raise ValueError("the reference has no parameters")
    if ours.keys() != theirs.keys():
        odd = sorted(ours.keys() ^ theirs.keys())
        raise ValueError(f"{us} and {them} must have the same parameters; {len(odd)} are in one only, as {odd[0]}")
    for name, tensor in theirs.items():
        if local(ours[name]).shape != local(tensor).shape:
            raise ValueError(f"{name} is {tuple(ours[name].shape)} in {us} and {tuple(tensor.shape)} in {them}")


def _refuse_shared(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    for name, tensor in theirs.items():
        if tensor.numel() and local(ours[name]).data_ptr() == local(tensor).data_ptr():
            raise ValueError(f"policy and reference share the memory of {name}: the reference must be a copy")
