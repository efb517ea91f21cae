"""Quantising a whole model, and its registration with transformers."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantizer
from transformers.quantizers.base import HfQuantizer

from .calibrate import calibration_batches, gptq_layers
from .config import LINEARS, RRSConfig
from .hadamard import kronecker_orders
from .keyvalue import check_rounded_keys, use_plain_keys, use_rounded_keys
from .linear import OnlineRotation, RotatedLinear, RRSLinear
from .masks import TokenMask, detach_masks
from .rotate import check_weights, decoder_module, decoder_of, linear_parent, rotate_model
from .saving import ONLINE_ROTATIONS, allow_saving, refuse_saving

Calibration = Tensor | Mapping[str, Any] | Sequence[int] | Iterable[Tensor | Mapping[str, Any] | Sequence[int]]


def quantize_rrs(model: PreTrainedModel, config: RRSConfig, calib: Calibration | None = None) -> PreTrainedModel:
    r"""Rotates and quantises a causal language model in place: its decoder's linears become `RRSLinear`.

    From *Rotated Runtime Smooth* (Yi et al., ICLR 2025); lm_head, embeddings and norms keep their dtype. The result
    generates, saves with ``save_pretrained`` and loads with ``from_pretrained``, once the process that loads has imported
    this package (``import assay.compression.rotated_runtime_smooth``): transformers skips quantisation it does not know.

    Args:
        model: Llama-shaped causal model, see `rotate_model`.
        config: What to do.
        calib: For ``weight_method="gptq"`` (the paper: 128 sequences of the model's length), ignored otherwise. Token ids
            ``(tokens,)`` or ``(batch, tokens)`` as a tensor or lists, a tokenizer's output (``input_ids`` and
            ``attention_mask``), or an iterable of either, such as a data loader.

    Raises:
        ValueError: an unsupported architecture; quantised already; weights that are not finite, an odd number of inputs, a
            group that does not divide; gptq without data, or with data that are no token ids. The model is then as it was.

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
    layers = [module for module in model.modules() if isinstance(module, RRSLinear)]
    for module in layers:  # a group that does not divide is reported before anything is changed
        if config.smooths(module.name):
            config.group_of(module.in_features, module.name)
    for module in layers:
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
def _transform(model: PreTrainedModel, config: RRSConfig, calib: Calibration | None) -> None:
    batches = _check(model, config, calib)
    layers = decoder_of(model).layers
    if config.rotate != "none":
        rotate_model(model, config.seed, rotation=config.rotate)
    try:
        if batches:
            gptq_layers(model, layers, config, batches)
        else:
            for layer in layers:
                for name in LINEARS:
                    parent = linear_parent(layer, name)
                    setattr(parent, name, RRSLinear.from_linear(getattr(parent, name), config, name=name))
    except BaseException as error:
        refuse_saving(model, "quantisation broke off, the model is neither what it was nor quantised")
        error.add_note("the model is neither what it was nor quantised: load it again")
        raise
    allow_saving(model)


def _check(model: PreTrainedModel, config: RRSConfig, calib: Calibration | None) -> list[dict[str, Tensor]]:
    """Everything that can be wrong with the arguments, before the model is changed; the batches for GPTQ."""
    gptq = config.weight_method == "gptq" and config.w_bits < 16
    if gptq and calib is None:
        raise ValueError("weight_method='gptq' needs calib: token ids, a tokenizer's output, or an iterable of either")
    parts = decoder_of(model)
    if config.rotate == "none" and any(isinstance(module, RotatedLinear) for module in model.modules()):
        raise ValueError(
            "the model is rotated already, so a checkpoint could not be loaded under rotate='none': pass the model as it was, "
            "with the rotation in the config"
        )
    if config.kv_bits < 16:
        check_rounded_keys(model)
    for i, layer in enumerate(parts.layers):
        for name in LINEARS:
            inputs = getattr(linear_parent(layer, name), name).in_features
            if config.smooths(name):
                config.group_of(inputs, name)
            if config.w_bits < 16 and inputs % 2:
                raise ValueError(f"in_features must be even to pack two weights a byte, layer {i}'s {name} has {inputs}")
    check_weights(model, parts)
    return calibration_batches(calib, parts.embedding.weight.shape[0]) if gptq else []


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
        """Back to `nn.Linear` and the model's own attention, with the rounded weights.

        Where the config rotates, the model still is, and can no longer be saved: see `rotate_model`.
        """
        for parent in list(model.modules()):
            for name, module in list(parent.named_children()):
                if isinstance(module, RRSLinear):
                    setattr(parent, name, _restored(module, dtype))
        detach_masks(model)
        use_plain_keys(model)
        if self.quantization_config.rotate != "none":
            refuse_saving(model, ONLINE_ROTATIONS)
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
