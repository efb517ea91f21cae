"""GPTQ over a whole model: calibration data as users hold it, layer after layer."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .config import LINEARS, RRSConfig
from .linear import RotatedLinear, RRSLinear, weight_scale
from .rotate import linear_parent
from .weights import gptq_round

# What one forward of a layer can feed: the inputs of a later step change once the weights of an earlier one are rounded.
GPTQ_STEPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


def calibration_batches(calib: Any, vocabulary: int) -> list[dict[str, Tensor]]:
    """Token ids in any form that users hold them, as mappings of ``input_ids`` and ``attention_mask``, ``(batch, tokens)``.

    Args:
        calib: Token ids as a tensor, an array or lists, ``(tokens,)`` or ``(batch, tokens)``; a mapping that holds them as
            ``input_ids`` (a tokenizer's output); or an iterable of either.
        vocabulary: Number of token ids.

    Raises:
        ValueError: anything else, empty data, ids outside of the vocabulary; the message names `calib`.

    Example:
        >>> [batch["input_ids"].tolist() for batch in calibration_batches([[1, 2, 3], [4]], vocabulary=5)]
        [[[1, 2, 3]], [[4]]]
    """
    batches = []
    for where, item in _items(calib):
        if not isinstance(item, Mapping):
            item = {"input_ids": item}
        if "input_ids" not in item:
            raise ValueError(f"{where} has no 'input_ids', only {sorted(map(str, item))}")
        batch = {"input_ids": _matrix(item["input_ids"], where)}
        ids = batch["input_ids"]
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise ValueError(f"{where} must hold integer token ids, got {ids.dtype}")
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise ValueError(f"{where} has ids {ids.min().item()} to {ids.max().item()}, the model knows 0 to {vocabulary - 1}")
        if item.get("attention_mask") is not None:
            mask = _matrix(item["attention_mask"], f"the attention_mask of {where}")
            if mask.shape != ids.shape or not mask.any():
                raise ValueError(
                    f"the attention_mask of {where} must have the ids' shape {tuple(ids.shape)} and count a token, "
                    f"got {tuple(mask.shape)} with {int(mask.sum())} counted"
                )
            batch["attention_mask"] = mask
        batches.append(batch)
    if not batches:
        raise ValueError("calib is empty: GPTQ needs at least one sequence of token ids")
    return batches


def _items(calib: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(calib, Mapping):
        return _rows("calib", calib)
    if isinstance(calib, (str, bytes)) or not (isinstance(calib, Iterable) or hasattr(calib, "__getitem__")):
        raise ValueError(f"calib must hold token ids (tensors, lists or a tokenizer's output), got {type(calib).__name__}")
    dimensions = getattr(calib, "ndim", None)  # of a tensor or an array
    if dimensions is not None and dimensions not in (1, 2):
        raise ValueError(f"calib must be (tokens,) or (batch, tokens) where it is one tensor, got shape {tuple(calib.shape)}")
    items = list(calib) if dimensions != 1 else [calib]
    if items and all(isinstance(item, int) for item in items):
        items = [items]  # one sequence as a list
    return [row for i, item in enumerate(items) for row in _rows(f"calib[{i}]", item)]


def _rows(where: str, item: Any) -> list[tuple[str, Any]]:
    """A tokenizer's output for several texts without ``return_tensors`` holds lists of different lengths: one row each."""
    ids = item.get("input_ids") if isinstance(item, Mapping) else None
    if not isinstance(ids, (list, tuple)) or not ids or not all(isinstance(row, (list, tuple)) for row in ids):
        return [(where, item)]
    masks = item.get("attention_mask") or [None] * len(ids)
    if len(masks) != len(ids):
        raise ValueError(f"the attention_mask of {where} has {len(masks)} rows, its input_ids have {len(ids)}")
    pairs = enumerate(zip(ids, masks, strict=True))
    return [(f"{where}[{i}]", {"input_ids": row, "attention_mask": mask}) for i, (row, mask) in pairs]


def _matrix(value: Any, where: str) -> Tensor:
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError("text: tokenise it first")
        found = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{where} must be token ids or a mapping with input_ids, got {type(value).__name__} ({error})"
        ) from None
    if found.ndim not in (1, 2) or not found.numel():
        raise ValueError(f"{where} must be (tokens,) or (batch, tokens) and not empty, got shape {tuple(found.shape)}")
    return found if found.ndim == 2 else found[None]


