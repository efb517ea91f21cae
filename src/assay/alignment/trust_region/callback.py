"""The moving reference inside a transformers Trainer: when to update, what to keep in a checkpoint."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .lora import POLICY, REFERENCE, adapter_tensors, add_reference_adapter, low_rank_pairs
from .updater import ReferenceUpdater, check_schedule

logger = logging.getLogger(__name__)

SYNCS_OF_AUTO = 8  # the paper's best intervals, 256 to 512 steps, fall about eight times into its runs
FILE = "trust_region.safetensors"


class TrustRegionCallback(TrainerCallback):
    """Updates the reference model of any Trainer that has one, as it trains.

    "Learn Your Reference Model for Real Good Alignment", ICLR 2025, arXiv 2404.09656. See `ReferenceUpdater` for the
    update. Optimiser steps are counted, not forward passes; steps that the AMP scaler skipped are not. The reference is
    kept in every checkpoint, and a resumed run goes on with it: TRL's own callback starts from the original one again.

    Args:
        ref_model: The trainer's reference, ``trainer.ref_model``. None for a PEFT model: its adapter ``ref`` follows its
            adapter ``default`` (and is made if it is not there).
        mode: ``"soft"`` or ``"hard"``.
        alpha: Share of the policy in a soft update, in (0, 1).
        every: Optimiser steps between updates, or ``"auto"``: an eighth of the run.
        start_step: No update before this step.
        kl_budget: Update only when ``drift()`` exceeds so many nats.
        drift: The running KL to the reference, a function without arguments.
        master_dtype: See `ReferenceUpdater`.
        exact_lora: Average the LoRA products, not their factors.

    Raises:
        ValueError: an argument out of range, or at the start of training: no reference, one that does not fit, or ZeRO-3.
        FileNotFoundError: training resumes from a checkpoint without a reference.

    Example:
        >>> callback = TrustRegionCallback(torch.nn.Linear(2, 2), mode="hard", every=256)
        >>> callback.every
        256
    """

    def __init__(
        self,
        ref_model: nn.Module | None = None,
        mode: str = "soft",
        alpha: float = 0.6,
        every: int | str = "auto",
        start_step: int = 0,
        kl_budget: float | None = None,
        drift: Callable[[], float | None] | None = None,
        master_dtype: torch.dtype | None = torch.float32,
        exact_lora: bool = False,
    ):
        if isinstance(every, str) and every != "auto":
            raise ValueError(f"every must be a number of steps or 'auto', got {every!r}")
        check_schedule(
            mode=mode, alpha=alpha, every=1 if isinstance(every, str) else every, start_step=start_step, kl_budget=kl_budget
        )
        if kl_budget is not None and drift is None:
            raise ValueError("kl_budget needs drift, a function that returns the running KL to the reference")
        self.ref_model, self.every, self.exact_lora, self.drift = ref_model, every, exact_lora, drift
        self.options: dict[str, Any] = {
            "mode": mode, "alpha": alpha, "start_step": start_step, "kl_budget": kl_budget, "master_dtype": master_dtype,
        }  # fmt: skip
        self.updater: ReferenceUpdater | None = None
        """Made when training begins, after the models are on their devices and sharded."""
        self.kept: dict[str, Tensor] = {}
        """Further tensors that go into the checkpoint and come back from it."""
        self.resume_folder: str | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        _refuse_zero3(args)
        every = max(1, round(state.max_steps / SYNCS_OF_AUTO)) if self.every == "auto" else int(self.every)
        self.updater = self._make(model, every)
        logger.info("the reference is updated every %d optimiser steps of %d", every, state.max_steps)
        if state.global_step > 0:
            self._load(args, state)

    def _make(self, model: Any, every: int) -> ReferenceUpdater:
        if self.ref_model is not None:
            return ReferenceUpdater(model, _unwrapped(self.ref_model), every=every, **self.options)
        model = _unwrapped(model)
        if not hasattr(model, "peft_config"):
            raise ValueError("there is no reference to update: pass ref_model=trainer.ref_model, or train a PEFT adapter")
        if REFERENCE not in model.peft_config:
            add_reference_adapter(model)
        pairs = low_rank_pairs(model) if self.exact_lora else []
        policy, reference = adapter_tensors(model, POLICY), adapter_tensors(model, REFERENCE)
        return ReferenceUpdater(policy, reference, every=every, low_rank=pairs, **self.options)

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if self.updater is None or getattr(optimizer, "step_was_skipped", False):
            return
        self.updater.step(self.drift() if self.drift else None)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = _checkpoint(args, state)
        if self.updater is None or args.save_only_model:
            return
        if not folder.is_dir():
            if state.is_world_process_zero:
                logger.warning("the reference is not saved: there is no checkpoint folder %s", folder)
            return
        path = _file(folder, self.updater)
        if state.is_world_process_zero or path.name != FILE:
            _save(path, self.updater, self.kept)

    def _load(self, args: Any, state: Any) -> None:
        assert self.updater is not None
        folder = Path(self.resume_folder) if self.resume_folder else _checkpoint(args, state)
        path = _file(folder, self.updater)
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: training resumes at step {state.global_step}, and without the reference of that step it "
                "would go on from the original one. Resume from a checkpoint that was saved with a TrustRegionCallback"
            )
        self.kept = _load(path, self.updater)


def _save(path: Path, updater: ReferenceUpdater, kept: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    from .updater import local

    state = updater.state_dict()
    tensors = {f"reference/{name}": tensor for name, tensor in state["reference"].items()}
    tensors |= {f"kept/{name}": tensor for name, tensor in kept.items()}
    counters = {"steps": state["steps"], "syncs": state["syncs"]}
    part = path.with_suffix(".part")
    save_file(
        {name: local(t).detach().contiguous().cpu() for name, t in tensors.items()}, part, {"state": json.dumps(counters)}
    )
    part.replace(path)  # a killed run leaves no half-written file under the name


def _load(path: Path, updater: ReferenceUpdater) -> dict[str, Tensor]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as stored:
        counters = json.loads(stored.metadata()["state"])
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - no mapping
    reference = {name.removeprefix("reference/"): t for name, t in tensors.items() if name.startswith("reference/")}
    updater.load_state_dict({**counters, "reference": reference})
    return {name.removeprefix("kept/"): t for name, t in tensors.items() if name.startswith("kept/")}


def _file(folder: Path, updater: ReferenceUpdater) -> Path:
    """One file where every process holds the whole reference; one for each where it is sharded."""
    if not updater.sharded:
        return folder / FILE
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return folder / FILE.replace(".", f"-{rank}-of-{world}.")


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _unwrapped(model: Any) -> Any:
    """Without DDP and torch.compile; FSDP stays, its shards are what is updated."""
    while isinstance(model, nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = getattr(model, "_orig_mod", None) or model.module
    return model


def _refuse_zero3(args: Any) -> None:
    plugin = getattr(args, "deepspeed_plugin", None)
    if plugin is not None and plugin.zero_stage == 3:
        raise ValueError(
            "deepspeed: with ZeRO-3 each process holds only a part of every weight, so the reference cannot follow; use ZeRO-2 "
            "or FSDP"
        )
