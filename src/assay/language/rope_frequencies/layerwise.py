"""p-RoPE in some layers of a model whose layers share their frequencies."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .frequencies import frequency_tables, p_rope_inv_freq
from .layers import HELD, rotary_layers


class HoldPairs:
    """A forward pre-hook on attention: some pairs are given the rotation of position 0."""

    def __init__(self, columns: Tensor, scale: float) -> None:
        self.columns = columns  # (2 · pairs,) bool, as the layer's cosines are laid out
        self.scale = scale

    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        cos, sin = kwargs["position_embeddings"]
        columns = self.columns.to(cos.device)
        return args, kwargs | {"position_embeddings": (cos.masked_fill(columns, self.scale), sin.masked_fill(columns, 0.0))}


def hold_layers(model: PreTrainedModel, p: float, *, reverse: bool, layers: Collection[int]) -> None:
    """Stops the pairs in `layers` that p-RoPE stops; pairs that stand still already stay so. A later call replaces it.

    Raises:
        ValueError: an index of no layer; frequencies as `frequency_tables` refuses them.
    """
    found = rotary_layers(model)
    wrong = sorted(set(layers) - set(range(len(found))))
    if wrong:
        raise ValueError(f"layers must be in 0 … {len(found) - 1}, got {', '.join(map(str, wrong))}")
    head_dim = frequency_tables(model)[0].head_dim
    held = p_rope_inv_freq(head_dim, 10_000.0, p, reverse) == 0  # which pairs stop does not depend on the base
    for index in layers:
        layer = found[index]
        module: Any = layer.attention
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, HoldPairs):
                del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]
        columns = torch.cat([held, held]) if layer.doubled == "half" else held.repeat_interleave(2)
        module.register_forward_pre_hook(HoldPairs(columns, layer.scale), with_kwargs=True)
        setattr(module, HELD, held)
