"""POWER as a TRL trainer: DPO's data handling and fused log-probabilities, no reference model, labels that follow."""

import os
import warnings
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, is_peft_model
from datasets import Dataset, IterableDataset
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import DPOTrainer
from trl.trainer.utils import add_fused_lm_head

from .baseline import with_drawn_baseline
from .config import POWERConfig
from .labels import DynamicLabels
from .loss import power_loss, power_margin
from .pairs import BASELINE_IDS, POSITION, WEIGHTS, Collator, label_groups, usable, with_baseline_ids, with_ids

LABELS_FILE = "dynamic_labels.safetensors"
NOT_THE_MODELS = {"completion_mask", "weights", POSITION}


class POWERTrainer(DPOTrainer):
    """Trains a language model on preference pairs with POWER or POWER-DL, without a reference model.

    Rashidinejad and Tian, "Sail into the Headwind: Alignment via Robust Rewards and Dynamic Labels against Reward Hacking",
    ICLR 2025, arXiv 2412.09544.

    ``m_i = β [w(y⁺) log π(y⁺|x) − w(y⁻) log π(y⁻|x) + w(y⁺) − w(y⁻)]``, then, with ``γ > 0`` and without gradient,
    ``ℓ_i ← (1 − γ) ℓ_i + γ σ(m_i)``, then ``L = −[ℓ_i log σ(m_i) + (1 − ℓ_i) log σ(−m_i)] − η β w(y') log π(y'|x)``.

    Everything of `trl.DPOTrainer` holds (data formats, PEFT, accumulation, checkpoints, DDP, FSDP) but the reference model.
    Labels are saved in each checkpoint and taken up on resume. Logged beside DPO's rewards: ``labels/mean``,
    ``labels/frac_below_half``, of the pairs visited.

    Args:
        args: A `POWERConfig`. Everything that is not named here is as `trl.DPOTrainer` takes it.
        ref_model: Only there because DPO's trainer has it; it must stay None.
        weighting: Instead of ``args.weighting``: a function of the batch that gives a weight, > 0, for each row of
            ``input_ids``: chosen answers, then rejected, then any baseline answers. It must not depend on the model.
        label_sharing: Instead of ``args.label_sharing``: a function of a data row; pairs of one key have one label.

    Attributes:
        dynamic_labels: `DynamicLabels` by pair id, or None with ``gamma = 0``. With sharing, by the id of the first pair.
        skipped: Pairs left out of each data set, by reason.

    Raises:
        ValueError: a reference model; settings outside their ranges; ids missing or doubled; no usable pair; a tokenizer with
            neither padding nor end token; weights that are not positive and finite; an answer without tokens.
        FloatingPointError: an answer's log-probability is NaN or infinite; labels are then as before the step.

    Example:
        >>> args = POWERConfig("out", num_train_epochs=3)  # doctest: +SKIP
        >>> trainer = POWERTrainer(model="my-sft", train_dataset=pairs, args=args)  # doctest: +SKIP
        >>> trainer.train(); suspicious = trainer.dynamic_labels.below(0.5)  # doctest: +SKIP
    """

    args: Any  # a POWERConfig, where Trainer says TrainingArguments
    model: Any
    train_dataset: Any
    _signature_columns: Any

    _tag_names = ["trl", "power"]  # noqa: RUF012 - as TRL declares them
    _name = "POWER"
    _paper = {  # noqa: RUF012
        "title": "Sail into the Headwind: Alignment via Robust Rewards and Dynamic Labels against Reward Hacking",
        "id": "2412.09544",
        "citation": "",
    }

    # DPO's constructor loads a reference unless it is given one, and keeps it here. It is given a marker, and this forgets it:
    # nothing is loaded, copied to an adapter, sharded or moved.
    ref_model = property(lambda self: None, lambda self, value: None)

    def __init__(
        self,
        model: Any,
        ref_model: None = None,
        args: POWERConfig | None = None,
        data_collator: Callable[..., Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Callable[..., Any] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        *,
        weighting: Callable[[dict[str, Tensor]], Tensor] | None = None,
        label_sharing: Callable[[dict[str, Any]], Hashable] | None = None,
    ):
        if ref_model is not None:
            raise ValueError("POWER uses no reference model: leave ref_model out, it would only take memory")
        if args is None:
            name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "model")
            args = POWERConfig(output_dir=f"{Path(name).name or 'model'}-POWER")
        if not isinstance(args, POWERConfig):
            raise TypeError(f"args must be a POWERConfig, got {type(args).__name__}")
        if isinstance(processing_class, PreTrainedTokenizerBase):
            _check_padding(processing_class)
        self.eta, self.gamma = args.resolved_eta, args.gamma
        self.weighting = weighting or args.weighting
        self.label_sharing = label_sharing or args.label_sharing
        self.dynamic_labels: DynamicLabels | None = None
        self.skipped: dict[str, dict[str, int]] = {}
        if self.gamma > 0 and isinstance(train_dataset, IterableDataset):
            raise ValueError("dynamic labels need a data set that can be counted, got a stream: set gamma=0, or load it whole")
        if self.gamma == 0 and label_sharing is not None:
            raise ValueError("label_sharing would do nothing: gamma=0 has no labels")
        marker: Any = object()
        super().__init__(
            model, marker, args, data_collator, train_dataset, eval_dataset, processing_class, compute_metrics, callbacks,
            optimizers, quantization_config, peft_config,
        )  # fmt: skip
        if self._is_vision_dataset:
            raise ValueError("POWERTrainer takes text pairs, got a data set with images")
        # Only log-probabilities are used: the statistics that DPO's head computes with them would cost a fifth of a step.
        add_fused_lm_head(self.model.get_base_model() if is_peft_model(self.model) else self.model)
        self.data_collator = Collator(self.data_collator, needs_baseline=args.baseline != "chosen")
        if args.baseline == "initial":
            self._draw_baselines()
        if self.dynamic_labels is not None:
            self._warn_of_single_visits(self.dynamic_labels)

    # ---- data --------------------------------------------------------------------------------------------------------

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        labelled = self.gamma > 0 and self.dynamic_labels is None  # the training data comes first
        if labelled:
            dataset = with_ids(dataset, args.id_column)  # before any row goes: row numbers are those of the user's data
        dataset, skipped = usable(dataset, dataset_name)
        if labelled:
            dataset = self._with_labels(dataset, args)
        counted = isinstance(dataset, Dataset)
        before = len(dataset) if counted else 0
        dataset = super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        if counted and len(dataset) < before:
            skipped["prompt as long as max_length"] = before - len(dataset)
            warnings.warn(
                f"skipped {before - len(dataset)} of the {before} pairs of the {dataset_name} data: their prompt alone has "
                f"max_length={args.max_length} tokens",
                stacklevel=2,
            )
        self.skipped[dataset_name] = skipped
        if counted and args.weighting == "column" and (missing := set(WEIGHTS[:2]) - set(dataset.column_names)):
            raise ValueError(f"weighting='column' needs the columns {' and '.join(sorted(missing))} in the {dataset_name} data")
        if args.baseline not in ("chosen", "initial"):
            dataset = with_baseline_ids(dataset, args.baseline, self._tokenizer)
        return dataset

    def _with_labels(self, dataset: Dataset, args: Any) -> Dataset:
        """Numbers the pairs and lays a label for each."""
        ids = DynamicLabels(dataset[args.id_column], self.gamma).ids  # refuses doubled and missing ones
        groups, first = label_groups(dataset, self.label_sharing)
        init: float | Tensor = 1.0
        if args.label_column is not None:
            if args.label_column not in dataset.column_names:
                raise ValueError(f"label_column={args.label_column!r} is not in the data: {', '.join(dataset.column_names)}")
            init = torch.tensor(dataset[args.label_column], dtype=torch.float32)[first]
        self.dynamic_labels = DynamicLabels([ids[row] for row in first], self.gamma, init)
        return dataset.add_column(POSITION, groups)

    def _set_signature_columns_if_needed(self) -> None:
        fresh = self._signature_columns is None
        super()._set_signature_columns_if_needed()
        if fresh:
            self._signature_columns += [POSITION, BASELINE_IDS, *(WEIGHTS if self.weighting == "column" else ())]

    def _draw_baselines(self) -> None:
        """One answer of the untrained policy for every prompt, the same on all processes."""

        def drawn(dataset: Any) -> Any:
            if dataset is None or isinstance(dataset, dict):
                return dataset and {name: drawn(part) for name, part in dataset.items()}
            if not isinstance(dataset, Dataset):
                raise ValueError("baseline='initial' draws answers beforehand and needs a data set that can be counted")
            return with_drawn_baseline(
                dataset, self.model, self._tokenizer, tokens=self.args.baseline_tokens, seed=self.args.seed,
                batch=self.args.per_device_eval_batch_size, draw=self.accelerator.is_main_process, share=broadcast_object_list,
            )  # fmt: skip

        self.train_dataset, self.eval_dataset = drawn(self.train_dataset), drawn(self.eval_dataset)

    def _warn_of_single_visits(self, labels: DynamicLabels) -> None:
        pairs, args = len(self.train_dataset), self.args
        a_step = args.train_batch_size * args.gradient_accumulation_steps * self.accelerator.num_processes
        visits = (args.max_steps * a_step if args.max_steps > 0 else args.num_train_epochs * pairs) / len(labels)
        if visits < 2:
            warnings.warn(
                f"each label is visited {visits:.1f} times: with one visit, gamma={self.gamma} does no more than multiply the "
                f"preference gradient by {1 - self.gamma:g}. Train for two epochs or more, or share labels",
                stacklevel=3,
            )

    # ---- loss --------------------------------------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        train, mask = self.model.training, inputs["completion_mask"]
        kwargs = {name: value for name, value in inputs.items() if name not in NOT_THE_MODELS} | {"use_cache": False}
        if self.aux_loss_enabled:
            kwargs["output_router_logits"] = True
        answer_ids = inputs["input_ids"].masked_fill(mask == 0, -100)
        outputs = model(**kwargs, labels=answer_ids, fused_lm_head=True)
        # prompt-learning adapters put virtual tokens first
        logps = outputs.log_probs[:, -(mask.shape[1] - 1) :].float().sum(1)  # (rows,)
        blocks = 2 if self.args.baseline == "chosen" else 3
        w = self._weights(inputs, mask[:, 1:].sum(1), blocks)
        (up, down, *other), (w_up, w_down, *w_other) = logps.chunk(blocks), w.chunk(blocks)
        margins = power_margin(up, down, w_up, w_down, self.beta)
        base = {"logp_baseline": other[0], "w_baseline": w_other[0]} if other else {}
        if not bool(torch.isfinite(logps).all()):
            raise FloatingPointError(f"at step {self.state.global_step} an answer's log-probability is NaN or infinite")
        labels = self._visit(inputs[POSITION], margins) if train and self.dynamic_labels is not None else None
        losses = power_loss(up, down, w_up, w_down, self.beta, self.eta, labels, gate_sft=self.args.gate_sft, **base)
        loss = losses.mean()
        mode = "train" if train else "eval"
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss
            self._metrics[mode]["aux_loss"].append(self.accelerator.gather(outputs.aux_loss.detach()).mean().item())
        self._record(mode, inputs["attention_mask"], up, down, w_up, w_down, margins, labels)
        if return_outputs:
            with torch.no_grad():
                outputs = model(**kwargs)
        return (loss, outputs) if return_outputs else loss

    def _weights(self, inputs: dict[str, Any], lengths: Tensor, blocks: int) -> Tensor:
        """One weight a row. ``lengths`` counts the very tokens that enter log π: answer and end token, no prompt."""
        if not bool((lengths > 0).all()):
            raise ValueError(
                f"{int((lengths == 0).sum())} answers of a batch have no token (truncated, or lost by the collator)"
            )
        if callable(self.weighting):
            w = self.weighting(inputs)
            if not isinstance(w, Tensor) or w.shape != lengths.shape:
                raise ValueError(f"the weighting function must give a tensor of shape {tuple(lengths.shape)}, one weight a row")
            w = w.detach().to(lengths.device, torch.float32)
        elif self.weighting == "column":
            if inputs["weights"].shape[1] != blocks:
                raise ValueError(f"weighting='column' with a baseline answer needs the column {WEIGHTS[2]}")
            w = inputs["weights"].T.flatten()
        else:
            return 1 / lengths.float() if self.weighting == "inverse_length" else torch.ones_like(lengths, dtype=torch.float32)
        if not bool((torch.isfinite(w) & (w > 0)).all()):
            raise ValueError("weights must be positive and finite")
        return w

    def _visit(self, positions: Tensor, margins: Tensor) -> Tensor:
        """Updates the labels of the pairs of all processes, and gives those of this process's pairs."""
        labels = self.dynamic_labels
        assert labels is not None
        old = labels.labels[positions.cpu()].to(margins.device) if self.args.update == "after" else None
        # both in one tensor, so that processes talk once: the margin's bits ride along as an integer
        both = torch.stack([positions, margins.detach().float().contiguous().view(torch.int32).long()], 1)
        if self.accelerator.num_processes > 1:
            if not self.accelerator.even_batches:
                both = self.accelerator.pad_across_processes(both, dim=0, pad_index=-1)
            both = self.accelerator.gather(both)
            both = both[both[:, 0] >= 0]
        labels.step_at(both[:, 0], both[:, 1].int().view(torch.float32))
        return labels.labels[positions.cpu()].to(margins.device) if old is None else old

    @torch.no_grad()
    def _record(
        self, mode: str, attended: Tensor, up: Tensor, down: Tensor, w_up: Tensor, w_down: Tensor, margins: Tensor,
        labels: Tensor | None,
    ) -> None:  # fmt: skip
        rewards = self.beta * torch.stack([w_up * up, w_down * down])
        shown = {
            "rewards/chosen": rewards[0],
            "rewards/rejected": rewards[1],
            "rewards/accuracies": (rewards[0] > rewards[1]).float(),
            "rewards/margins": margins,
            "logps/chosen": up,
            "logps/rejected": down,
        }
        if labels is not None:
            shown |= {"labels/mean": labels, "labels/frac_below_half": (labels < 0.5).float()}
        sums = torch.stack([*(value.float().sum() for value in shown.values()), attended.sum().float()])
        totals = self.accelerator.reduce(torch.cat([sums, sums.new_tensor([len(up)])]), "sum").tolist()
        for name, total in zip(shown, totals, strict=False):
            self._metrics[mode][name].append(total / totals[-1])
        if mode == "train":
            self._total_train_tokens += int(totals[-2]) // self._tp_size
        self._metrics[mode]["num_tokens"] = [self._total_train_tokens]

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.dynamic_labels is not None and self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            state = self.dynamic_labels.state_dict()
            if folder.exists():  # save_total_limit may have taken it away again
                save_file({"labels": state["labels"], "visits": state["visits"]}, folder / LABELS_FILE, {"ids": state["ids"]})

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or self.dynamic_labels is None:
            return
        file = os.path.join(checkpoint, LABELS_FILE)
        if not os.path.exists(file):
            raise ValueError(f"{checkpoint} has no {LABELS_FILE}: it was not written by a POWERTrainer with gamma > 0")
        with safe_open(file, "pt") as stored:
            state = {name: stored.get_tensor(name) for name in ("labels", "visits")}
            self.dynamic_labels.load_state_dict({**state, "ids": stored.metadata()["ids"]})


def _check_padding(tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.eos_token is None:
        raise ValueError("the tokenizer has no end token: set tokenizer.eos_token, answers would never learn to end")
    if tokenizer.pad_token is None:
        warnings.warn(
            "the tokenizer has no padding token: its end token is used (masked, so that nothing is learnt from it)",
            stacklevel=3,
        )
