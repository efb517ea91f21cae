"""What happens without some rotations: in the model itself, or in its heads alone, layer by layer."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .layers import RotaryLayer, decoder_forward, rotary_layers
from .scores import SCORES, attention_scores, check_ids
from .tap import Attend, Call, Tap, tapped

Keep = Tensor | Mapping[int, Tensor]


@contextmanager
def rope_ablate(model: PreTrainedModel, keep: Keep) -> Iterator[None]:
    r"""A model in which chosen pairs of chosen heads do not turn, for as long as the block lasts.

    Barbero et al., *Round and Round We Go! What makes Rotary Positional Encodings useful?*, ICLR 2025.

    .. math:: \text{logit}_h(i, j) = \sum_k q_i^{(k)\top} R\big((j - i)\, g_k \,[\text{keep}_{l,h,k}]\big) k_j^{(k)}

    Where heads share a key head and keep different pairs, each gets a key of its own. Attention runs in plain torch
    meanwhile. Without the language model's cache, whose keys have turned already: ``use_cache=False`` for more than one
    forward pass over the same tokens (``generate(use_cache=False)``).

    Args:
        model: A Hugging Face decoder with rotary encoding.
        keep: Bool, ``(layers, heads, pairs)`` or what broadcasts to it; or a mapping from layers to ``(heads, pairs)`` or
            ``(pairs,)``, the other layers staying as they are. False: the pair does not turn. Pairs from the highest
            frequency to the lowest; heads are query heads.

    Raises:
        TypeError, ValueError: as `rotary_layers`; a `keep` of another type or shape, or of layers that are not there; inside
            the block, keys from a cache.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=8, intermediate_size=8)
        >>> model, ids = LlamaForCausalLM(config).eval(), torch.arange(8)[None]
        >>> with rope_ablate(model, {0: torch.tensor([[False] * 4, [True] * 4])}):  # head 0 without positions
        ...     logits = model(ids).logits
    """
    layers = rotary_layers(model)
    masks = _masks(layers, keep)

    def edit(module: nn.Module, call: Call) -> tuple[Tensor, Tensor]:
        layer, mask = masks[module]
        return turn_back(layer, call, mask.to(call.query.device))

    with tapped(model, list(masks), Tap(edit=edit)):
        yield


def _masks(layers: list[RotaryLayer], keep: Keep) -> dict[nn.Module, tuple[RotaryLayer, Tensor]]:
    """Of every layer that loses a rotation: the layer and its ``(heads, pairs)``."""
    if isinstance(keep, Tensor):
        chosen: dict[int, Tensor] = {}
        if keep.ndim == 3 and len(keep) not in (1, len(layers)):
            raise ValueError(f"keep must have {len(layers)} layers, got shape {tuple(keep.shape)}")
        for layer in layers:
            chosen[layer.index] = keep[layer.index % len(keep)] if keep.ndim == 3 else keep
    elif isinstance(keep, Mapping):
        chosen = dict(keep)
    else:
        raise TypeError(f"keep must be a tensor or a mapping from layers to tensors, got {type(keep).__name__}")
    wrong = sorted(set(chosen) - {layer.index for layer in layers})
    if wrong:
        raise ValueError(f"keep must speak of layers 0 … {len(layers) - 1}, got {', '.join(map(str, wrong))}")
    masks = {}
    for index, given in chosen.items():
        layer = layers[index]
        mask = as_mask(given, layer, f"keep of layer {index}")
        if not mask.all():
            masks[layer.attention] = layer, mask
    return masks


def as_mask(given: Any, layer: RotaryLayer, name: str) -> Tensor:
    """``(heads, pairs)`` bool.

    Raises:
        ValueError: not bool, or of a shape that does not broadcast to it.
    """
    shape = (layer.heads, layer.pairs)
    fits = isinstance(given, Tensor) and given.dtype == torch.bool and given.ndim <= 2
    fits = fits and all(n in (1, m) for n, m in zip(given.shape[::-1], shape[::-1], strict=False))
    if not fits:
        got = f"{given.dtype} {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise ValueError(f"{name} must be bool (heads, pairs) = {shape} or broadcast to it, got {got}")
    return given.expand(shape)


def turn_back(layer: RotaryLayer, call: Call, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys with the rotation taken back where `keep` ``(heads, pairs)`` is False.

    The key has one head for each query head only where heads that share one keep different pairs.
    """
    if call.query.shape[2] != call.key.shape[2] or call.cos is None or call.sin is None:
        raise ValueError(
            f"rotations are taken back over whole sequences: {call.query.shape[2]} queries met {call.key.shape[2]} keys in "
            f"{layer.name}; pass use_cache=False"
        )
    keep = keep | (layer.inv_freq == 0).to(keep.device)  # a layer without positions is given cosines and ignores them
    back = layer.turn(call.cos, call.sin).conj()[:, None]  # (batch, 1, tokens, pairs)
    groups = layer.heads // layer.kv_heads
    shared = keep.unflatten(0, (layer.kv_heads, groups))
    key, keep_key = call.key, shared[:, 0]
    if (shared != shared[:, :1]).any():
        key, keep_key = call.key.repeat_interleave(groups, 1), keep
    turned = []
    for x, mask in ((call.query, keep), (key, keep_key)):
        z = layer.as_complex(x)
        turned.append(layer.from_complex(torch.where(mask[:, None], z, z * back), x))
    return turned[0], turned[1]


@torch.no_grad()
def scores_without(model: PreTrainedModel, input_ids: Tensor, keep: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Every head's scores, had its own chosen pairs not turned and all before it stayed as it was.

    One forward pass: each layer's attention is computed once more for each entry of `keep`, on the queries and keys of the
    intact model, and thrown away.

    Args:
        model: A Hugging Face decoder with rotary encoding.
        input_ids: ``(batch, tokens)``, at least 16 tokens, no padding.
        keep: Name to bool ``(pairs,)`` or ``(heads, pairs)``, the same in every layer. False: the pair does not turn.

    Returns:
        Name to score (``self``, ``prev``, ``sink``) to ``(layers, heads)``.

    Raises:
        TypeError, ValueError: as `rotary_layers`; masks or ids that do not fit.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=8, intermediate_size=8)
        >>> without = scores_without(LlamaForCausalLM(config), torch.arange(16)[None] % 8, {"none": torch.zeros(4).bool()})
        >>> without["none"]["prev"].shape
        torch.Size([1, 2])
    """
    check_ids(model, input_ids)
    layers = {layer.attention: layer for layer in rotary_layers(model)}
    masks = {(m, what): as_mask(k, layer, f"keep[{what!r}]") for m, layer in layers.items() for what, k in keep.items()}
    found: dict[str, list[Tensor]] = {what: [] for what in keep}

    def see(module: nn.Module, call: Call, weights: Tensor, attend: Attend) -> None:
        for what in keep:
            without = attend(*turn_back(layers[module], call, masks[module, what].to(call.query.device)))
            found[what].append(attention_scores(without))

    with tapped(model, list(layers), Tap(see=see)):
        decoder_forward(model, input_ids.to(model.device))
    return {what: dict(zip(SCORES, torch.stack(each, 1), strict=True)) for what, each in found.items()}
