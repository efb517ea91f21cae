"""Where a decoder rotates queries and keys, and which of their dimensions make a pair: found by looking, not by name alone."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .frequencies import frequency_buffers
from .tap import Call, Tap, tapped

ATTENTION = ("self_attn", "attn", "attention", "self_attention")
Pairing = Literal["half", "interleaved"]
HELD = "held_rope_pairs"  # set on an attention module by `hold_layers`: the pairs that do not turn there
_FAR = 5  # tokens: far enough that a wrong pairing shows in all of the higher frequencies


@dataclass(frozen=True, eq=False)
class RotaryLayer:
    """One attention layer: its frequencies and its pairs.

    Attributes:
        name: The attention module's name in the model.
        inv_freq: ``(pairs,)`` in radians a token; zeros in a layer that does not rotate.
        pairing: ``"half"``: dimension k turns with k + pairs (Llama, Gemma, NeoX …); ``"interleaved"``: 2k with 2k + 1
            (Cohere, GLM). Only the first 2·pairs dimensions of a head turn.
        doubled: How the layer's cosines are laid out: ``"half"``: every frequency once, then once more; else side by side.
        scale: What cosines and sines are multiplied by (YaRN's attention factor); 1 otherwise.
    """

    index: int
    name: str
    attention: nn.Module
    inv_freq: Tensor
    pairing: Pairing
    doubled: Pairing
    scale: float
    heads: int
    kv_heads: int

    @property
    def pairs(self) -> int:
        return self.inv_freq.numel()

    def as_complex(self, x: Tensor) -> Tensor:
        """The pairs of queries or keys as complex numbers, in the order of `inv_freq`.

        Shapes: ``(..., head_dim)`` to ``(..., pairs)``, at least complex64.
        """
        turning = x[..., : 2 * self.pairs]
        turning = turning if turning.dtype == torch.float64 else turning.float()
        return _pairs(turning, self.pairing)

    def from_complex(self, z: Tensor, x: Tensor) -> Tensor:
        """The inverse of `as_complex`; dimensions that have no pair come from `x`."""
        if self.pairing == "half":
            turned = torch.cat([z.real, z.imag], -1)
        else:
            turned = torch.view_as_real(z).flatten(-2)
        return torch.cat([turned.to(x.dtype), x[..., 2 * self.pairs :]], -1)

    def turn(self, cos: Tensor, sin: Tensor) -> Tensor:
        """The unit complex numbers that positions were multiplied by: ``(batch, tokens, 2·pairs)`` to ``(…, pairs)``."""
        c, s = (t[..., : self.pairs] if self.doubled == "half" else t[..., ::2] for t in (cos, sin))
        z = torch.complex(*(t if t.dtype == torch.float64 else t.float() for t in (c, s)))
        return z / z.abs().clamp_min(torch.finfo(z.real.dtype).tiny)


def _pairs(x: Tensor, pairing: Pairing) -> Tensor:
    halves = x.chunk(2, -1) if pairing == "half" else (x[..., ::2], x[..., 1::2])
    return torch.complex(*(h.contiguous() for h in halves))


@torch.no_grad()
def rotary_layers(model: PreTrainedModel) -> list[RotaryLayer]:
    """The attention layers of a Hugging Face decoder with rotary encoding, in order.

    The pairing is checked on the model itself: a single token has the same hidden states wherever it stands, so its query
    at position m must be its query at position 0 turned by m·g_k. Two forward passes of one token; no weights change.

    Raises:
        TypeError: not a PreTrainedModel.
        ValueError: no rotary encoding, an attention that is not where it is in other families, or one whose queries turn
            in a way that neither pairing explains (latent attention, two-dimensional positions).

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=2, vocab_size=8, intermediate_size=8)
        >>> [(layer.name, layer.pairing, layer.pairs) for layer in rotary_layers(LlamaForCausalLM(config))]
        [('model.layers.0.self_attn', 'half', 4), ('model.layers.1.self_attn', 'half', 4)]
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
    tables = frequency_buffers(model)
    named = {name: m for name, m in model.named_modules() if name.rpartition(".")[2] in ATTENTION and hasattr(m, "layer_idx")}
    names = {module: name for name, module in named.items()}
    calls = [_one_token(model, list(names), position) for position in (0, _FAR)]
    if not calls[0]:
        last = sorted({name.rpartition(".")[2] for name, _ in model.named_modules() if "attn" in name or "attention" in name})
        raise ValueError(
            f"{type(model).__name__}: no module called {' or '.join(ATTENTION)} with a layer_idx computed its attention "
            f"through transformers' attention interface; it has {', '.join(last) or 'no module called alike'}"
        )
    where = {module: name for name, module in model.named_modules()}
    return [
        _layer(index, names[module], module, call, calls[1][module], _frequencies(module, names[module], where, tables))
        for index, (module, call) in enumerate(calls[0].items())
    ]


