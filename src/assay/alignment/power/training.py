"""TRL's own trainers for the losses it has, and the few it lacks, all told the same things."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from .config import POWERConfig
from .rivals import ROPO_ALPHA
from .trainer import POWERTrainer


class MarginDPOTrainer(DPOTrainer):
    """DPO's trainer with a loss of the log-ratios that TRL does not have.

    ``smoothed``: ``−(1 − s) log σ(m) − s log σ(−m)`` (cDPO); ``chi``: the link ``z + log z`` (χPO); ``ropo``: the
    noise-aware mixture of ``−log σ(m)`` and ``σ(−m)``.
    """

    kind = "smoothed"

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        mask = inputs["completion_mask"]
        kwargs = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"], "use_cache": False}
        answer_ids = inputs["input_ids"].masked_fill(mask == 0, -100)
        logps = model(**kwargs, labels=answer_ids, fused_lm_head=True).log_probs.sum(1)
        with torch.no_grad():
            reference: Any = self.ref_model
            ref_logps = reference(**kwargs, labels=answer_ids, fused_lm_head=True).log_probs.sum(1)
        loss = margin_loss(self.kind, logps - ref_logps, self.beta, self.label_smoothing).mean()
        if not bool(torch.isfinite(loss)):
            raise FloatingPointError(f"the loss became {loss.item()} at step {self.state.global_step}")
        return (loss, None) if return_outputs else loss


def margin_loss(kind: str, log_ratio: Tensor, beta: float, smoothing: float) -> Tensor:
    """Of log-ratios ``(2 B,)``, chosen first: the loss of each pair ``(B,)``."""
    if kind == "chi":  # the ratio is cut off as in χPO's own training, against overflow
        log_ratio = log_ratio + log_ratio.clamp(-88, 20).exp()
    chosen, rejected = log_ratio.chunk(2)
    m = beta * (chosen - rejected)
    if kind == "ropo":
        return 4 * ROPO_ALPHA / (1 + ROPO_ALPHA) ** 2 * (-F.logsigmoid(m) + ROPO_ALPHA * (-m).sigmoid())
    smoothing = smoothing if kind == "smoothed" else 0.0
    return -(1 - smoothing) * F.logsigmoid(m) - smoothing * F.logsigmoid(-m)


def dpo(
    model: str, pairs: Any, tokenizer: Any, settings: dict[str, Any], *, beta: float, flip: float, kind: str = "", **more: Any
) -> Any:
    """TRL's DPO trainer with ``loss_type`` and the like in ``more``; ``label_smoothing="flip"`` is the true flip rate."""
    if more.get("label_smoothing") == "flip":
        more["label_smoothing"] = flip
    trainer: Any = type("Trainer", (MarginDPOTrainer,), {"kind": kind}) if kind else DPOTrainer
    return trainer(model=model, processing_class=tokenizer, train_dataset=pairs, args=DPOConfig(beta=beta, **settings, **more))


def sft(model: str, pairs: Any, tokenizer: Any, settings: dict[str, Any], *, beta: float, flip: float) -> Any:
    """Likelihood of the chosen answers alone."""
    chosen = pairs.rename_column("chosen", "completion").select_columns(["prompt", "completion"])
    return SFTTrainer(model=model, processing_class=tokenizer, train_dataset=chosen, args=SFTConfig(**settings))


def simpo(model: str, pairs: Any, tokenizer: Any, settings: dict[str, Any], *, beta: float, flip: float) -> Any:
    """SimPO with no margin of its own and no likelihood term; TRL's defaults for both are not zero."""
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    args = CPOConfig(loss_type="simpo", simpo_gamma=0.0, cpo_alpha=0.0, beta=beta, **settings)
    return CPOTrainer(model=model, processing_class=tokenizer, train_dataset=pairs, args=args)


def orpo(model: str, pairs: Any, tokenizer: Any, settings: dict[str, Any], *, beta: float, flip: float) -> Any:
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    args = ORPOConfig(beta=beta, **settings)
    return ORPOTrainer(model=model, processing_class=tokenizer, train_dataset=pairs, args=args)


def apart(tokenizer: Any, prompt: str, answer: str) -> bool:
    """Whether an answer leaves its prompt's tokens as they are: TRL's SimPO stops at a pair in which it does not."""
    tokens = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    return tokenizer(prompt + answer, add_special_tokens=False)["input_ids"][: len(tokens)] == tokens


def power(model: str, pairs: Any, tokenizer: Any, settings: dict[str, Any], *, beta: float, flip: float, **more: Any) -> Any:
    """POWER, DL alone (``eta=0``) or POWER-DL."""
    args = POWERConfig(beta=beta, **settings, **more)
    return POWERTrainer(model=model, processing_class=tokenizer, train_dataset=pairs, args=args)
