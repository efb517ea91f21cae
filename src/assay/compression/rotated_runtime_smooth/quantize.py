"""Quantising a whole model, and its registration with transformers."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantizer
from transformers.quantizers.base import HfQuantizer

from .config import LINEARS, RRSConfig
from .hadamard import kronecker_orders
from .keyvalue import check_rounded_keys, use_rounded_keys
from .linear import OnlineRotation, RotatedLinear, RRSLinear, TokenMask, weight_scale
from .rotate import decoder_module, decoder_of, linear_parent, rotate_model
from .weights import gptq_round

# What one forward of a layer can feed: the inputs of a later step change once the weights of an earlier one are rounded.
GPTQ_STEPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


def quantize_rrs(
    model: PreTrainedModel, config: RRSConfig, calib: Iterable[Tensor | Mapping[str, Tensor]] | None = None
) -> PreTrainedModel:
    r"""Rotates and quantises a causal language model in place: its decoder's linears become `RRSLinear`.

    From *Rotated Runtime Smooth* (Yi et al., ICLR 2025); lm_head, embeddings and norms keep their dtype. The result
    generates, saves with ``save_pretrained`` and loads with ``from_pretrained`` (once this package is imported).

    Args:
        model: Llama-shaped causal model, see `rotate_model`.
        config: What to do.
        calib: Token ids ``(tokens,)`` or ``(batch, tokens)``, or mappings with ``input_ids`` (and ``attention_mask``), for
            ``weight_method="gptq"`` (the paper: 128 sequences of the model's length). Ignored otherwise.

    Raises:
        ValueError: an unsupported architecture; quantised already; gptq without data; a group that does not divide.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> tiny = LlamaConfig(vocab_size=64, hidden_size=48, intermediate_size=96, num_hidden_layers=1,
        ...                    num_attention_heads=4, num_key_value_heads=2)
        >>> model = quantize_rrs(LlamaForCausalLM(tiny), RRSConfig(group="auto"))
        >>> type(model.model.layers[0].mlp.down_proj).__name__
        'RRSLinear'
    """
    if any(isinstance(module, RRSLinear) for module in model.modules()) or getattr(model, "hf_quantizer", None) is not None:
        raise ValueError("the model is quantised already")
    _transform(model, config, calib)
    quantizer = RRSQuantizer(config, pre_quantized=True)
    for name, value in {"hf_quantizer": quantizer, "is_quantized": True, "quantization_method": config.quant_method}.items():
        setattr(model, name, value)
    quantizer.postprocess_model(model)
    return model


def configure_activations(model: PreTrainedModel, config: RRSConfig) -> PreTrainedModel:
    """Changes how a quantised model treats activations (bits, smoothing, group, scope, sink), also when it is saved.

    Weights, rotation, keys and values stay as they are.
    """
    for module in model.modules():
        if isinstance(module, RRSLinear):
            module.configure(config)
    held = getattr(model, "hf_quantizer", None)
    if held is not None:
        changed = {name: getattr(config, name) for name in ("a_bits", "smooth", "group", "smooth_targets", "scope", "sink")}
        held.quantization_config = dataclasses.replace(held.quantization_config, **changed)
        model.config.quantization_config = held.quantization_config
    return model


def packed_bytes(model: nn.Module) -> tuple[int, int]:
    """Bytes that the decoder's quantised linears hold (weights, scales, rotations), and what fp16 weights would take."""
    layers = [module for module in model.modules() if isinstance(module, RRSLinear)]
    held = sum(b.nbytes for m in layers for name, b in m.named_buffers(recurse=False) if name != "bias")
    return held, sum(2 * m.in_features * m.out_features for m in layers)


@torch.no_grad()
def _transform(model: PreTrainedModel, config: RRSConfig, calib: Iterable[Any] | None) -> None:
    if config.weight_method == "gptq" and config.w_bits < 16 and calib is None:
        raise ValueError("weight_method='gptq' needs calib, an iterable of token ids")
    parts = decoder_of(model)
    if config.rotate == "none" and any(isinstance(module, RotatedLinear) for module in model.modules()):
        raise ValueError(
            "the model is rotated already, so a checkpoint could not be loaded under rotate='none': pass the model as it was, "
            "with the rotation in the config"
        )
    if config.kv_bits < 16:
        check_rounded_keys(model)
    for layer in parts.layers:  # a group that does not divide is reported before anything is changed
        for name in LINEARS:
            if config.smooths(name):
                config.group_of(getattr(linear_parent(layer, name), name).in_features, name)
    if config.rotate != "none":
        rotate_model(model, config.seed, rotation=config.rotate)
    if config.weight_method == "gptq" and config.w_bits < 16:
        assert calib is not None
        _gptq(model, parts.layers, config, calib)
        return
    for layer in parts.layers:
        for name in LINEARS:
            parent = linear_parent(layer, name)
            setattr(parent, name, RRSLinear.from_linear(getattr(parent, name), config, name=name))


def _gptq(model: PreTrainedModel, layers: Any, config: RRSConfig, calib: Iterable[Any]) -> None:
    """Layer after layer: the Hessians see what the rounded layers before them produce, activations unrounded."""
    hidden, arguments, valid = _first_inputs(model, layers, calib)
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
    model: PreTrainedModel, layers: nn.ModuleList, calib: Iterable[Any]
) -> tuple[list[Tensor], list[list[dict[str, Any]]], list[Tensor | None]]:
    """Each batch's input of the first layer, the keyword arguments of every layer (masks, positions), its tokens that count."""
    hidden: list[Tensor] = []
    valid: list[Tensor | None] = []
    arguments: list[list[dict[str, Any]]] = []

    def remember(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if layer is layers[0]:
            hidden.append(args[0] if args else kwargs["hidden_states"])
            arguments.append([])
        arguments[-1].append({name: value for name, value in kwargs.items() if name != "hidden_states"})

    handles = [layer.register_forward_pre_hook(remember, with_kwargs=True) for layer in layers]
    try:
        for item in calib:
            batch = dict(item) if isinstance(item, Mapping) else {"input_ids": item}
            batch = {name: value.to(model.device) for name, value in batch.items() if name in ("input_ids", "attention_mask")}
            batch = {name: value[None] if value.ndim == 1 else value for name, value in batch.items()}
            valid.append(batch["attention_mask"].bool() if "attention_mask" in batch else None)
            model(**batch, use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
    if not hidden:
        raise ValueError("calib is empty")
    return hidden, arguments, valid


def _run(layer: nn.Module, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
    out = layer(x, **kwargs)
    return out[0] if isinstance(out, tuple) else out


class RRSQuantizer(HfQuantizer):
    """Lets ``from_pretrained`` quantise on the way in (``quantization_config=RRSConfig(...)``) or load what was saved."""

    quantization_config: RRSConfig

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        if self.pre_quantized:
            _install_empty(model, self.quantization_config)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        if not self.pre_quantized:
            _transform(model, self.quantization_config, None)
            self.pre_quantized = True
        tokens = TokenMask()
        for module in model.modules():
            if isinstance(module, RRSLinear):
                module.tokens = tokens
        tokens.attach(decoder_module(model))
        if self.quantization_config.kv_bits < 16:
            use_rounded_keys(model)
        return model

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Back to `nn.Linear` (still rotated, where the config rotates), with the rounded weights."""
        for parent in list(model.modules()):
            for name, module in list(parent.named_children()):
                if isinstance(module, RRSLinear):
                    setattr(parent, name, _restored(module, dtype))
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def _restored(module: RRSLinear, dtype: torch.dtype | None) -> nn.Linear:
    linear = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
    weight = module.dequantize()
    linear.weight = nn.Parameter(weight.to(dtype or weight.dtype).clone(), requires_grad=False)
    if module.bias is not None:
        linear.bias = nn.Parameter(module.bias.to(linear.weight.dtype), requires_grad=False)
    return linear if module.online is None else RotatedLinear.of(linear, module.online, module.online_base)


def _install_empty(model: PreTrainedModel, config: RRSConfig) -> None:
    """`RRSLinear`s of the right shape and rotation, for a checkpoint to fill; mirrors what `rotate_model` decides."""
    for layer in decoder_of(model).layers:
        head_dim = int(layer.self_attn.head_dim)
        for name in LINEARS:
            parent = linear_parent(layer, name)
            linear = getattr(parent, name)
            size, online, base_order = linear.in_features, None, 0
            if config.rotate != "none" and name == "down_proj":
                online = OnlineRotation(size)
                base_order = 0 if kronecker_orders(size) is not None else size // (size & -size)
            if config.rotate != "none" and name == "o_proj" and kronecker_orders(size // head_dim):
                online = OnlineRotation(size // head_dim, head_dim)
            new = RRSLinear(
                size,
                linear.out_features,
                linear.bias is not None,
                config,
                name=name,
                online=online,
                online_base_order=base_order,
                dtype=linear.weight.dtype,
                device=linear.weight.device,
            )
            setattr(parent, name, new)


if "rrs" not in AUTO_QUANTIZER_MAPPING:
    register_quantizer("rrs")(RRSQuantizer)
