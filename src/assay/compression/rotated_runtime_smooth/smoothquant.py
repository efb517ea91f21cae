"""The rival: SmoothQuant's static scales, moved into the weights before they are rounded."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .config import RRSConfig
from .quantize import quantize_rrs
from .saving import refuse_saving

SEQUENCE = 2048  # tokens of one calibration sequence


@torch.no_grad()
def quantize_smoothquant(
    model: Any, calib: Tensor, *, w_bits: int = 4, alpha: float = 0.5, w_clip: bool = True, weight_method: str = "rtn"
) -> Any:
    r"""SmoothQuant (Xiao et al., 2023) with the weights of this package, in place; activations are left at 16 bits.

    Inputs are divided and weights multiplied by :math:`s_j = \max|X_j|^\alpha / \max|W_j|^{1-\alpha}` from calibration
    text. Every linear gets scales of its own (where a norm comes first, the original shares them), which can only help it.

    Args:
        calib: Token ids ``(tokens,)``, read in sequences of 2,048: for the scales, and for GPTQ after them.
        weight_method: ``"rtn"`` or ``"gptq"``, which sees the divided inputs.
    """
    linears = {n: m for n, m in model.get_decoder().layers.named_modules() if isinstance(m, nn.Linear)}
    maxima: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor]) -> None:
            peak = args[0].flatten(0, -2).abs().amax(0)
            maxima[name] = torch.maximum(maxima[name], peak) if name in maxima else peak

        return hook

    handles = [linear.register_forward_pre_hook(watch(name)) for name, linear in linears.items()]
    for ids in calib.split(SEQUENCE):
        model(input_ids=ids[None].to(model.device), use_cache=False, logits_to_keep=1)
    for handle in handles:
        handle.remove()
    scales = {}
    for name, linear in linears.items():
        peak = maxima[name].clamp_min(1e-5) ** alpha
        scales[name] = peak / linear.weight.abs().amax(0).clamp_min(1e-5) ** (1 - alpha)
        linear.weight.mul_(scales[name])
        linear.register_forward_pre_hook(functools.partial(_divide, scales[name]))  # GPTQ's sums are of divided inputs
    config = RRSConfig(w_bits=w_bits, a_bits=16, rotate="none", smooth=False, w_clip=w_clip, weight_method=weight_method)
    quantize_rrs(model, config, calib.split(SEQUENCE))
    layers = dict(model.get_decoder().layers.named_modules())
    for name, scale in scales.items():
        layers[name].register_forward_pre_hook(functools.partial(_divide, scale))
    refuse_saving(model, "the static scales are hooks, which a checkpoint does not hold")
    return model


def _divide(scale: Tensor, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0] / scale,)
