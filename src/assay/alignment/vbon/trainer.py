"""vBoN as a TRL trainer: RLOO with the quantile of the reward and the KL coefficient that belongs to N."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from typing import Any

import torch
import trl
from accelerate.utils import gather_object
from torch import Tensor

from .cdf import RewardCDF, prompt_key, shown
from .reward import VBoNReward, kl_coefficient
from .sampling import evaluating


@dataclass
class VBoNConfig(trl.RLOOConfig):
    """RLOO's configuration with N in place of β.

    Args:
        n: The N of best-of-N, ≥ 2.
        bound: ``"l1"``, ``"exact"`` or ``"jensen"``; see `VBoNReward`.
        cdf_samples: Reference answers a prompt, for a table that the trainer builds itself, ≥ 2.
        beta: Not to be set: ``1/(n − 1)``, or ``1/n`` for the other bounds.
        disable_dropout: On, unlike in RLOO: dropout would change the policy between the roll-out and its update, and the
            ratio of the two would be clipped.

    Raises:
        ValueError: a β of one's own, or a setting under which the objective is no longer vBoN's: ``normalize_advantages``,
            ``reward_clip_range``, ``mask_truncated_completions``, ``sync_ref_model``, ``reward_weights``.
    """

    n: int = field(default=16, metadata={"help": "The N of best-of-N, at least 2."})
    bound: str = field(default="l1", metadata={"help": "What is optimised: 'l1', 'exact' or 'jensen'."})
    cdf_samples: int = field(default=300, metadata={"help": "Reference answers a prompt for the table of rewards."})
    beta: float | None = field(default=None, metadata={"help": "Follows from n; leave it."})  # type: ignore[assignment]
    disable_dropout: bool = field(default=True, metadata={"help": "Switch dropout off in the policy and the reference."})

    def __post_init__(self) -> None:
        right = kl_coefficient(self.n, self.bound)
        if self.beta is not None and self.beta != right:
            raise ValueError(
                f"beta follows from n: {right:g} for n={self.n}, bound={self.bound!r}; got {self.beta!r}. Set n instead"
            )
        self.beta = right
        if self.cdf_samples < 2:
            raise ValueError(f"cdf_samples must be at least 2, got {self.cdf_samples}")
        spoils = {
            "normalize_advantages": self.normalize_advantages,
            "reward_clip_range": self.reward_clip_range is not None,
            "mask_truncated_completions": self.mask_truncated_completions,
            "sync_ref_model": self.sync_ref_model,
            "reward_weights": self.reward_weights is not None,
        }
        if any(spoils.values()):
            bad = ", ".join(name for name, on in spoils.items() if on)
            raise ValueError(f"{bad} must stay off: with it the optimum is no longer the best-of-N distribution")
        super().__post_init__()


class VBoNTrainer(trl.RLOOTrainer):
    """Brings a policy to the best-of-N distribution of the model it starts from.

    Variational Best-of-N Alignment, ICLR 2025 (arXiv 2407.06057). RLOO subtracts ``β Σ_t (log π_θ − log π_ref)`` from the
    reward, which is the gradient of the reverse KL; with the rewards of `VBoNReward` its expected update is the gradient of
    ``−KL(π_θ ‖ π_bon)/N`` (of its bound, for ``"l1"``).

    Args:
        model: A path or hub id (TRL loads the reference from the same place), or a PEFT model.
        reward_funcs: One reward function as TRL takes it, returning a number for every completion.
        args: A `VBoNConfig`.
        train_dataset: With a column ``prompt``.
        cdf: The reference's rewards for every prompt of ``train_dataset`` and ``eval_dataset``. None: they are sampled here,
            each process taking its share; ``reward_funcs`` is then called with prompts and completions alone.
        more: Whatever ``RLOOTrainer`` takes.

    Raises:
        ValueError: other arguments than a `VBoNConfig`, several reward functions, a table that misses a prompt or was
            sampled with other settings than the roll-outs, FSDP or DeepSpeed without a table.
        FloatingPointError: a loss that is not finite.
    """

    _tag_names = ["trl", "rloo", "vbon"]  # noqa: RUF012 - TRL's own form

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
        args: VBoNConfig | None = None,
        train_dataset: Any = None,
        *,
        cdf: RewardCDF | None = None,
        **more: Any,
    ):
        args = VBoNConfig(output_dir="vbon") if args is None else args
        if not isinstance(args, VBoNConfig):
            raise ValueError(f"args must be a VBoNConfig, got {type(args).__name__}")
        functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        several = len(functions) != 1 or not callable(functions[0]) or isinstance(functions[0], torch.nn.Module)
        if several or iscoroutinefunction(functions[0]):
            raise ValueError(
                "reward_funcs must be one plain function, not a model or a coroutine; weigh several in a function of your own, "
                "their order is what counts"
            )
        reward = VBoNReward(functions[0], RewardCDF() if cdf is None else cdf, args.bound, args.n, self._reference_logps)  # type: ignore[arg-type]
        super().__init__(model, reward, args, train_dataset, **more)
        if cdf is None:
            if self.is_fsdp_enabled or self.is_deepspeed_enabled:
                raise ValueError(
                    "under FSDP and DeepSpeed build the table beforehand, RewardCDF.sample(...), and pass it as cdf="
                )
            reward.cdf = cdf = self._sampled_cdf(functions[0])
        self.cdf = cdf
        self._check_table()
        cdf.warn_if_coarse(args.n)

    def _sampled_cdf(self, reward_fn: Any) -> RewardCDF:
        prompts = _distinct(self._prompts())
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise ValueError("prompts that are messages need a table of your own: cdf.add(messages, rewards)")
        size = max(256, self.args.per_device_train_batch_size)
        state = self.accelerator
        with self._as_reference() as reference:
            part = RewardCDF.sample(
                reference,
                self._tokenizer,
                prompts,
                reward_fn,
                self.args.cdf_samples,  # type: ignore[attr-defined]
                size,
                seed=self.args.seed,
                share=(state.process_index, state.num_processes),
                **self._roll_out(),
            )
        return RewardCDF().merge(gather_object([part]))

    def _roll_out(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p or 0.0,
            "repetition_penalty": self.repetition_penalty,
            "max_new_tokens": self.max_completion_length,
            **(self.args.generation_kwargs or {}),  # type: ignore[attr-defined]
        }

    def _prompts(self) -> list[Any]:
        """Of all that is trained or evaluated on."""
        held_out = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        found = []
        for name, rows in [("train_dataset", self.train_dataset), *(("eval_dataset", rows) for rows in held_out.values())]:
            if rows is None:
                continue
            try:
                found += list(rows["prompt"])
            except (TypeError, KeyError, ValueError):
                raise ValueError(f"{name} must be a map-style data set with a column 'prompt'") from None
        return found

    def _check_table(self) -> None:
        missing = [prompt for prompt in _distinct(self._prompts()) if prompt not in self.cdf]
        if missing:
            raise ValueError(
                f"cdf has no rewards for {len(missing)} prompts of train_dataset or eval_dataset, first {shown(missing[0])}; "
                "keys are the exact strings of the data set"
            )
        wanted = self._roll_out()
        if self.cdf.sampling is not None:
            other = {k: v for k, v in self.cdf.sampling.items() if k in wanted and (v or None) != (wanted[k] or None)}
            if other:
                differ = ", ".join(f"{k}: table {v}, roll-outs {wanted[k]}" for k, v in other.items())
                raise ValueError(f"the table was sampled with other settings than the roll-outs ({differ})")

    @contextmanager
    def _as_reference(self) -> Iterator[Any]:
        """The model that the KL is measured from, without dropout; with PEFT the policy's own, its adapter off or replaced."""
        if self.ref_model is not None:
            yield self.accelerator.unwrap_model(self.ref_model)
            return
        from trl.trainer.utils import use_adapter

        model = self.accelerator.unwrap_model(self.model)
        with evaluating(model), use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
            yield model

    @torch.no_grad()
    def _reference_logps(self, prompts: Sequence[Any], completion_ids: Sequence[list[int]]) -> Tensor:
        """``log π_ref(completion | prompt)`` at the roll-outs' temperature: of the continuation, not of the whole text."""
        prompt_ids = self._tokenize_prompts(list(prompts))[0]
        device = self.accelerator.device
        rows = [torch.tensor(list(p) + list(c), device=device) for p, c in zip(prompt_ids, completion_ids, strict=True)]
        ids = torch.nn.utils.rnn.pad_sequence(rows, True, self._tokenizer.pad_token_id)
        first = torch.tensor([len(p) for p in prompt_ids], device=device)[:, None]
        past = torch.tensor([len(row) for row in rows], device=device)[:, None]
        position = torch.arange(ids.shape[1], device=device)
        sums = []
        size = self.args.per_device_train_batch_size
        with self._as_reference() as reference:
            for part, begin, end in zip(ids.split(size), first.split(size), past.split(size), strict=True):
                logits = reference(input_ids=part, attention_mask=(position < end).long()).logits[:, :-1].float()
                logps = (logits / self.temperature).log_softmax(-1).gather(2, part[:, 1:, None])[..., 0]
                counted = (position[1:] >= begin) & (position[1:] < end)
                sums.append((logps * counted).sum(1))
        return torch.cat(sums)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"the loss became {loss.item()} at step {self.state.global_step}: lower the learning rate")
        return loss


def _distinct(prompts: Sequence[Any]) -> list[Any]:
    return list({prompt_key(prompt): prompt for prompt in prompts}.values())
