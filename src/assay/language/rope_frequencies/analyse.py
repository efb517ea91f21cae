"""One pass over a text: which frequencies a model's heads use, and which heads look at positions."""

from dataclasses import fields
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .layers import decoder_forward, rotary_layers
from .report import RopeReport
from .scores import SCORES, attention_scores, check_ids, contributions, pair_norms
from .tap import Attend, Call, Tap, tapped


@torch.no_grad()
def analyse_rope(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    attention: bool = True,
    shuffle_control: bool = True,
    contrib: bool = False,
    average: Literal["mean", "median"] = "mean",
    seed: int = 0,
) -> RopeReport:
    r"""Measures how much of its queries and keys each head puts into each rotary frequency.

    Barbero et al., *Round and Round We Go! What makes Rotary Positional Encodings useful?*, ICLR 2025.

    Pair k adds at most the product of its lengths to a logit (Cauchy–Schwarz), and rotation changes no length:

    .. math:: \text{usage}_{l,h,k} = \frac1n \sum_i \|q_i^{(k)}\| \cdot \frac1n \sum_j \|k_j^{(k)}\|, \qquad
        \text{contrib}_{l,h,k} = \operatorname{mean}_{j \le i} \big| q_i^{(k)\top} R((j-i) g_k)\, k_j^{(k)} \big|

    Usage is a bound on what a pair can do to a logit, not attention. A head's scores are its mean attention to the token
    itself, to the one before and to the first, over queries from the ninth on.

    Args:
        model: A Hugging Face decoder with rotary encoding, attention through transformers' interface (Llama, Gemma, Qwen,
            Mistral, NeoX, Phi, OLMo, Cohere, GLM …). Runs in plain torch attention meanwhile and is left as it was.
        input_ids: ``(batch, tokens)`` int64, without padding; at least 16 tokens. All at once: attention takes
            batch · heads · tokens² numbers.
        attention: Score the heads.
        shuffle_control: Score them again on the same tokens in another order, the first in its place: what then stays is due
            to position. One more forward pass. Needs `attention`.
        contrib: Also measure the real contributions, on average and weighted by attention: tokens² · pairs a head.
        average: Over tokens, for lengths. ``"median"`` does not hear of a few massive activations.
        seed: Of the other order.

    Returns:
        A `RopeReport`.

    Raises:
        TypeError: not a PreTrainedModel.
        ValueError: no rotary encoding, or one that is not understood; layers with different numbers of pairs or heads; ids of
            another shape or outside the vocabulary; queries or keys that are not finite.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=3, vocab_size=32, intermediate_size=8)
        >>> report = analyse_rope(LlamaForCausalLM(config), torch.arange(32)[None])
        >>> report.usage.shape, report.inv_freq[0]
        (torch.Size([3, 2, 4]), tensor([1.0000, 0.1000, 0.0100, 0.0010]))
    """
    if average not in ("mean", "median"):
        raise ValueError(f"average must be 'mean' or 'median', got {average!r}")
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
    check_ids(model, input_ids)
    layers = {layer.attention: layer for layer in rotary_layers(model)}
    shapes = {(layer.heads, layer.pairs) for layer in layers.values()}
    if len(shapes) > 1:
        raise ValueError(f"layers must have the same heads and pairs, got (heads, pairs) = {sorted(shapes)}")
    median = average == "median"
    seen: dict[str, list[Tensor]] = {field.name: [] for field in fields(RopeReport)}

    def measure(module: nn.Module, call: Call, weights: Tensor, attend: Attend) -> None:
        layer = layers[module]
        q, k = layer.as_complex(call.query), layer.as_complex(call.key)
        if not torch.isfinite(torch.view_as_real(q)).all() or not torch.isfinite(torch.view_as_real(k)).all():
            raise ValueError(f"queries or keys of {layer.name} are not finite")
        groups = layer.heads // k.shape[1]
        for suffix, skip in (("", 0), ("_without_first", 1)):
            seen[f"q_norm{suffix}"].append(pair_norms(q, layer.scale, skip=skip, median=median))
            seen[f"k_norm{suffix}"].append(pair_norms(k, layer.scale, skip=skip, median=median).repeat_interleave(groups, 0))
        if attention:
            seen["scores"].append(attention_scores(weights))
        if contrib:
            plain, attended = contributions(q, k, weights, call.visible)
            seen["contrib"].append(plain)
            seen["contrib_attended"].append(attended)

    def score(module: nn.Module, call: Call, weights: Tensor, attend: Attend) -> None:
        seen["shuffled_scores"].append(attention_scores(weights))

    ids = input_ids.to(model.device)
    with tapped(model, list(layers), Tap(see=measure)):
        decoder_forward(model, ids)
    if attention and shuffle_control:
        with tapped(model, list(layers), Tap(see=score)):
            decoder_forward(model, shuffled(ids, seed))
    stacked: dict[str, Any] = {name: torch.stack(parts).cpu() for name, parts in seen.items() if parts}
    by_name: dict[str, Any] = {
        name: dict(zip(SCORES, stacked.pop(name).unbind(1), strict=True)) for name in ("scores", "shuffled_scores")
        if name in stacked
    }  # fmt: skip
    return RopeReport(
        layer_names=tuple(layer.name for layer in layers.values()),
        inv_freq=torch.stack([layer.inv_freq.cpu() for layer in layers.values()]),
        tokens=ids.shape[1],
        **stacked,
        **by_name,
    )


def shuffled(input_ids: Tensor, seed: int) -> Tensor:
    """The tokens after the first in another order, the same one in every row."""
    order = torch.randperm(input_ids.shape[1] - 1, generator=torch.Generator().manual_seed(seed)) + 1
    return torch.cat([input_ids[:, :1], input_ids[:, order.to(input_ids.device)]], 1)
