"""Which tokens of a call count for the run-time scales."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


class TokenMask:
    """Which tokens of the model's current call count. A hook on the decoder sets it; every `RRSLinear` reads it.

    Gradient checkpointing runs layers again, without the decoder around them; hooks inside a layer then read the mask
    that its attention is given.
    """

    def __init__(self) -> None:
        self.valid: Tensor | None = None  # (batch, tokens) bool
        self.sink_reported = False  # one warning a model, not one a layer
        self._in_decoder = False

    def attach(self, decoder: Any) -> None:
        decoder.register_forward_pre_hook(self._enter, with_kwargs=True)
        decoder.register_forward_hook(self._leave, always_call=True)
        for layer in decoder.layers:
            layer.self_attn.register_forward_pre_hook(self._enter_layer, with_kwargs=True)
            layer.mlp.register_forward_hook(self._leave_layer, always_call=True)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        ids = kwargs.get("input_ids", args[0] if args else None)
        inputs = ids if ids is not None else kwargs.get("inputs_embeds")
        self.valid = None
        if inputs is not None:
            cache = kwargs.get("cache")  # "past_key_values" until transformers 5.24
            cache = kwargs.get("past_key_values") if cache is None else cache
            past = 0 if cache is None else int(cache.get_seq_length())
            self.valid = counted_tokens(mask, inputs.shape[0], inputs.shape[1], past)
        self._in_decoder = True

    def _leave(self, *_: Any) -> None:
        self.valid, self._in_decoder = None, False

    def _enter_layer(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._in_decoder:
            hidden = kwargs.get("hidden_states", args[0] if args else None)
            self.valid = None if hidden is None else counted_tokens(kwargs.get("attention_mask"), *hidden.shape[:2])

    def _leave_layer(self, *_: Any) -> None:
        if not self._in_decoder:
            self.valid = None


def detach_masks(model: nn.Module) -> None:
    """Takes the hooks of every `TokenMask` off."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [k for k, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), TokenMask)]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)


def counted_tokens(mask: Any, batch: int, tokens: int, past: int = 0) -> Tensor | None:
    """Boolean ``(batch, tokens)``: the tokens of this call that are no padding; None where all count.

    Args:
        mask: What transformers takes: ``(batch, past + tokens)``, non-zero = counts; ``(batch or 1, heads or 1, tokens or
            1, keys)``, boolean or added to the attention's logits, where a token counts that may look at itself; or a
            mapping of kinds of attention to these.
        past: Tokens in the cache before this call.

    Raises:
        ValueError: anything else.
    """
    if isinstance(mask, Mapping):
        mask = mask["full_attention"] if "full_attention" in mask else next(iter(mask.values()), None)
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim not in (2, 4):
        what = f"a tensor of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            "attention_mask must say which tokens are padding, which must not set the run-time scales: a tensor (batch, "
            f"tokens) or (batch, 1, tokens, keys), or a mapping of such; got {what}"
        )
    rows, keys = mask.shape[0], mask.shape[-1]
    if rows not in (1, batch) or keys < tokens or (mask.ndim == 4 and mask.shape[2] not in (1, tokens)):
        raise ValueError(f"attention_mask of shape {tuple(mask.shape)} does not fit {batch} sequences of {tokens} tokens")
    if mask.ndim == 2:
        valid = mask[:, -tokens:].bool()  # with a cache the mask covers the past too
    elif tokens == 1:
        return None  # a decoded token is no padding
    else:
        # A static cache has room behind the tokens of this call; a sliding one keeps the last keys only.
        start = past if keys >= past + tokens else keys - tokens
        own = mask[..., start : start + tokens]
        own = own[..., 0, :] if mask.shape[2] == 1 else own.diagonal(dim1=-2, dim2=-1)  # (batch, heads, tokens)
        # What is added to a logit below -1000 leaves nothing of it after the softmax.
        valid = (own > -1000 if own.is_floating_point() else own.bool()).any(1)
    return None if valid.all() else valid.expand(batch, tokens)
