"""Function-preserving rotation of a decoder: spikes of one channel are spread over all of them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .config import LINEARS, ROTATIONS
from .hadamard import apply_factors, hadamard_factors, orthogonal_factors, random_base, with_base
from .linear import OnlineRotation, RotatedLinear, RRSLinear
from .saving import ONLINE_ROTATIONS, refuse_saving


class Decoder(NamedTuple):
    """The parts of a Llama-shaped causal language model. `Any`: their attributes are transformers' business."""

    layers: Any
    norm: Any
    embedding: Any
    head: Any


def decoder_of(model: PreTrainedModel) -> Decoder:
    """Finds the parts, or says which one is missing."""
    base = decoder_module(model)
    layers = getattr(base, "layers", None)
    head = model.get_output_embeddings()
    if not isinstance(layers, nn.ModuleList) or not isinstance(head, nn.Linear) or not hasattr(base, "norm"):
        raise ValueError(
            f"{type(model).__name__} is not a Llama-shaped causal model: it needs layers, a final norm and an lm_head"
        )
    for i, layer in enumerate(layers):
        for name in LINEARS:
            linear = getattr(linear_parent(layer, name), name, None)
            if not isinstance(linear, nn.Linear):
                raise ValueError(
                    f"layer {i} of {type(model).__name__} has no nn.Linear {name}; q_proj, k_proj, v_proj, o_proj, gate_proj, "
                    f"up_proj and down_proj are needed (mixtures of experts and fused projections are not supported)"
                )
    return Decoder(layers, base.norm, model.get_input_embeddings(), head)


def decoder_module(model: PreTrainedModel) -> Any:
    """The stack of layers under the language-model head."""
    return model.get_decoder() if hasattr(model, "get_decoder") else model.base_model


def linear_parent(layer: Any, name: str) -> Any:
    return getattr(layer, "self_attn" if name in LINEARS[:4] else "mlp", None)


@torch.no_grad()
def rotate_model(model: PreTrainedModel, seed: int = 0, *, rotation: str = "hadamard", check: bool = True) -> PreTrainedModel:
    r"""Rotates a causal language model in place without changing what it computes.

    From QuaRot (Ashkboos et al., 2024), as *Rotated Runtime Smooth* uses it. With an orthogonal Q and norms whose weights
    are folded into the next linear, :math:`(XQ)(WQ)^\top = XW^\top`: the residual stream, each head's values and the inputs of
    o_proj and down_proj are rotated, everything in float64. Only the rotations across heads and before down_proj cannot
    be folded; those linears become `RotatedLinear`. A tied lm_head is untied.

    The result cannot be saved as a plain checkpoint, and ``save_pretrained`` says so: quantise with
    ``RRSConfig(w_bits=16, a_bits=16)`` instead, which rotates, rounds nothing, saves and loads.

    Args:
        model: Llama-shaped (Llama, Mistral, Qwen2, Qwen3, SmolLM …), on any device, in any float dtype.
        seed: Of the residual rotation's signs.
        rotation: ``"hadamard"``, ``"random"`` (residual stream by a random orthogonal matrix) or ``"online"`` (no
            residual rotation, so nothing is asked of the norms). Where no Hadamard matrix exists, random ⊗ Sylvester;
            across heads then nothing.
        check: Compares the logits of 8 tokens before and after.

    Raises:
        ValueError: an architecture whose function would change: post-sublayer norms or norm weights stored as 1 + w
            (Gemma), LayerNorm, missing linears; already rotated or quantised; weights that are not finite; `rotation`
            unknown. The model is then as it was.
        RuntimeError: the logits moved (`check`). The model is then rotated: load it again.
    """
    if rotation not in ROTATIONS or rotation == "none":
        raise ValueError(f"rotation must be one of {ROTATIONS[:3]}, got {rotation!r}")
    if any(isinstance(module, RRSLinear) for module in model.modules()):
        raise ValueError("the model is quantised already: rotate it first")
    parts = decoder_of(model)
    if any(isinstance(module, RotatedLinear) for module in model.modules()):
        raise ValueError("the model is rotated already")
    check_weights(model, parts)
    if rotation != "online":
        _check_norms(parts)
    for layer in parts.layers:
        if getattr(layer.self_attn, "v_norm", None) is not None:
            raise ValueError(f"{type(model).__name__} normalises its values: their rotation cannot be folded away")
    before = _probe(model) if check else None
    if before is not None and not torch.isfinite(before).all():
        raise ValueError(f"the logits of {type(model).__name__} are not finite before anything is done to it")

    refuse_saving(model, ONLINE_ROTATIONS)
    generator = torch.Generator().manual_seed(seed)
    if rotation != "online":
        _untie(model)
        _fold_norms(parts)
        _rotate_residual(parts, rotation, generator)
    for layer in parts.layers:
        _rotate_heads(layer.self_attn, generator)
        _rotate_down(layer.mlp, generator)
    if before is not None:
        _compare(before, _probe(model), model)
    return model


