"""A preference data set made ready for POWER: unusable pairs counted out, pairs numbered, baseline answers beside them."""

import json
import warnings
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch
from datasets import Dataset, IterableDataset

POSITION, BASELINE_IDS = "pair_position", "baseline_ids"
WEIGHTS = ("chosen_weight", "rejected_weight", "baseline_weight")


def why_unusable(row: dict[str, Any]) -> str:
    """``""`` for a pair one can learn from, else what is wrong with it.

    Example:
        >>> why_unusable({"chosen": "so", "rejected": "so "}), why_unusable({"chosen": "so", "rejected": "no"})
        ('identical answers', '')
    """
    if "prompt" in row and row["prompt"] is None:
        return "missing prompt"
    chosen, rejected = (_text(row.get(name)) for name in ("chosen", "rejected"))
    if chosen is None or rejected is None:
        return "missing answer"
    if not chosen or not rejected:
        return "empty answer"
    return "identical answers" if chosen == rejected else ""


def _text(answer: Any) -> str | None:
    """Of a text or a list of messages, without the space around it; None where there is none.

    The last message is the answer; it may call tools instead of saying something, and so may those before it.
    """
    if isinstance(answer, str):
        return answer.strip()
    if not isinstance(answer, list) or not answer or any(not isinstance(message, dict) for message in answer):
        return None
    said = [(c.strip() if isinstance(c := m.get("content"), str) else c, m.get("tool_calls") or None) for m in answer]
    content, calls = said[-1]
    if not content and not calls:
        return None if content is None else ""
    return json.dumps(said, default=str)


def usable(dataset: Any, name: str) -> tuple[Any, dict[str, int]]:
    """The data set without pairs that lack a prompt or an answer, or have one answer twice, and how many those were, by reason.

    A stream cannot be counted beforehand: there the first such pair raises when it comes.

    Raises:
        ValueError: not one usable pair.
    """
    if isinstance(dataset, IterableDataset):

        def refuse(row: dict[str, Any]) -> dict[str, Any]:
            if reason := why_unusable(row):
                raise ValueError(f"the streamed {name} data has a pair that cannot be used: {reason}. Filter it beforehand")
            return row

        return dataset.map(refuse), {}
    columns = [name for name in ("prompt", "chosen", "rejected") if name in dataset.column_names]
    reasons = [why_unusable(dict(zip(columns, row, strict=True))) for row in zip(*(dataset[c] for c in columns), strict=True)]
    skipped = dict(Counter(reason for reason in reasons if reason))
    if not skipped:
        return dataset, {}
    kept = [row for row, reason in enumerate(reasons) if not reason]
    if not kept:
        raise ValueError(f"the {name} data has no usable pair among {len(reasons)}: {skipped}")
    warnings.warn(f"skipped {sum(skipped.values())} of the {len(reasons)} pairs of the {name} data: {skipped}", stacklevel=2)
    return dataset.select(kept), skipped


def with_ids(dataset: Dataset, column: str) -> Dataset:
    """With row numbers as ids, where the data brings none."""
    return dataset if column in dataset.column_names else dataset.add_column(column, list(range(len(dataset))))


def label_groups(dataset: Dataset, sharing: str | Callable[[dict[str, Any]], Hashable]) -> tuple[list[int], list[int]]:
    """Which label each pair has, and the row of each label's first pair."""
    if sharing == "none":
        return list(range(len(dataset))), list(range(len(dataset)))

    def key_of(row: dict[str, Any]) -> Hashable:
        if callable(sharing):
            return sharing(row)
        if "prompt" not in row:
            raise ValueError("label_sharing='prompt' needs a column 'prompt'")
        return json.dumps(row["prompt"])

    first: dict[Hashable, int] = {}
    groups = [first.setdefault(key_of(row), len(first)) for row in dataset]
    starts: dict[int, int] = {}
    for row, group in enumerate(groups):
        starts.setdefault(group, row)
    return groups, [starts[group] for group in range(len(first))]


def with_baseline_ids(dataset: Any, column: str, tokenizer: Any) -> Any:
    """With the tokens of the baseline answers, the end token last."""

    def tokens(row: dict[str, Any]) -> dict[str, Any]:
        answer = row.get(column)
        if not isinstance(row.get("prompt"), str) or not isinstance(answer, str) or not answer.strip():
            raise ValueError(
                f"baseline={column!r} takes plain texts: every pair needs a 'prompt' and a {column!r} that is not empty"
            )
        if tokenizer.eos_token and not answer.endswith(tokenizer.eos_token):
            answer += tokenizer.eos_token
        whole, head = tokenizer(row["prompt"] + answer)["input_ids"], row["prompt_ids"]
        if whole[: len(head)] != head:  # tokens merge across the boundary
            whole = head + tokenizer(answer, add_special_tokens=False)["input_ids"]
        return {BASELINE_IDS: whole[len(head) :]}

    return dataset.map(tokens)


class Collator:
    """TRL's collator, with the pairs' positions and weights, and the baseline answers as a third block of rows."""

    def __init__(self, inner: Callable[[list[dict[str, Any]]], dict[str, Any]], needs_baseline: bool = False):
        self.inner, self.needs_baseline = inner, needs_baseline

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        n = len(examples)
        if not self.needs_baseline:
            batch = self.inner(examples)
        else:
            if any(BASELINE_IDS not in e for e in examples):
                raise ValueError(
                    "pairs have no baseline answers: with baseline='initial' evaluation data must be given when the trainer is "
                    "made, before the model changes"
                )
            third = [{**e, "chosen_ids": e[BASELINE_IDS], "rejected_ids": e[BASELINE_IDS]} for e in examples]
            batch = self.inner([*examples, *third])  # rows: chosen, baseline, rejected, baseline again
            rows = torch.cat([torch.arange(n), torch.arange(2 * n, 3 * n), torch.arange(n, 2 * n)])
            batch = {name: value[rows] for name, value in batch.items()}
        if POSITION in examples[0]:
            batch[POSITION] = torch.tensor([e[POSITION] for e in examples])
        given = [name for name in WEIGHTS[: 3 if self.needs_baseline else 2] if name in examples[0]]
        if given:
            batch["weights"] = torch.tensor([[e[name] for name in given] for e in examples], dtype=torch.float32)
        return batch
