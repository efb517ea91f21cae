"""Between a teacher's class ids and a student's columns."""

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

NOT_SELECTED = -1


def remap_labels(labels: Tensor, selected: Sequence[int], open_set: bool) -> Tensor:
    """A student's targets: the position of each label in `selected`; in an open set K for all others.

    Args:
        labels: Teacher class ids ``(*)``, integers ≥ 0; in an open set also −1, as `predict_open` gives it.
        selected: The K class ids that the student keeps, in the order of its columns.
        open_set: Whether the student has a last column for "not selected".

    Returns:
        ``(*)`` int64 in ``[0, K)``, or ``[0, K]`` in an open set. `labels` is left as it was.

    Raises:
        ValueError: ids that are negative, repeated or no integers; without `open_set`, a label that is not selected.

    Example:
        >>> remap_labels(torch.tensor([8, 3, 5]), [3, 8, 14], open_set=True)
        tensor([1, 0, 3])
    """
    columns = column_of(checked_selected(selected))
    check_integers("labels", labels)
    targets = to_columns(labels, columns)
    outside = int((targets == columns.max()).sum())
    if outside and not open_set:
        raise ValueError(f"labels must be among selected in a closed set, {outside} of {labels.numel()} are not")
    if labels.numel() and int(labels.min()) < NOT_SELECTED:
        raise ValueError(f"labels must be class ids, or -1 for not selected, got {int(labels.min())}")
    return targets


def predict_open(student_logits: Tensor, selected: Sequence[int]) -> Tensor:
    """The teacher's class id for each row of an open-set student's logits, or −1 for "not selected".

    Args:
        student_logits: ``(*, K + 1)``, the last column for "not selected".
        selected: The K class ids in the order of the columns.

    Returns:
        ``(*)`` int64.

    Raises:
        ValueError: another number of columns than K + 1, or NaN in them.

    Example:
        >>> predict_open(torch.tensor([[0.0, 2.0, 1.0], [0.0, 1.0, 2.0]]), [3, 8])
        tensor([ 8, -1])
    """
    ids = checked_selected(selected)
    if student_logits.ndim < 1 or student_logits.shape[-1] != len(ids) + 1:
        raise ValueError(
            f"student_logits must be (*, {len(ids) + 1}) for {len(ids)} selected classes and one more, "
            f"got shape {tuple(student_logits.shape)}"
        )
    if student_logits.isnan().any():
        raise ValueError("student_logits must not be NaN")
    return torch.tensor([*ids, NOT_SELECTED], device=student_logits.device)[student_logits.argmax(-1)]


def checked_selected(selected: Sequence[int]) -> tuple[int, ...]:
    """Distinct class ids ≥ 0, at least one.

    Raises:
        ValueError: anything else.
    """
    try:
        listed = selected.tolist() if isinstance(selected, Tensor) else list(selected)
        if any(isinstance(i, bool) for i in listed):  # a mask would pass for classes 0 and 1
            raise TypeError
        ids = tuple(operator.index(i) for i in listed)
    except TypeError:
        raise ValueError(f"selected must be class ids, whole numbers, got {selected}") from None
    if not ids or min(ids) < 0 or len(set(ids)) < len(ids):
        raise ValueError(f"selected must be distinct class ids ≥ 0, at least one, got {listed}")
    return ids


def check_integers(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"{name} must be integers, got {tensor.dtype}")


def column_of(ids: tuple[int, ...]) -> Tensor:
    """A table from class id to column; its last entry, for every id beyond, is K, as are those between."""
    table = torch.full((max(ids) + 2,), len(ids))
    table[list(ids)] = torch.arange(len(ids))
    return table


def to_columns(labels: Tensor, table: Tensor) -> Tensor:
    return table.to(labels.device)[labels.long().clamp(-1, len(table) - 1)]  # −1 is the last entry