def gptq_layers(model: PreTrainedModel, layers: Any, config: RRSConfig, batches: list[dict[str, Tensor]]) -> None:
    """Layer after layer: the Hessians see what the rounded layers before them produce, activations unrounded."""
    hidden, arguments, valid = _first_inputs(model, layers, batches)
    for depth, layer in enumerate(layers):
        rounded: dict[str, Tensor] = {}
        scales = {name: weight_scale(getattr(linear_parent(layer, name), name).weight, config) for name in LINEARS}
        for step in GPTQ_STEPS:
            linears = {name: getattr(linear_parent(layer, name), name) for name in step}
            hessians = _hessians(layer, linears, hidden, [kwargs[depth] for kwargs in arguments], valid)
            for name, linear in linears.items():
                rounded[name] = gptq_round(linear.weight, hessians[name], scales[name])
                linear.weight.copy_(rounded[name] * scales[name])
        hidden = [_run(layer, x, kwargs[depth]) for x, kwargs in zip(hidden, arguments, strict=True)]
        for name in LINEARS:
            parent = linear_parent(layer, name)
            done = RRSLinear.from_linear(getattr(parent, name), config, name=name, rounded=(rounded[name], scales[name]))
            setattr(parent, name, done)


def _hessians(
    layer: nn.Module,
    linears: dict[str, nn.Linear],
    hidden: list[Tensor],
    arguments: list[dict[str, Any]],
    valid: list[Tensor | None],
) -> dict[str, Tensor]:
    sums: dict[str, Tensor] = {}
    counted: Tensor | None = None  # of the batch at work: padding is no activation

    def accumulate(name: str) -> Any:
        def hook(linear: nn.Linear, args: tuple[Tensor, ...]) -> None:
            x = linear.online(args[0], linear.online_base) if isinstance(linear, RotatedLinear) else args[0]
            x = x.reshape(-1, x.shape[-1]).float() if counted is None else x[counted].float()
            sums[name] = sums.get(name, 0) + (x.T @ x).double()

        return hook

    handles = [linear.register_forward_pre_hook(accumulate(name)) for name, linear in linears.items()]
    try:
        for x, kwargs, mask in zip(hidden, arguments, valid, strict=True):
            counted = mask
            _run(layer, x, kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return sums


def _first_inputs(
    model: PreTrainedModel, layers: nn.ModuleList, batches: list[dict[str, Tensor]]
) -> tuple[list[Tensor], list[list[dict[str, Any]]], list[Tensor | None]]:
    """Each batch's input of the first layer, the keyword arguments of every layer (masks, positions), its tokens that count."""
    hidden: list[Tensor] = []
    arguments: list[list[dict[str, Any]]] = []

    def remember(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if layer is layers[0]:
            hidden.append(args[0] if args else kwargs["hidden_states"])
            arguments.append([])
        arguments[-1].append({name: value for name, value in kwargs.items() if name != "hidden_states"})

    handles = [layer.register_forward_pre_hook(remember, with_kwargs=True) for layer in layers]
    batches = [{name: value.to(model.device) for name, value in batch.items()} for batch in batches]
    try:
        for batch in batches:
            model(**batch, use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
    return hidden, arguments, [b["attention_mask"].bool() if "attention_mask" in b else None for b in batches]


def _run(layer: nn.Module, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
    out = layer(x, **kwargs)
    return out[0] if isinstance(out, tuple) else out
