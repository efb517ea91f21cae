"""Keys on the 4-bit grid, through transformers' attention interface."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .hadamard import apply_factors, hadamard_factors, kronecker_orders
from .smooth import quantize_tokens

PREFIX = "rrs_kv4_"


def rotated_round_keys(query: Tensor, key: Tensor, bits: int = 4) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys (after RoPE) by one Hadamard matrix, then rounds keys with a scale a head and token.

    The products of queries and keys do not change by the rotation: :math:`(qH)(kH)^T = qk^T`.

    Shapes:
        - query ``(batch, heads, tokens, head_dim)``, key ``(batch, kv_heads, tokens, head_dim)``; output alike.

    Raises:
        ValueError: there is no Hadamard matrix of order head_dim.
    """
    dtype = key.dtype if key.dtype == torch.float64 else torch.float32
    factors = hadamard_factors(key.shape[-1], dtype, key.device)
    if factors is None:
        raise ValueError(f"kv_bits=4 needs a head_dim of which there is a Hadamard matrix, got {key.shape[-1]}")
    q, scale = quantize_tokens(apply_factors(key.to(dtype), factors), bits)
    return apply_factors(query.to(dtype), factors).to(query.dtype), (q * scale).to(key.dtype)


def check_rounded_keys(model: PreTrainedModel) -> None:
    """Raises ValueError where `use_rounded_keys` would not work."""
    current = model.config.get_text_config()._attn_implementation
    if current.removeprefix(PREFIX) not in ("sdpa", "eager"):
        raise ValueError(f"kv_bits=4 works with attn_implementation 'sdpa' or 'eager', the model has {current!r}")
    attention: Any = next(m for m in model.modules() if hasattr(m, "q_proj"))
    if kronecker_orders(int(attention.head_dim)) is None:
        raise ValueError(f"kv_bits=4 needs a head_dim of which there is a Hadamard matrix, got {attention.head_dim}")


def use_rounded_keys(model: PreTrainedModel) -> None:
    """Puts `rotated_round_keys` in front of the model's attention function."""
    current = model.config.get_text_config()._attn_implementation
    if not current.startswith(PREFIX):
        model.set_attn_implementation(PREFIX + current)


def use_plain_keys(model: PreTrainedModel) -> None:
    """Takes `use_rounded_keys` back."""
    current = model.config.get_text_config()._attn_implementation
    if current.startswith(PREFIX):
        model.set_attn_implementation(current.removeprefix(PREFIX))


def _rounded(attention: Callable[..., Any]) -> Callable[..., Any]:
    def forward(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        query, key = rotated_round_keys(query, key)
        return attention(module, query, key, value, *args, **kwargs)

    return forward


def _eager(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
    """Attention written out: transformers' eager function lives in each model's own file."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    weights = (query @ key.mT) * kwargs["scaling"]
    if kwargs.get("s_aux") is not None:
        raise ValueError("kv_bits=4 does not know attention with learnt sinks (s_aux); use attn_implementation='sdpa'")
    if softcap := kwargs.get("softcap"):  # Gemma 2 bounds its attention logits
        weights = softcap * torch.tanh(weights / softcap)
    if mask is not None:
        weights = weights + mask
    weights = weights.softmax(-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


AttentionInterface.register(PREFIX + "sdpa", _rounded(ALL_ATTENTION_FUNCTIONS["sdpa"]))
AttentionInterface.register(PREFIX + "eager", _rounded(_eager))
AttentionMaskInterface.register(PREFIX + "sdpa", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
AttentionMaskInterface.register(PREFIX + "eager", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
