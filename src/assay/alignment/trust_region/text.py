"""The study's runs on text, with TRL's trainers: a method trained on pairs and looked at along the way."""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

from .arms import Method, dpo_loss, ipo_loss
from .dpo import TRDPOConfig, TRDPOTrainer
from .kto import TRKTOConfig, TRKTOTrainer

TRL_NAMES = {dpo_loss: "sigmoid", ipo_loss: "ipo"}


class OwnLoss(TRDPOTrainer):
    """A pairwise loss that TRL does not have: its own stays at weight 0."""

    def __init__(self, *args: Any, pair_loss: Callable[..., Tensor], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.pair_loss = pair_loss
        self.loss_weights = [0.0]

    def _own_loss(self, policy: Tensor, given: dict[str, Tensor], inputs: dict[str, Any]) -> Tensor:
        lengths = inputs["completion_mask"].sum(1).chunk(2)
        pairs = (*policy.chunk(2), given["ref_chosen_logps"], given["ref_rejected_logps"])
        return self.pair_loss(*pairs, self.beta, *lengths).mean()


class Observe(TrainerCallback):
    """Calls ``look(step, model)`` after the given optimiser steps."""

    def __init__(self, steps: set[int], look: Callable[[int, Any], None]):
        self.steps, self.look = steps, look

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step in self.steps:
            training = model.training
            with torch.random.fork_rng(devices=[]):  # looking must not change what the next batch is
                self.look(state.global_step, model.eval())
            model.train(training)


def build(
    method: Method, path: str, tokenizer: Any, data: Any, settings: dict[str, Any], *, beta: float, alpha: float, every: int
) -> Any:
    """The trainer of a method; the policy and its reference are read from a folder.

    Args:
        data: Pairs as a ``Dataset``.
        settings: Keyword arguments that every TRL configuration takes.
    """
    moving: dict[str, Any] = {"tr_mode": method.reference, "tr_alpha": alpha, "tr_sync_steps": every, "tr_sft_probe": 0}
    if method.reference not in ("soft", "hard"):
        moving = {**moving, "tr_mode": "soft", "tr_start_step": settings["max_steps"] + 1}  # stands still
    common: dict[str, Any] = {"model": path, "processing_class": tokenizer}
    if method.unpaired:
        from trl.data_utils import unpair_preference_dataset

        # TRL would unpair too, but leave all good answers first and all bad ones last, and KTO reads in order
        answers = unpair_preference_dataset(data).shuffle(seed=settings["seed"])
        if method.reference == "fixed":
            return KTOTrainer(args=KTOConfig(**settings, beta=beta), train_dataset=answers, **common)
        return TRKTOTrainer(args=TRKTOConfig(**settings, beta=beta, **moving), train_dataset=answers, **common)
    common["train_dataset"] = data
    if method.loss not in TRL_NAMES:
        return OwnLoss(args=TRDPOConfig(**settings, beta=beta, **moving), pair_loss=method.loss, **common)
    settings = {**settings, "loss_type": TRL_NAMES[method.loss], "beta": beta}
    if method.reference == "trl":
        sync: dict[str, Any] = {"sync_ref_model": True, "ref_model_mixup_alpha": alpha, "ref_model_sync_steps": every}
        return DPOTrainer(args=DPOConfig(**settings, **sync), **common)
    if method.reference == "bema":
        from trl.experimental.bema_for_ref_model import BEMACallback
        from trl.experimental.bema_for_ref_model import DPOTrainer as BEMATrainer

        trainer = BEMATrainer(args=DPOConfig(**settings), **common)
        trainer.add_callback(BEMACallback(update_freq=every, update_ref_model=True, ref_model_update_freq=every))
        return trainer
    if method.reference == "fixed":
        return DPOTrainer(args=DPOConfig(**settings), **common)
    return TRDPOTrainer(args=TRDPOConfig(**settings, **moving), **common)


def difference_from_trl(path: str, tokenizer: Any, data: Any, settings: dict[str, Any], *, beta: float, alpha: float) -> float:
    """The largest difference in any weight of policy or reference after three updates, ours beside TRL's own."""
    ends = []
    for reference in ("soft", "trl"):
        with tempfile.TemporaryDirectory() as folder:
            run = {**settings, "max_steps": 10, "output_dir": folder}
            trainer = build(Method(dpo_loss, reference), path, tokenizer, data, run, beta=beta, alpha=alpha, every=3)
            trainer.train()
        ends.append([*trainer.model.parameters(), *trainer.ref_model.parameters()])
    return max((a - b).abs().max().item() for a, b in zip(*ends, strict=True))
