"""The settings that a moving reference adds to a TRL configuration, and what of TRL's own contradicts them."""

from dataclasses import dataclass, field
from typing import Any

from .updater import check_schedule


@dataclass
class TrustRegionOptions:
    """Fields of `TRDPOConfig` and `TRKTOConfig`; the docstring of each says what it is."""

    tr_mode: str = field(
        default="soft",
        metadata={"help": "'soft' mixes the policy into the reference, 'hard' replaces it.", "choices": ["soft", "hard"]},
    )
    tr_alpha: float = field(default=0.6, metadata={"help": "Share of the policy in a soft update, in (0, 1)."})
    tr_sync_steps: int | str = field(
        default="auto", metadata={"help": "Optimiser steps between updates; 'auto': an eighth of the run."}
    )
    tr_start_step: int = field(default=0, metadata={"help": "No update before this optimiser step."})
    tr_kl_budget: float | None = field(
        default=None, metadata={"help": "Update, when due, only if the running mean log-ratio exceeds so many nats."}
    )
    tr_sft_probe: int = field(
        default=32, metadata={"help": "Training examples whose rewards against the initial model are logged; 0: none."}
    )
    cache_ref_logps: bool = field(
        default=False, metadata={"help": "Keep reference log-probabilities by example until the next update."}
    )
    exact_lora: bool = field(default=False, metadata={"help": "Average the products of LoRA factors, not the factors."})


def check_options(args: Any) -> None:
    """Raises a ValueError that names the field and what to set."""
    if isinstance(args.tr_sync_steps, str) and args.tr_sync_steps != "auto":
        if not args.tr_sync_steps.isdecimal():  # the command line gives text
            raise ValueError(f"tr_sync_steps must be a number of optimiser steps or 'auto', got {args.tr_sync_steps!r}")
        args.tr_sync_steps = int(args.tr_sync_steps)
    check_schedule(
        mode=args.tr_mode,
        alpha=args.tr_alpha,
        every=1 if args.tr_sync_steps == "auto" else args.tr_sync_steps,
        start_step=args.tr_start_step,
        kl_budget=args.tr_kl_budget,
    )
    if not 0 < args.beta < float("inf"):
        raise ValueError(f"beta must be a positive number, got {args.beta}")
    if args.tr_sft_probe < 0:
        raise ValueError(f"tr_sft_probe must be at least 0, got {args.tr_sft_probe}")
    if args.precompute_ref_log_probs:
        raise ValueError(
            "precompute_ref_log_probs=True assumes a reference that stands still; cache_ref_logps=True keeps log-probabilities "
            "until the reference moves"
        )
    if args.sync_ref_model:
        raise ValueError("sync_ref_model=True would update the reference a second time: set tr_mode, tr_alpha, tr_sync_steps")
