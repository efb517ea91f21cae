"""What the two trainers share: the reference's start, its log-probabilities, and what is logged and kept."""

import logging
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from .callback import TrustRegionCallback
from .lora import POLICY, add_reference_adapter
from .reference import LogpCache, Recorder, WithIds, answer_logps, frozen_copy, rows_of, summed
from .rows import keep_usable, report

logger = logging.getLogger(__name__)

DRIFT_MEMORY = 0.9  # of the running mean that kl_budget looks at; it starts anew at each update

Mixed: Any = object  # any of TRL's trainers; type checkers take its attributes as given


class TrustRegion(ABC, Mixed):
    """Mixed into a TRL trainer. The trainer's own loss runs unchanged, on reference log-probabilities given to it here.

    A trainer says which configuration it takes (`config_type`), which rows it can use (`fault`), what its loss calls the
    reference's numbers (`given_names`), and how rewards against the initial model are summed up (`_sft_rewards`).
    """

    config_type: type
    given_names: tuple[str, ...]
    fault: Any
    data_collator: Any
    _signature_columns: Any

    def __init__(self, model: Any, ref_model: Any = None, args: Any = None, **kwargs: Any):
        self.skipped: dict[str, dict[str, int]] = defaultdict(dict)
        """Rows left out, by data set and reason."""
        args = self.config_type() if args is None else args
        if not isinstance(args, self.config_type):
            raise TypeError(
                f"args must be a {self.config_type.__name__}, got {type(args).__name__}: it has the schedule of the reference"
            )
        _check_tokenizer(kwargs.get("processing_class"))
        _check_models(model, ref_model, kwargs.get("peft_config"))
        data = kwargs.get("train_dataset")
        if isinstance(data, Dataset) and len(data) == 0:
            raise ValueError("the train data set has no usable row: it is empty")
        if isinstance(data, Dataset):  # here, since TRL takes the first row for the pattern of all
            kwargs["train_dataset"], self.skipped["train"] = keep_usable(data, type(self).fault, "train")
        if (
            ref_model is None
            and isinstance(model, nn.Module)
            and not isinstance(model, PeftModel)
            and not kwargs.get("peft_config")
        ):
            ref_model = frozen_copy(model)
        super().__init__(model=model, ref_model=ref_model, args=args, **kwargs)
        if self._is_vision_dataset:
            raise ValueError("train_dataset must be text alone, got images: the reference's log-probabilities are of text")
        if self.ref_model is not None:
            self.ref_model.requires_grad_(False).eval()  # TRL leaves a reference that was passed in the mode it came in
        else:
            add_reference_adapter(self.model)
        if self.args.exact_lora and self.ref_model is not None:
            raise ValueError("exact_lora=True is for PEFT models; this one has no adapter")
        self.data_collator = WithIds(self.data_collator)
        self._cache = self._make_cache()
        self.moving = TrustRegionCallback(
            self.ref_model,
            mode=self.args.tr_mode,
            alpha=self.args.tr_alpha,
            every=self.args.tr_sync_steps,
            start_step=self.args.tr_start_step,
            kl_budget=self.args.tr_kl_budget,
            drift=lambda: self._drift_since()[0],
            exact_lora=self.args.exact_lora,
        )
        self.add_callback(self.moving)

    def _make_cache(self) -> LogpCache | None:
        if not self.args.cache_ref_logps:
            return None
        if not isinstance(self.train_dataset, Dataset):
            raise ValueError("cache_ref_logps=True needs a data set with a length, not a stream")
        if self.is_fsdp_enabled:
            raise ValueError("cache_ref_logps=True: under FSDP all processes must run the reference together, hits or not")
        return LogpCache(len(self.train_dataset), len(self.given_names))

    # ---- data -----------------------------------------------------------------------------------------------------------

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        if dataset_name != "train" or not isinstance(dataset, Dataset):
            dataset, self.skipped[dataset_name] = keep_usable(dataset, type(self).fault, dataset_name)
        prepared = super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        if isinstance(prepared, Dataset):
            prepared = self._count_dropped(prepared, len(dataset), args, dataset_name)
            if args.cache_ref_logps and dataset_name == "train":
                prepared = prepared.add_column("example_id", list(range(len(prepared))))
        return prepared

    def _count_dropped(self, prepared: Dataset, before: int, args: Any, name: str) -> Dataset:
        """What TRL dropped without a word, and what its preparation left without a signal."""
        skipped: dict[str, int] = {}
        per_row = 2 if before and "completion_ids" in prepared.column_names and len(prepared) > before else 1
        if len(prepared) < per_row * before:
            skipped["prompt fills max_length"] = per_row * before - len(prepared)
        prepared, reasons = self._without_signal(prepared, args)
        skipped |= reasons
        report(skipped, per_row * before, name)
        self.skipped[name] = {**self.skipped[name], **skipped}
        return prepared

    def _without_signal(self, prepared: Dataset, args: Any) -> tuple[Dataset, dict[str, int]]:
        return prepared, {}

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if self._signature_columns is not None and "example_id" not in self._signature_columns:
            self._signature_columns = [*self._signature_columns, "example_id"]

    # ---- the loss -------------------------------------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
        """TRL's loss, on the reference's log-probabilities; then what is checked, added and logged."""
        inputs = dict(inputs)
        ids = inputs.pop("example_id", None)
        self._start_probe()
        given = self._reference_logps(inputs, ids)
        recorder = Recorder(model)
        self.precompute_ref_logps = True  # for the length of this call: it makes TRL read them from the batch
        try:
            result = super()._compute_loss(recorder, inputs | given, return_outputs)
        finally:
            self.precompute_ref_logps = False
        loss, outputs = result if return_outputs else (result, None)
        policy = summed(recorder.outputs[-2 if return_outputs else -1].log_probs, inputs["input_ids"])
        loss = loss + self._own_loss(policy, given, inputs)
        self._refuse_non_finite(loss, policy, given)
        if self.model.training:
            self._follow(policy.detach(), given, inputs)
        return (loss, outputs) if return_outputs else loss

    def _own_loss(self, policy: Tensor, given: dict[str, Tensor], inputs: dict[str, Any]) -> Tensor | float:
        return 0.0

    def _reference_logps(self, inputs: dict[str, Any], ids: Tensor | None) -> dict[str, Tensor]:
        if self._cache is None or ids is None or not self.model.training:
            values: Sequence[Tensor | None] = self._run_reference(inputs)
        else:
            values = self._cached_reference(inputs, ids.cpu(), self._cache)
        return {name: value for name, value in zip(self.given_names, values, strict=True) if value is not None}

    def _cached_reference(self, inputs: dict[str, Any], ids: Tensor, cache: LogpCache) -> list[Tensor]:
        version = self.moving.updater.syncs if self.moving.updater else 0
        rows = cache.missing(ids, version).nonzero()[:, 0]
        device = inputs["input_ids"].device
        fresh = torch.zeros(len(ids), len(self.given_names), device=device)
        if len(rows):
            values = [v for v in self._run_reference(rows_of(inputs, rows, len(ids))) if v is not None]
            fresh[rows.to(device), : len(values)] = torch.stack(values, 1).float()
        cache.hits += len(ids) - len(rows)
        known = ~cache.missing(ids, version)
        fresh[known.to(device)] = cache.get(ids[known]).to(device)
        everyones_ids, everyones = self.accelerator.gather((ids.to(device), fresh))
        cache.put(everyones_ids.cpu(), everyones.cpu(), version)
        return list(fresh.unbind(1))

    def _run_reference(self, inputs: dict[str, Any]) -> tuple[Tensor | None, ...]:
        if self.ref_model is not None:
            return self.compute_ref_log_probs(self.ref_model, inputs)
        with evaluating(self.model):  # the adapter of the reference has no dropout, but the layers below it may
            return self.compute_ref_log_probs(self.model, inputs)

    def _refuse_non_finite(self, loss: Tensor, policy: Tensor, given: dict[str, Tensor]) -> None:
        """TRL would log a NaN loss as 0 (logging_nan_inf_filter), and KTO's average leaves NaN out."""
        theirs = torch.stack([value.detach().isfinite() for value in given.values()]).all(0)
        fine = loss.detach().isfinite() & policy.detach().isfinite().all() & theirs.all()
        if not self.accelerator.gather(fine.reshape(1)).all():
            bad, refs = int((~policy.detach().isfinite()).sum()), int((~theirs).sum())
            raise FloatingPointError(
                f"at optimiser step {self.state.global_step + 1} the loss is {loss.detach().item()}; log-probabilities are not "
                f"finite for {bad} of {len(policy)} answers under the policy and {refs} of {len(theirs)} under the reference"
            )

    # ---- what is logged -------------------------------------------------------------------------------------------------

    def _follow(self, policy: Tensor, given: dict[str, Tensor], inputs: dict[str, Any]) -> None:
        syncs = self.moving.updater.syncs if self.moving.updater else 0
        log_ratio = self._drift_rows(policy, given, inputs)
        mean = self.accelerator.gather(log_ratio.mean().reshape(1)).nanmean().item()
        if not math.isnan(mean):  # a KTO batch may hold no desirable answer
            drift, since = self._drift_since()
            new = mean if since != syncs else DRIFT_MEMORY * drift + (1 - DRIFT_MEMORY) * mean
            self.moving.kept["drift"] = torch.tensor([new, syncs], dtype=torch.float64)
        self._metrics["train"]["tr/syncs"] = [syncs]
        self._metrics["train"]["tr/drift"] = [self._drift_since()[0]]

    def _drift_since(self) -> tuple[float, int]:
        """The running mean that ``kl_budget`` looks at, and the update after which it began; in the checkpoint."""
        if "drift" not in self.moving.kept:
            return 0.0, -1
        drift, since = self.moving.kept["drift"].tolist()
        return drift, int(since)

    @abstractmethod
    def _drift_rows(self, policy: Tensor, given: dict[str, Tensor], inputs: dict[str, Any]) -> Tensor:
        """Log-ratios of the good answers, ``(n,)``."""

    def _probe_batches(self) -> list[dict[str, Any]]:
        size = self.args.per_device_train_batch_size
        rows = [self.train_dataset[i] for i in range(min(self.args.tr_sft_probe, len(self.train_dataset)))]
        parts = [rows[i : i + size] for i in range(0, len(rows), size)]
        return [self._prepare_inputs(self.data_collator(part)) for part in parts]

    @torch.no_grad()
    def _probe_logps(self) -> Tensor:
        with evaluating(self.model), self.accelerator.autocast():
            return torch.cat([answer_logps(self.model, batch) for batch in self._probe_batches()]).float()

    def _start_probe(self) -> None:
        """Before the first step: what the initial model thinks of the probe. After a resume it comes from the checkpoint."""
        off = not self.args.tr_sft_probe or not isinstance(self.train_dataset, Dataset)
        if off or self.is_fsdp_enabled or self.is_deepspeed_enabled or "sft_logps" in self.moving.kept:
            return
        if self.model.training and self.state.global_step == 0:
            self.moving.kept["sft_logps"] = self._probe_logps()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        start = self.moving.kept.get("sft_logps")
        if self.model.training and "loss" in logs and start is not None:
            gained = self.args.beta * (self._probe_logps() - start.to(self.accelerator.device))
            for name, value in self._sft_rewards(gained).items():
                self._metrics["train"][f"rewards_sft/{name}"] = [value]
        super().log(logs, start_time)

    @abstractmethod
    def _sft_rewards(self, gained: Tensor) -> dict[str, float]:
        """What is logged of the probe's answers: their rewards against the initial model, ``(answers,)``, summed up."""

    # ---- resuming -------------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.moving.resume_folder = resume_from_checkpoint
        super()._load_from_checkpoint(resume_from_checkpoint, model)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for the length of a block; then each module's own again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _check_tokenizer(tokenizer: Any) -> None:
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return  # none yet: TRL loads it; or of a type that TRL refuses
    if tokenizer.eos_token is None:
        raise ValueError("the tokenizer has no end token: set tokenizer.eos_token, every answer is closed with it")
    if tokenizer.pad_token is None:
        logger.warning("the tokenizer has no padding token: batches are padded with its end token, which the loss leaves out")


def _check_models(model: Any, ref_model: Any, peft_config: Any) -> None:
    if ref_model is not None and ref_model is model:
        raise ValueError("ref_model is the policy itself: leave it out, and a frozen copy is taken")
    if ref_model is not None and (isinstance(model, PeftModel) or peft_config is not None):
        raise ValueError("a PEFT model has its reference inside, as a second adapter: leave ref_model out")
    if isinstance(model, PeftModel) and POLICY not in model.peft_config:
        raise ValueError(f"the adapter that is trained must be called {POLICY!r}, got {', '.join(model.peft_config)}")
