"""Queries and keys as attention sees them, in every layer of a model: to look at, or to change, while a block lasts."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

NAME = "rope_frequencies_tap"


class Call(NamedTuple):
    """One layer's attention: queries and keys after their rotation.

    Shapes: query ``(batch, heads, tokens, head_dim)``; key ``(batch, kv_heads, tokens, head_dim)``, or with one key head
    for each query head; cos and sin ``(batch, tokens, rotated)``, None where the layer was given none; visible
    ``(batch | 1, 1, tokens, tokens)``, what a query may look at, None for all.
    """

    query: Tensor
    key: Tensor
    cos: Tensor | None
    sin: Tensor | None
    visible: Tensor | None


Attend = Callable[[Tensor, Tensor], Tensor]
"""Queries and keys to this layer's attention weights ``(batch, heads, tokens, tokens)``."""


class Tap(NamedTuple):
    """What happens at a layer's attention: first every tap's ``edit``, then attention, then every tap's ``see``."""

    edit: Callable[[nn.Module, Call], tuple[Tensor, Tensor]] | None = None
    see: Callable[[nn.Module, Call, Tensor, Attend], None] | None = None


class _Tapped:
    """The taps of one attention module and the rotation that its forward was last given."""

    def __init__(self, module: nn.Module) -> None:
        self.taps: list[Tap] = []
        self.rotation: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
        self.handle = module.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.rotation = kwargs.get("position_embeddings") or (None, None)


_TAPPED: WeakKeyDictionary[nn.Module, _Tapped] = WeakKeyDictionary()


@contextmanager
def tapped(model: PreTrainedModel, modules: Sequence[nn.Module], tap: Tap, *, first: bool = False) -> Iterator[None]:
    """Runs the model's attention in plain torch (``eager``) with `tap` at each of `modules`.

    May be nested: an inner tap comes after the outer ones, or, with `first`, before their edits.
    """
    before: str = model.config.get_text_config()._attn_implementation
    for module in modules:
        if module not in _TAPPED:
            _TAPPED[module] = _Tapped(module)
        taps = _TAPPED[module].taps
        taps.insert(0 if first else len(taps), tap)
    try:
        if before != NAME:
            model.set_attn_implementation(NAME)
        yield
    finally:
        if before != NAME:
            model.set_attn_implementation(before)
        for module in modules:
            state = _TAPPED[module]
            state.taps.remove(tap)
            if not state.taps:
                state.handle.remove()
                del _TAPPED[module]


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise ValueError(f"the module of {type(module).__name__} has no function eager_attention_forward")

    def attend(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if key.shape[1] == value.shape[1]:
            return eager(module, query, key, value, attention_mask, **kwargs)
        groups = module.num_key_value_groups  # a key for each query head: keys need no repeating, values do
        try:
            module.num_key_value_groups = 1
            return eager(module, query, key, value.repeat_interleave(groups, 1), attention_mask, **kwargs)
        finally:
            module.num_key_value_groups = groups

    state = _TAPPED.get(module)
    taps = state.taps if state else []
    cos, sin = state.rotation if state else (None, None)
    visible = None if attention_mask is None else attention_mask[..., : key.shape[2]] == 0
    for tap in taps:
        if tap.edit:
            query, key = tap.edit(module, Call(query, key, cos, sin, visible))
    out, weights = attend(query, key)
    for tap in taps:
        if tap.see:
            tap.see(module, Call(query, key, cos, sin, visible), weights, lambda q, k: attend(q, k)[1])
    return out, weights


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, eager_mask)
