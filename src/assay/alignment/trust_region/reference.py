"""Log-probabilities of a reference that moves: its frozen start, a cache that knows when they are stale, what was computed."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def frozen_copy(model: nn.Module) -> nn.Module:
    """A copy of the policy's own weights as they are now, in evaluation mode, that takes no gradient.

    TRL would load ``config._name_or_path`` instead, which fails for a model without a path and gives the wrong reference for
    one that has changed since it was loaded.
    """
    twin = copy.deepcopy(model)
    if not hasattr(model, "_hf_hook"):
        vars(twin).pop("forward", None)  # TRL patches it on the instance; the copy's would run the policy's weights
    return twin.requires_grad_(False).eval()


class Recorder:
    """Stands in for a model in a trainer's loss and keeps what its calls returned."""

    def __init__(self, model: Any):
        self.model = model
        self.outputs: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.outputs.append(self.model(*args, **kwargs))
        return self.outputs[-1]


class LogpCache:
    """Reference log-probabilities by example, as long as the reference stands still.

    Args:
        examples: How many there are.
        columns: Numbers of each.

    Example:
        >>> cache = LogpCache(3, columns=1)
        >>> cache.put(torch.tensor([0, 2]), torch.tensor([[-1.0], [-2.0]]), version=0)
        >>> cache.missing(torch.tensor([0, 1]), version=0), cache.missing(torch.tensor([0]), version=1)
        (tensor([False,  True]), tensor([True]))
    """

    def __init__(self, examples: int, columns: int):
        self.values = torch.zeros(examples, columns)
        self.version = torch.full((examples,), -1)
        self.hits = 0
        """Rows that were not computed again."""

    def missing(self, ids: Tensor, version: int) -> Tensor:
        return self.version[ids] != version

    def put(self, ids: Tensor, values: Tensor, version: int) -> None:
        self.values[ids] = values.float()
        self.version[ids] = version

    def get(self, ids: Tensor) -> Tensor:
        return self.values[ids]


class WithIds:
    """A collator that also hands on each example's ``example_id``."""

    def __init__(self, collate: Any):
        self.collate = collate

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch = dict(self.collate(examples))
        if all("example_id" in example for example in examples):
            batch["example_id"] = torch.tensor([example["example_id"] for example in examples])
        return batch


def rows_of(batch: Mapping[str, Any], rows: Tensor, size: int) -> dict[str, Any]:
    """Some examples of a collated batch of ``size``; a tensor with twice as many rows holds the rejected answers below."""
    picked = {}
    for name, value in batch.items():
        index = rows.to(value.device)
        picked[name] = value[torch.cat([index, index + size])] if len(value) == 2 * size else value[index]
    return picked


def answer_logps(model: Any, batch: Mapping[str, Any]) -> Tensor:
    """Summed log-probabilities of a collated batch's answers, by a model with TRL's fused head: ``(rows,)``."""
    labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    logps = model(**inputs, labels=labels, use_cache=False, fused_lm_head=True).log_probs
    return summed(logps, batch["input_ids"])


def summed(log_probs: Tensor, input_ids: Tensor) -> Tensor:
    """Sums over answer tokens; prompt-learning adapters put positions in front, which are left out."""
    return log_probs[:, -(input_ids.shape[1] - 1) :].sum(1)
