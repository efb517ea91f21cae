"""Which rows of a preference data set can be trained on; those that cannot are counted by reason, none goes silently."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from datasets import Dataset, IterableDataset

logger = logging.getLogger(__name__)


def pair_fault(row: Mapping[str, Any]) -> str | None:
    """Why a row is no preference pair, as ``missing answer`` or ``identical answers``; None if it is one.

    Example:
        >>> pair_fault({"prompt": "It is", "chosen": " good.", "rejected": " good."})
        'identical answers'
    """
    prompt, chosen, rejected = row.get("prompt", ""), row.get("chosen"), row.get("rejected")
    if prompt is None:
        return "missing prompt"
    if chosen is None or rejected is None:
        return "missing answer"
    if not all(isinstance(answer, str | list | tuple) for answer in (chosen, rejected)):
        return "answer that is no text"
    if not _text(chosen).strip() or not _text(rejected).strip():
        return "empty answer"
    return "identical answers" if _text(chosen).strip() == _text(rejected).strip() else None


def answer_fault(row: Mapping[str, Any]) -> str | None:
    """Why a row is no labelled answer; rows that hold a pair are judged as one.

    Example:
        >>> answer_fault({"prompt": "It is", "completion": " good.", "label": None})
        'missing label'
    """
    if "chosen" in row and "rejected" in row:
        return pair_fault(row)
    if row.get("prompt", "") is None:
        return "missing prompt"
    if row.get("completion") is None:
        return "missing answer"
    if row.get("label") is None:
        return "missing label"
    if not isinstance(row["completion"], str | list | tuple):
        return "answer that is no text"
    return None if _text(row["completion"]).strip() else "empty answer"


def keep_usable(dataset: Any, fault: Callable[[Mapping[str, Any]], str | None], name: str) -> tuple[Any, dict[str, int]]:
    """The data set without rows that have a fault, and how many had which.

    Raises:
        ValueError: no row is left. From a stream, which cannot be counted beforehand, the first faulty row raises.
    """
    if isinstance(dataset, IterableDataset):
        return dataset.map(_Refuse(fault, name), with_indices=True), {}
    if not isinstance(dataset, Dataset):
        return dataset, {}  # TRL names the types it takes
    faults = [fault(row) for row in dataset]
    skipped = {reason: faults.count(reason) for reason in sorted({f for f in faults if f})}
    report(skipped, len(faults), name)
    if skipped:
        dataset = dataset.select([i for i, reason in enumerate(faults) if reason is None])
    return dataset, skipped


def report(skipped: Mapping[str, int], total: int, name: str) -> None:
    """Warns of skipped rows; raises where all were."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
    if sum(skipped.values()) >= total:
        raise ValueError(f"the {name} data set has no usable row: {reasons or 'it is empty'}")
    if skipped:
        logger.warning("%d of %d rows of the %s data set are skipped: %s", sum(skipped.values()), total, name, reasons)


class _Refuse:
    """For streams; a class, so that data-loading processes can have it."""

    def __init__(self, fault: Callable[[Mapping[str, Any]], str | None], name: str):
        self.fault, self.name = fault, name

    def __call__(self, row: dict[str, Any], index: int) -> dict[str, Any]:
        if reason := self.fault(row):
            raise ValueError(f"row {index} of the {self.name} stream cannot be used: {reason}; filter the stream beforehand")
        return row


def _text(answer: Any) -> str:
    """Of a plain answer, or of all turns of a conversational one."""
    if isinstance(answer, str):
        return answer
    parts = [turn.get("content") for turn in answer]
    return "\n".join(p if isinstance(p, str) else "" if p is None else str(p) for p in parts)
