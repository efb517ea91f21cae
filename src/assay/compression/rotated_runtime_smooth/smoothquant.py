"""The rival: SmoothQuant's static scales, moved into the weights before they are rounded."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .config import RRSConfig
from .quantize import quantize_rrs


@torch.no_grad()
def quantize_smoothquant(model: Any, calib: Tensor, *, w_bits: int = 4, alpha: float = 0.5, w_clip: bool = True) -> Any:
    r"""SmoothQuant (Xiao et al., 2023) with the weights of this package, in place; activations are left at 16 bits.

    Inputs are divided and weights multiplied by :math:`s_j = \max|X_j|^\alpha / \max|W_j|^{1-\alpha}` from calibration
    text. Every linear gets scales of its own (where a norm comes first, the original shares them), which can only help it.

    Args:
        calib: Token ids ``(tokens,)``.
    """
    linears = {n: m for n, m in model.get_decoder().layers.named_modules() if isinstance(m, nn.Linear)}
    maxima: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor]) -> None:
            maxima[name] = args[0].flatten(0, -2).abs().amax(0)

        return hook

    handles = [linear.register_forward_pre_hook(watch(name)) for name, linear in linears.items()]
    model(input_ids=calib[None], use_cache=False, logits_to_keep=1)
    for handle in handles:
        handle.remove()
    scales = {}
    for name, linear in linears.items():
        peak = maxima[name].clamp_min(1e-5) ** alpha
        scales[name] = peak / linear.weight.abs().amax(0).clamp_min(1e-5) ** (1 - alpha)
        linear.weight.mul_(scales[name])
    quantize_rrs(model, RRSConfig(w_bits=w_bits, a_bits=16, rotate="none", smooth=False, w_clip=w_clip))
    layers = dict(model.get_decoder().layers.named_modules())
    for name, scale in scales.items():
        layers[name].register_forward_pre_hook(functools.partial(_divide, scale))
    return model


def _divide(scale: Tensor, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0] / scale,)
