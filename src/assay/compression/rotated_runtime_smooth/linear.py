"""Linear layers: one that rotates its input, and the quantised one with packed 4-bit weights."""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import RRSConfig
from .hadamard import apply_factors, hadamard_factors, with_base
from .masks import TokenMask
from .pack import pack_int4, rrs_gemm, unpack_int4
from .smooth import SINK_RATIO, quantize_tokens, runtime_smooth, sink_ratio
from .weights import clip_scale, round_weight


@dataclass(frozen=True)
class OnlineRotation:
    """``x (H_order ⊗ I_inner)`` on the last axis, in Kronecker factors. With a `base`, H is base ⊗ Sylvester."""

    order: int
    inner: int = 1

    def __call__(self, x: Tensor, base: Tensor | None = None) -> Tensor:
        dtype = x.dtype if x.dtype == torch.float64 else torch.float32
        if base is None:
            factors = hadamard_factors(self.order, dtype, x.device)
            assert factors is not None, self.order
        else:
            factors = with_base(base.to(dtype), self.order)
        return apply_factors(x.to(dtype), factors, self.inner).to(x.dtype)


class RotatedLinear(nn.Linear):
    """`nn.Linear` whose input is rotated first; `rotate_model` puts it where a rotation cannot be folded into weights."""

    online: OnlineRotation
    online_base: Tensor | None

    @classmethod
    def of(cls, linear: nn.Linear, online: OnlineRotation, base: Tensor | None = None) -> "RotatedLinear":
        new = cls(linear.in_features, linear.out_features, bias=False, device="meta")
        new.weight, new.bias = linear.weight, linear.bias
        new.online = online
        new.register_buffer("online_base", None if base is None else base.to(linear.weight))
        return new.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(self.online(input, self.online_base))


