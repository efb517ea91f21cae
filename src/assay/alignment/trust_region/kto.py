"""TR-KTO: TRL's KTO trainer with a reference that follows the policy."""

from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from trl import KTOConfig, KTOTrainer

from .options import TrustRegionOptions, check_options
from .rows import answer_fault
from .trainer import TrustRegion


@dataclass
class TRKTOConfig(TrustRegionOptions, KTOConfig):
    """TRL's ``KTOConfig`` with the schedule of the reference; the fields beyond TRL's are those of `TRDPOConfig`.

    arXiv 2404.09656. ``beta`` is 0.05 (TRL: 0.1).

    Raises:
        ValueError: a value out of range, batches of one, or one of TRL's options that needs a reference which stands still.

    Example:
        >>> TRKTOConfig(output_dir="out", tr_alpha=0.5, bf16=False).tr_sync_steps
        'auto'
    """

    beta: float = field(default=0.05, metadata={"help": "How fast the loss saturates."})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(self)
        if self.loss_type == "kto" and self.per_device_train_batch_size < 2:
            raise ValueError(
                "per_device_train_batch_size must be at least 2: a KTO batch of one has no mismatched pair, from which the KL "
                "is estimated"
            )


class TRKTOTrainer(TrustRegion, KTOTrainer):
    """TRL's KTO trainer whose reference follows the policy; rewards and the KL estimate both use the reference of the moment.

    "Learn Your Reference Model for Real Good Alignment", ICLR 2025, arXiv 2404.09656. See `TRDPOTrainer` for what is the
    same.

    Args:
        model: As for ``KTOTrainer``. A model object without ``ref_model`` gets a frozen copy of its own weights.
        ref_model: Another start for the reference. Not with PEFT.
        args: A `TRKTOConfig`.
        train_dataset: Labelled answers, or pairs. Rows without an answer or a label are left out and counted in ``skipped``.

    Shapes:
        As TRL's: text in, one loss out.

    Raises:
        ValueError: no usable row, a tokenizer without an end token, a reference that does not fit.
        FloatingPointError: a loss or a log-probability that is not finite.

    Example:
        >>> issubclass(TRKTOTrainer, KTOTrainer)
        True
    """

    given_names = ("ref_logps", "ref_KL_logps")
    config_type = TRKTOConfig
    fault = staticmethod(answer_fault)

    def _without_signal(self, prepared: Dataset, args: Any) -> tuple[Dataset, dict[str, int]]:
        """A last batch of one, in which TRL would pair an answer with its own prompt and subtract the reward from itself."""
        if not self.calculate_KL or len(prepared) % args.per_device_train_batch_size != 1:
            return prepared, {}
        return prepared.select(range(len(prepared) - 1)), {"last batch of one": 1}

    def _drift_rows(self, policy: Tensor, given: dict[str, Tensor], inputs: dict[str, Any]) -> Tensor:
        return (policy - given["ref_logps"])[inputs["label"].bool().to(policy.device)]

    def _sft_rewards(self, gained: Tensor) -> dict[str, float]:
        data: Any = self.train_dataset
        labels = torch.tensor(data[: len(gained)]["label"], device=gained.device).bool()
        means = {"chosen": gained[labels], "rejected": gained[~labels]}
        rewards = {name: rows.mean().item() for name, rows in means.items() if len(rows)}
        return rewards | ({"margins": rewards["chosen"] - rewards["rejected"]} if len(rewards) == 2 else {})
