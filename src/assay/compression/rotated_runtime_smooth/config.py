"""What to quantise and how: a transformers quantization config."""

from dataclasses import dataclass

from .quiet import quiet_torchao

with quiet_torchao():  # transformers imports it for a quantizer of its own
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, register_quantization_config
    from transformers.utils.quantization_config import QuantizationConfigMixin

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RELEASED_TARGETS = ("o_proj", "gate_proj", "up_proj", "down_proj")  # the released code leaves q, k and v at plain rounding
ROTATIONS = ("hadamard", "random", "online", "none")


@dataclass(repr=False, kw_only=True)
class RRSConfig(QuantizationConfigMixin):
    """Settings of Rotated Runtime Smooth, usable as ``quantization_config`` of ``from_pretrained``.

    Args:
        w_bits: 4, or 16 for weights as they are.
        a_bits: 4, 8, or 16 for activations as they are.
        kv_bits: 4 or 16. 4 rounds keys (rotated, a scale a head and token) and values (a scale a token).
        rotate: ``"hadamard"``: residual stream by a random-sign Hadamard matrix, heads and the inputs of o_proj and
            down_proj by exact ones; ``"random"``: the residual stream by a random orthogonal matrix; ``"online"``: heads,
            o_proj and down_proj only (for models whose norms cannot be folded); ``"none"``.
        group: Channels that share a run-time scale. A number must divide every smoothed linear's inputs; ``"auto"``
            takes each linear's largest divisor that is at most 128 (96 for 576). 1: every channel its own.
        smooth: False: plain per-token rounding (with `rotate`, this is QuaRot).
        smooth_targets: Names of the linears that are smoothed, or ``"all"``. Default: those of the released code.
        weight_method: ``"rtn"`` or ``"gptq"`` (needs calibration data).
        w_clip: Search each weight row's clipping.
        scope: Scales over each ``"sequence"`` of a batch, or over the whole ``"batch"``.
        sink: Leave this many tokens of largest norm out of the scales. 0 is the published method.
        seed: Of the rotation.

    Raises:
        ValueError: a value outside of the above.

    Example:
        >>> RRSConfig(group="auto").group_of(576)
        96
    """

    w_bits: int = 4
    a_bits: int = 4
    kv_bits: int = 16
    rotate: str = "hadamard"
    group: int | str = 128
    smooth: bool = True
    smooth_targets: tuple[str, ...] | str = RELEASED_TARGETS
    weight_method: str = "rtn"
    w_clip: bool = True
    scope: str = "sequence"
    sink: int = 0
    seed: int = 0
    quant_method: str = "rrs"  # type: ignore[assignment]  # transformers' own methods are members of an enum

    def __post_init__(self) -> None:
        if not isinstance(self.smooth_targets, str):
            self.smooth_targets = tuple(self.smooth_targets)  # JSON made it a list
        allowed = {
            "w_bits": (4, 16),
            "a_bits": (4, 8, 16),
            "kv_bits": (4, 16),
            "rotate": ROTATIONS,
            "weight_method": ("rtn", "gptq"),
            "scope": ("sequence", "batch"),
            "quant_method": ("rrs",),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} must be one of {values}, got {getattr(self, name)!r}")
        if self.group != "auto" and (not isinstance(self.group, int) or isinstance(self.group, bool) or self.group < 1):
            raise ValueError(f"group must be a positive integer or 'auto', got {self.group!r}")
        if self.smooth_targets != "all":
            unknown = [name for name in self.smooth_targets if name not in LINEARS]
            if isinstance(self.smooth_targets, str) or unknown:
                raise ValueError(f"smooth_targets must be 'all' or names out of {LINEARS}, got {self.smooth_targets!r}")
        if self.sink < 0:
            raise ValueError(f"sink must be at least 0, got {self.sink}")

    def smooths(self, name: str) -> bool:
        """Whether the linear of this name is smoothed; an unnamed one is."""
        return self.smooth and self.a_bits < 16 and (not name or self.smooth_targets == "all" or name in self.smooth_targets)

    def group_of(self, channels: int, name: str = "") -> int:
        """The group size for a linear with this many inputs."""
        if self.group == "auto":
            return max(g for g in range(1, min(channels, 128) + 1) if channels % g == 0)
        if channels % int(self.group):
            raise ValueError(
                f"group={self.group} does not divide the {channels} inputs of {name or 'this linear'}; "
                f"pass group='auto' or a divisor (the largest up to 128 is {RRSConfig(group='auto').group_of(channels)})"
            )
        return int(self.group)


if "rrs" not in AUTO_QUANTIZATION_CONFIG_MAPPING:
    register_quantization_config("rrs")(RRSConfig)
