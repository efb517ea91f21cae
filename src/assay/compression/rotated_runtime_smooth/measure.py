"""What rounding does to single layers: their output error, victims, and the gap of the integer path."""

import torch
from torch import Tensor, nn

from .config import LINEARS
from .hadamard import apply_factors, hadamard_factors
from .linear import RRSLinear
from .pack import rrs_gemm
from .smooth import quantize_tokens, runtime_smooth, smoothness, victim_rate


@torch.no_grad()
def layer_errors(model: nn.Module, ids: Tensor) -> tuple[dict[str, float], list[float]]:
    """Every linear's own error from rounding its input, on the inputs of the model that rounds none: means, and by layer.

    The error of a token is ‖y − ŷ‖ / ‖y‖; a layer's is the mean over tokens, so that one massive token does not decide it.
    """
    linears = [(name, m) for name, m in model.named_modules() if isinstance(m, RRSLinear)]
    bits = linears[0][1].a_bits
    errors: dict[str, list[float]] = {name: [] for name in LINEARS}
    victims, spread = [], []

    def hook(linear: RRSLinear, args: tuple[Tensor], output: Tensor) -> None:
        linear.a_bits = bits
        rounded = linear.forward(args[0])
        if linear.name == "down_proj":
            x = args[0] if linear.online is None else linear.online(args[0], linear.online_base)
            q, _, _, x_hat = linear.quantize_input(x)
            victims.append(victim_rate(x_hat, q).item())
            spread.append(smoothness(x_hat).mean().item())
        linear.a_bits = 16
        error = (rounded - output).norm(dim=-1) / output.norm(dim=-1).clamp_min(1e-12)
        errors[linear.name].append(error.mean().item())

    handles = [linear.register_forward_hook(hook) for _, linear in linears]
    try:
        for _, linear in linears:
            linear.a_bits = 16
        model(input_ids=ids[None], use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
        for _, linear in linears:
            linear.a_bits = bits
    by_layer = [sum(values) / len(values) for values in zip(*errors.values(), strict=True)]
    means = {name: sum(values) / len(values) for name, values in errors.items()}
    summary = {
        "error_down": means["down_proj"],
        "error": sum(means.values()) / len(means),
        "victims_down": sum(victims) / len(victims),
        "smoothness_down": sum(spread) / len(spread),
    }
    return summary, by_layer


@torch.no_grad()
def integer_gap(model: nn.Module, ids: Tensor) -> float:
    """Largest relative gap, over all linears, of the kernel's integer tiles and of `forward` to dequantise-and-multiply."""
    gaps: list[float] = []

    def hook(linear: RRSLinear, args: tuple[Tensor], output: Tensor) -> None:
        x = args[0] if linear.online is None else linear.online(args[0], linear.online_base)
        q, alpha, s, _ = linear.quantize_input(x)
        exact = (q * alpha * (1 if s is None else s)).double() @ linear.dequantize().double().T
        bias = 0 if linear.bias is None else linear.bias
        tiled = rrs_gemm(q, alpha, s, linear.qweight, linear.wscale, group=linear.group)
        gaps.extend(((y - exact).norm() / exact.norm()).item() for y in (tiled, output - bias))

    handles = [m.register_forward_hook(hook) for m in model.modules() if isinstance(m, RRSLinear)]
    try:
        model(input_ids=ids[None], use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
    return max(gaps)


def synthetic_error(
    kind: str, seed: int, *, rotate: bool, group: int | None, sink: int = 0, tokens: int = 512, channels: int = 1024
) -> float:
    """Relative output error over the tokens without spikes, with exact weights. `group` None: not smoothed.

    Standard normal activations with an offset of ±50 in ten channels (``"channels"``), or with one or four entries of
    1000 in one token (``"one_spike"``, ``"four_spikes"``).
    """
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(tokens, channels, generator=generator), torch.randn(256, channels, generator=generator)
    signs = torch.randint(0, 2, (channels,), generator=generator).float() * 2 - 1
    places = torch.randperm(channels, generator=generator)
    clean = torch.ones(tokens, dtype=torch.bool)
    if kind == "channels":
        x[:, places[:10]] += 50 * signs[:10]
    else:
        clean[0] = False
        x[0, places[: 1 if kind == "one_spike" else 4]] = 1000.0
    if rotate:
        factors = hadamard_factors(channels, torch.float32) or ()
        x, weight = apply_factors(x * signs, factors), apply_factors(weight * signs, factors)
    exact = x @ weight.T
    x_hat, s = runtime_smooth(x, group, sink=sink) if group else (x, torch.ones(1, channels))
    q, alpha = quantize_tokens(x_hat)
    error = (q * alpha * s) @ weight.T - exact
    return (error[clean].norm() / exact[clean].norm()).item()