def check_weights(model: PreTrainedModel, parts: Decoder) -> None:
    """Raises ValueError for weights that cannot be rotated or rounded, before anything is changed."""
    named = {"embedding": parts.embedding, "lm_head": parts.head, "norm": parts.norm}
    for i, layer in enumerate(parts.layers):
        named |= {f"layers.{i}.{name}": getattr(linear_parent(layer, name), name) for name in LINEARS}
        named |= {f"layers.{i}.{name}": child for name, child in layer.named_children() if "norm" in name}
        heads = int(getattr(layer.self_attn, "head_dim", 0) or 0)
        if not heads or layer.self_attn.o_proj.in_features % heads or layer.self_attn.v_proj.out_features % heads:
            raise ValueError(f"layer {i} of {type(model).__name__} has no head_dim that divides its o_proj and v_proj")
    for name, module in named.items():
        for kind, value in module.named_parameters(recurse=False):
            if value.is_meta or not value.is_floating_point():
                what = "on the meta device (offloaded?)" if value.is_meta else f"of dtype {value.dtype} (quantised already?)"
                raise ValueError(f"{name}.{kind} of {type(model).__name__} is {what}; load the model whole, in a float dtype")
            if not torch.isfinite(value).all():
                raise ValueError(f"weights must be finite, {name}.{kind} of {type(model).__name__} is not")


def _check_norms(parts: Decoder) -> None:
    for layer in parts.layers:
        for name, _ in layer.named_children():
            if "norm" in name and name not in ("input_layernorm", "post_attention_layernorm"):
                raise ValueError(
                    f"{type(layer).__name__} normalises its sublayers' outputs ({name}): a residual rotation cannot be folded; "
                    "use rotate='online'"
                )
        _check_rms(layer.input_layernorm)
        _check_rms(layer.post_attention_layernorm)
    _check_rms(parts.norm)


def _check_rms(norm: Any) -> None:
    """Probes the norm instead of trusting its class: y = weight · x / rms(x) must hold."""
    weight = getattr(norm, "weight", None)
    if isinstance(weight, Tensor) and getattr(norm, "bias", None) is None:
        x = torch.linspace(-1.0, 3.0, weight.shape[0], device=weight.device).mul(5).sin().add(0.5)
        expected = weight.float() * x / x.square().mean().sqrt()
        actual = norm(x.to(weight.dtype)).float()
        tolerance = 1e-3 if weight.dtype in (torch.float32, torch.float64) else 3e-2
        if (actual - expected).norm() <= tolerance * expected.norm():
            return
    raise ValueError(f"{type(norm).__name__} is not weight · x / rms(x), so it cannot be folded; use rotate='online'")