class RRSLinear(nn.Module):
    r"""A linear layer with packed 4-bit weights and activations that are smoothed and rounded as they come.

    From *Rotated Runtime Smooth* (Yi et al., ICLR 2025):

    .. math:: y_{tn} = \alpha_t \beta_n \sum_j s_j X^q_{tj} W^q_{nj} + b_n, \qquad
              X^q = \mathrm{round}(X / (\alpha s))

    with `runtime_smooth`'s :math:`s`, `quantize_tokens`' :math:`\alpha` and a scale :math:`\beta_n` for every weight row.
    Only the packed weights are kept; they are unpacked in every call.

    Args:
        in_features, out_features, bias, dtype, device: As in `nn.Linear`. `in_features` must be even for 4-bit weights.
        config: `RRSConfig`.
        name: Which of the model's linears this is (``"down_proj"`` …): decides whether it is smoothed.
        online: Rotation of the input before anything else.
        online_base_order: Order of its random part, 0 for a Hadamard matrix.

    Attributes:
        qweight: uint8 ``(N, K / 2)``; wscale: ``(N, 1)``; bias: ``(N,)`` or None. With ``w_bits=16``: weight ``(N, K)``.

    Shapes:
        - input: ``(tokens, K)`` or ``(batch, tokens, K)``; output ``(*, N)`` in the input's dtype.
        - mask: ``(tokens,)`` or ``(batch, tokens)``, tokens that count for the scales.

    Raises:
        ValueError: `in_features` odd or not divisible by the group; NaN or infinity in weights or activations.

    Example:
        >>> lin = nn.Linear(256, 64)
        >>> packed = RRSLinear.from_linear(lin, RRSConfig(group=64))
        >>> packed.qweight.nbytes / lin.weight.half().nbytes, packed(torch.ones(3, 256)).shape
        (0.25, torch.Size([3, 64]))
    """

    qweight: Tensor
    wscale: Tensor
    weight: Tensor
    bias: Tensor | None
    online_base: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        config: RRSConfig,
        *,
        name: str = "",
        online: OnlineRotation | None = None,
        online_base_order: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.name, self.online, self.w_bits = name, online, config.w_bits
        self.tokens: TokenMask | None = None
        self.out_bits = config.kv_bits if name == "v_proj" else 16
        self.configure(config)
        factory: dict[str, Any] = {"dtype": dtype, "device": device}
        if config.w_bits == 16:
            self.register_buffer("weight", torch.empty(out_features, in_features, **factory))
        else:
            if in_features % 2:
                raise ValueError(f"in_features must be even to pack two weights a byte, got {in_features}")
            self.register_buffer("qweight", torch.empty(out_features, in_features // 2, dtype=torch.uint8, device=device))
            self.register_buffer("wscale", torch.empty(out_features, 1, **factory))
        self.register_buffer("bias", torch.empty(out_features, **factory) if bias else None)
        base = torch.empty(online_base_order, online_base_order, **factory) if online_base_order else None
        self.register_buffer("online_base", base)

    def configure(self, config: RRSConfig) -> None:
        """Takes over the activation side of another config (bits, smoothing, scope); weights, keys and values stay."""
        self.a_bits, self.scope, self.sink = config.a_bits, config.scope, config.sink
        self.smooth = config.smooths(self.name)
        self.group = config.group_of(self.in_features, self.name) if self.smooth else 1
        self._watch_for_sink = self.smooth and not config.sink

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, config: RRSConfig, *, name: str = "", rounded: tuple[Tensor, Tensor] | None = None
    ) -> "RRSLinear":
        """Quantises `linear` (a `RotatedLinear` keeps its rotation). `rounded`: integers and row scales already chosen."""
        base = getattr(linear, "online_base", None)
        new = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            config,
            name=name,
            online=getattr(linear, "online", None),
            online_base_order=0 if base is None else base.shape[0],
            dtype=linear.weight.dtype,
            device=linear.weight.device,
        )
        with torch.no_grad():
            if config.w_bits == 16:
                new.weight.copy_(linear.weight)
            else:
                q, scale = rounded or nearest(linear.weight, config)
                new.qweight.copy_(pack_int4(q))
                new.wscale.copy_(scale)
            if linear.bias is not None and new.bias is not None:
                new.bias.copy_(linear.bias)
            if base is not None and new.online_base is not None:
                new.online_base.copy_(base)
        return new.train(linear.training)

    def dequantize(self) -> Tensor:
        """The weights the layer stands for, ``(N, K)`` (of the rotated layer, where there is a rotation)."""
        return self.weight if self.w_bits == 16 else unpack_int4(self.qweight).to(self.wscale.dtype) * self.wscale

    def quantize_input(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """``(xq, alpha, s, x_hat)`` of a rotated input; `s` is None without smoothing."""
        s = None
        x_hat = x if x.dtype == torch.float64 else x.float()
        if self.smooth:
            if self._watch_for_sink and x.shape[-2] >= 8:
                self._look_for_sink(x)
            x_hat, s = runtime_smooth(x_hat, self.group, mask, sink=self.sink, scope=self.scope)
        return *quantize_tokens(x_hat, self.a_bits), s, x_hat

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        dtype = x.dtype
        if self.online is not None:
            x = self.online(x, self.online_base)
        if self.a_bits == 16:
            y = F.linear(x, self.dequantize().to(dtype))
        else:
            if mask is None and self.tokens is not None and self.tokens.valid is not None and x.ndim == 3:
                mask = self.tokens.valid
            xq, alpha, s, _ = self.quantize_input(x, mask)
            if self.w_bits == 16:
                y = F.linear((xq if s is None else xq * s) * alpha, self.weight.to(alpha.dtype))
            else:
                y = rrs_gemm(xq, alpha, s, self.qweight, self.wscale)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        if self.out_bits < 16:
            q, scale = quantize_tokens(y, self.out_bits)
            y = q * scale
        return y.to(dtype)

    def _look_for_sink(self, x: Tensor) -> None:
        """Once a layer, on its first real call: the norms cost a pass over the activations."""
        self._watch_for_sink = False
        if torch.compiler.is_compiling() or (self.tokens is not None and self.tokens.sink_reported):
            return
        ratio = sink_ratio(x.detach()).item()  # checkpointing must find nothing here that it has to do again
        if ratio > SINK_RATIO:
            if self.tokens is not None:
                self.tokens.sink_reported = True
            warnings.warn(
                f"{self.name or 'RRSLinear'}: one token's norm is {ratio:.0f} times the median, so it sets the run-time scales "
                "of every token (an attention sink?); sink=1 leaves it out",
                stacklevel=3,
            )

    def extra_repr(self) -> str:
        smooth = f"smooth, group={self.group}" + (f", sink={self.sink}" if self.sink else "") if self.smooth else "per token"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"w_bits={self.w_bits}, a_bits={self.a_bits} ({smooth}), online={self.online}"
        )


def nearest(weight: Tensor, config: RRSConfig) -> tuple[Tensor, Tensor]:
    """Round to nearest: int8 ``(N, K)`` and row scales ``(N, 1)``."""
    scale = weight_scale(weight, config)
    return round_weight(weight.to(scale.dtype), scale), scale


def weight_scale(weight: Tensor, config: RRSConfig) -> Tensor:
    """Row scales ``(N, 1)``, rounded to the weights' own dtype first so that the integers fit what is stored."""
    scale = clip_scale(weight, search=config.w_clip)
    return scale.to(weight.dtype).to(scale.dtype)
