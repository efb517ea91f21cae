"""TR-DPO and TR-IPO: TRL's DPO trainer with a reference that follows the policy."""

from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from trl import DPOConfig, DPOTrainer

from .losses import tr_dpo_loss, tr_ipo_loss
from .options import TrustRegionOptions, check_options
from .rows import pair_fault
from .trainer import TrustRegion


@dataclass
class TRDPOConfig(TrustRegionOptions, DPOConfig):
    """TRL's ``DPOConfig`` with the schedule of the reference.

    arXiv 2404.09656. Fields beyond TRL's: ``tr_mode`` ("soft", "hard"), ``tr_alpha`` in (0, 1), default 0.6;
    ``tr_sync_steps``, optimiser steps between updates or "auto" (an eighth of the run); ``tr_start_step``;
    ``tr_kl_budget``, nats or None; ``tr_sft_probe``, how many examples are logged against the initial model, default 32;
    ``ipo_length_normalized``, default True; ``cache_ref_logps``; ``exact_lora``. ``beta`` is 0.05 (TRL: 0.1).

    Raises:
        ValueError: a value out of range, or one of TRL's options that needs a reference which stands still.

    Example:
        >>> TRDPOConfig(output_dir="out", tr_mode="hard", tr_sync_steps=256, bf16=False).beta
        0.05
    """

    beta: float = field(default=0.05, metadata={"help": "How fast the loss saturates; for IPO its τ."})
    ipo_length_normalized: bool = field(
        default=True, metadata={"help": "IPO on log-ratios divided by their lengths, as TRL has it; False: on sums."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(self)
        if self.label_smoothing and set(self.loss_type) & {"sigmoid"} and not 0 <= self.label_smoothing <= 0.5:
            raise ValueError(f"label_smoothing must be in [0, 0.5], got {self.label_smoothing}")
        own = sorted(own_losses(self))
        if own and (self.f_divergence_type != "reverse_kl" or self.ld_alpha is not None or self.use_weighting):
            raise ValueError(
                f"{', '.join(own)} with label smoothing or unnormalised is computed here, without f_divergence_type, ld_alpha "
                "and use_weighting; leave those at their defaults"
            )


def own_losses(args: Any) -> set[str]:
    """Loss types that TRL does not have in the form asked for: it ignores ``label_smoothing`` in "sigmoid", and always
    divides by lengths in "ipo"."""
    own = {"sigmoid"} if args.label_smoothing else set()
    return (own | (set() if args.ipo_length_normalized else {"ipo"})) & set(args.loss_type)


class TRDPOTrainer(TrustRegion, DPOTrainer):
    """TRL's DPO trainer whose reference follows the policy: TR-DPO with ``loss_type="sigmoid"``, TR-IPO with ``"ipo"``.

    "Learn Your Reference Model for Real Good Alignment", ICLR 2025, arXiv 2404.09656. See `ReferenceUpdater` for the update;
    any other loss of TRL takes the moving reference as well. Full weights, PEFT (a second adapter is the reference), DDP,
    gradient accumulation; the reference is kept in checkpoints, and training resumes with it.

    Args:
        model: As for ``DPOTrainer``. A model object without ``ref_model`` gets a frozen copy of its own weights.
        ref_model: Another start for the reference. Not with PEFT.
        args: A `TRDPOConfig`.
        train_dataset: Preference pairs. Rows without two different answers are left out and counted in ``skipped``.

    Shapes:
        As TRL's: text in, one loss out.

    Raises:
        ValueError: no usable row, a tokenizer without an end token, a reference that is the policy or does not fit.
        FloatingPointError: a loss or a log-probability that is not finite.

    Example:
        >>> issubclass(TRDPOTrainer, DPOTrainer)
        True
    """

    given_names = ("ref_chosen_logps", "ref_rejected_logps")
    config_type = TRDPOConfig
    fault = staticmethod(pair_fault)

    def __init__(self, model: Any, ref_model: Any = None, args: TRDPOConfig | None = None, **kwargs: Any):
        super().__init__(model, ref_model, args, **kwargs)
        own = own_losses(self.args)
        self._own = {t: w for t, w in zip(self.loss_types, self.loss_weights, strict=True) if t in own}
        self.loss_weights = [0.0 if t in own else w for t, w in zip(self.loss_types, self.loss_weights, strict=True)]

    def _own_loss(self, policy: Tensor, given: dict[str, Tensor], inputs: dict[str, Any]) -> Tensor | float:
        if not self._own:
            return 0.0
        chosen, rejected = policy.chunk(2)
        quadruple = (chosen, rejected, given["ref_chosen_logps"], given["ref_rejected_logps"])
        loss = policy.new_zeros(())
        if "sigmoid" in self._own:
            loss = loss + self._own["sigmoid"] * tr_dpo_loss(*quadruple, self.beta, self.label_smoothing).mean()
        if "ipo" in self._own:
            loss = loss + self._own["ipo"] * tr_ipo_loss(*quadruple, self.beta).mean()
        return loss

    def _drift_rows(self, policy: Tensor, given: dict[str, Tensor], inputs: dict[str, Any]) -> Tensor:
        return policy.chunk(2)[0] - given["ref_chosen_logps"]

    def _without_signal(self, prepared: Dataset, args: Any) -> tuple[Dataset, dict[str, int]]:
        """Pairs whose answers differ only behind ``max_length``."""
        if args.max_length is None or args.truncation_mode != "keep_start":
            return prepared, {}

        def differs(row: dict[str, Any]) -> bool:
            room = max(0, args.max_length - len(row["prompt_ids"]))
            return row["chosen_ids"][:room] != row["rejected_ids"][:room]

        kept = prepared.filter(differs)
        gone = len(prepared) - len(kept)
        return kept, {"identical within max_length": gone} if gone else {}

    def _sft_rewards(self, gained: Tensor) -> dict[str, float]:
        chosen, rejected = self._by_answer(gained)
        margin = chosen - rejected
        named = {"chosen": chosen, "rejected": rejected, "margins": margin, "accuracies": (margin > 0).float()}
        return {name: value.mean().item() for name, value in named.items()}

    def _by_answer(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The probe's batches hold chosen answers above rejected ones, batch by batch."""
        pairs = len(rows) // 2
        size = self.args.per_device_train_batch_size
        parts = rows.split([2 * min(size, pairs - start) for start in range(0, pairs, size)])
        chosen, rejected = zip(*(part.chunk(2) for part in parts), strict=True)
        return torch.cat(chosen), torch.cat(rejected)