def _untie(model: Any) -> None:
    """Folding the final norm changes lm_head but must not change the embedding."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is embedding.weight:
        head.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=embedding.weight.requires_grad)
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=False)


def _fold_norms(parts: Decoder) -> None:
    pairs = [(parts.norm, [parts.head])]
    for layer in parts.layers:
        attn, mlp = layer.self_attn, layer.mlp
        pairs += [
            (layer.input_layernorm, [attn.q_proj, attn.k_proj, attn.v_proj]),
            (layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj]),
        ]
    for norm, linears in pairs:
        for linear in linears:
            linear.weight.copy_(linear.weight.double() * norm.weight.double())
        norm.weight.fill_(1.0)


def _rotate_residual(parts: Decoder, rotation: str, generator: torch.Generator) -> None:
    size = parts.embedding.weight.shape[1]
    if rotation == "random":
        factors: tuple[Tensor, ...] = (_haar(size, generator),)
    else:
        factors = orthogonal_factors(size, generator)
    signs = (torch.randint(0, 2, (size,), generator=generator) * 2 - 1).double()

    def times_q(x: Tensor) -> Tensor:  # x (*, size) → x Q with Q = diag(signs) H
        return apply_factors(x.double() * signs.to(x.device), tuple(f.to(x.device) for f in factors))

    readers = [parts.embedding, parts.head]
    writers = []
    for layer in parts.layers:
        attn, mlp = layer.self_attn, layer.mlp
        readers += [attn.q_proj, attn.k_proj, attn.v_proj, mlp.gate_proj, mlp.up_proj]
        writers += [attn.o_proj, mlp.down_proj]
    for module in readers:
        module.weight.copy_(times_q(module.weight))
    for module in writers:
        module.weight.copy_(times_q(module.weight.T).T)  # Qᵀ W
        if module.bias is not None:
            module.bias.copy_(times_q(module.bias))


def _rotate_heads(attn: Any, generator: torch.Generator) -> None:
    """Values by a matrix of order head_dim, folded on both sides; across heads online where there is a Hadamard matrix."""
    v, o = attn.v_proj, attn.o_proj
    head_dim = int(attn.head_dim)
    heads = o.in_features // head_dim
    factors = tuple(f.to(v.weight.device) for f in orthogonal_factors(head_dim, generator))

    def per_head(x: Tensor) -> Tensor:  # (*, heads · head_dim)
        return apply_factors(x.double().reshape(-1, head_dim), factors).reshape(x.shape)

    v.weight.copy_(per_head(v.weight.T).T)
    if v.bias is not None:
        v.bias.copy_(per_head(v.bias))
    o.weight.copy_(per_head(o.weight))
    across = hadamard_factors(heads, torch.float64, o.weight.device)
    if across:
        o.weight.copy_(apply_factors(o.weight.double(), across, head_dim))
        attn.o_proj = RotatedLinear.of(o, OnlineRotation(heads, head_dim))


def _rotate_down(mlp: Any, generator: torch.Generator) -> None:
    down = mlp.down_proj
    size, device = down.in_features, down.weight.device
    factors, base = hadamard_factors(size, torch.float64, device), None
    if factors is None:
        # The stored base has the weights' precision; the weights must be folded with that very matrix.
        base = random_base(size, generator).to(down.weight.dtype).to(device)
        factors = with_base(base.double(), size)
    down.weight.copy_(apply_factors(down.weight.double(), factors))
    mlp.down_proj = RotatedLinear.of(down, OnlineRotation(size), base)


def _haar(size: int, generator: torch.Generator) -> Tensor:
    q, r = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))
    return q * r.diagonal().sign()


def _probe(model: Any) -> Tensor:
    size = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(1, 9, device=model.device).mul(size // 11 or 1).remainder(size)[None]
    modes = [(module, module.training) for module in model.modules()]
    logits = model.eval()(input_ids=ids, use_cache=False).logits.double()
    for module, training in modes:
        module.training = training
    return logits


def _compare(before: Tensor, after: Tensor, model: PreTrainedModel) -> None:
    change = ((after - before).norm() / before.norm()).item()
    # Half precision rounds every rotated weight anew.
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 5e-2
    if not change <= tolerance:
        raise RuntimeError(
            f"rotation moved the logits of {type(model).__name__} by {change:.1e} (relative): its architecture is not "
            "supported. The model is rotated now: load it again"
        )