def _one_token(model: PreTrainedModel, modules: list[nn.Module], position: int) -> dict[nn.Module, Call]:
    calls: dict[nn.Module, Call] = {}

    def look(module: nn.Module, call: Call) -> tuple[Tensor, Tensor]:
        calls[module] = call
        return call.query, call.key

    embedding: Any = model.get_input_embeddings()
    ids = torch.full((1, 1), min(7, embedding.weight.shape[0] - 1), device=model.device)
    with tapped(model, modules, Tap(edit=look), first=True):  # what an ablation around us makes of them is not the model
        decoder_forward(model, ids, position_ids=torch.full_like(ids, position))
    return calls


def decoder_forward(model: PreTrainedModel, input_ids: Tensor, **kwargs: Any) -> None:
    """The decoder without its head, whose logits nobody here needs; dropout off, every module as it was afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval().base_model(input_ids=input_ids, use_cache=False, **kwargs)
    finally:
        for module, training in modes:
            module.training = training


def _frequencies(
    attention: Any, name: str, where: dict[nn.Module, str], tables: list[tuple[nn.Module, str]]
) -> tuple[Tensor, str]:
    """The buffer of the rotary module that sits nearest above the layer, for the layer's kind."""
    kinds = getattr(attention.config, "layer_types", None)
    kind = kinds[attention.layer_idx] if kinds else ""

    def nearness(rotary: nn.Module) -> int:
        above = where[rotary].rpartition(".")[0]
        return len(above) if name.startswith(f"{above}." if above else "") else -1

    fitting = [(rotary, buffer) for rotary, buffer in tables if buffer in ("inv_freq", f"{kind}_inv_freq")]
    if not fitting:
        raise ValueError(f"{name}: no buffer inv_freq or {kind}_inv_freq; there are {', '.join(b for _, b in tables)}")
    rotary, buffer = max(fitting, key=lambda pair: nearness(pair[0]))
    return rotary.get_buffer(buffer), buffer


def _layer(index: int, name: str, module: nn.Module, here: Call, there: Call, frequencies: tuple[Tensor, str]) -> RotaryLayer:
    own = frequencies[0].detach().clone()
    held = getattr(module, HELD, None)
    if held is not None:
        own[held.to(own.device)] = 0
    inv_freq = own.double()
    pairs = inv_freq.numel()
    if here.cos is None or there.cos is None or here.query.shape[-1] < 2 * pairs or here.cos.shape[-1] != 2 * pairs:
        raise ValueError(f"{name}: its forward was given no position_embeddings (cos, sin) that fit {frequencies[1]}")
    if not torch.isfinite(there.query).all():
        raise ValueError(f"queries of {name} are not finite")
    angle = _FAR * inv_freq
    scale = float(here.cos.double().mean())
    half = torch.cat([angle, angle]).cos()
    doubled: Pairing = "half" if _apart(there.cos.double().flatten() / scale, half) < 0.05 else "interleaved"
    q0, q1 = (call.query[0, :, 0].double() for call in (here, there))
    shared = {"doubled": doubled, "scale": scale, "heads": q0.shape[0], "kv_heads": here.key.shape[1]}
    if _apart(q0, q1) < 1e-6 and inv_freq.any():  # a layer without positions (SmolLM3's every fourth)
        return RotaryLayer(index, name, module, torch.zeros_like(own), "half", **shared)  # type: ignore[arg-type]
    tolerance = 1e-3 if here.query.dtype in (torch.float32, torch.float64) else 0.05
    errors: dict[Pairing, float] = {}
    for pairing in ("half", "interleaved"):
        turned = _pairs(q0[:, : 2 * pairs], pairing) * torch.polar(torch.ones_like(angle), angle)
        errors[pairing] = _apart(turned, _pairs(q1[:, : 2 * pairs], pairing))
    pairing = min(errors, key=lambda p: errors[p])
    if errors[pairing] > tolerance:
        seen = ", ".join(f"{p} {error:.2g}" for p, error in errors.items())
        raise ValueError(
            f"{name}: its queries do not turn by position · {frequencies[1]} in their first {2 * pairs} dimensions, whichever "
            f"way these are paired (relative error: {seen})"
        )
    return RotaryLayer(index, name, module, own, pairing, **shared)  # type: ignore[arg-type]


def _apart(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / y.norm().clamp_min(1e-12))
