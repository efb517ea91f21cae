"""One linear of SmolLM2's size on 256 tokens: beside a float32 linear, plain 4-bit rounding and torchao's int8-dynamic linear.

Ours unpacks its 4-bit weights in every call; nothing unpacked is kept (0.25 of fp16 in bytes). torchao keeps its 4-bit
weights in int8 on a CPU.
"""

import torch
from torch import nn

from assay.bench.speed import Contest
from assay.compression import RRSConfig, RRSLinear
from assay.compression.rotated_runtime_smooth.linear import OnlineRotation, RotatedLinear
from assay.compression.rotated_runtime_smooth.quiet import quiet_torchao

with quiet_torchao():
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerGroup

torch.manual_seed(0)
torch.set_grad_enabled(False)
up, down = nn.Linear(576, 1536, bias=False), nn.Linear(1536, 576, bias=False)
x_up, x_down = torch.randn(1, 256, 576), torch.randn(1, 256, 1536)

smooth, plain = RRSConfig(group="auto"), RRSConfig(group="auto", smooth=False)
rrs_up, plain_up = (RRSLinear.from_linear(up, config, name="up_proj") for config in (smooth, plain))
rrs_down, plain_down = (RRSLinear.from_linear(down, config, name="down_proj") for config in (smooth, plain))
rotated_down = RRSLinear.from_linear(RotatedLinear.of(down, OnlineRotation(1536)), smooth, name="down_proj")
rotation = OnlineRotation(1536)
dense = rotation(torch.eye(1536))


def torchao_linear(linear, config):
    copy = nn.Sequential(nn.Linear(linear.in_features, linear.out_features, bias=False))
    copy[0].load_state_dict(linear.state_dict())
    quantize_(copy, config)
    return copy


int8 = torchao_linear(up, Int8DynamicActivationInt8WeightConfig())
int4 = torchao_linear(up, Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32)))
packed = rrs_up.qweight.nbytes + rrs_up.wscale.nbytes
assert packed <= 0.27 * 2 * up.weight.numel()

contests = [
    Contest("576 → 1536", ours=lambda: rrs_up(x_up), peer=lambda: up(x_up), peer_name="float32 nn.Linear", target=3.0),
    Contest("1536 → 576", ours=lambda: rrs_down(x_down), peer=lambda: down(x_down), peer_name="float32 nn.Linear", target=3.0),
    Contest(
        "1536 → 576 with online rotation", ours=lambda: rotated_down(x_down), peer=lambda: down(x_down),
        peer_name="float32 nn.Linear", target=3.0,
    ),
    Contest(
        "run-time scales, 576 → 1536", ours=lambda: rrs_up(x_up), peer=lambda: plain_up(x_up),
        peer_name="the same without scales", target=1.15,
    ),
    Contest(
        "run-time scales, 1536 → 576", ours=lambda: rrs_down(x_down), peer=lambda: plain_down(x_down),
        peer_name="the same without scales", target=1.15,
    ),
    Contest("576 → 1536", ours=lambda: rrs_up(x_up), peer=lambda: int8(x_up), peer_name="torchao int8-dynamic, int8 weights"),
    Contest("576 → 1536", ours=lambda: rrs_up(x_up), peer=lambda: int4(x_up), peer_name="torchao int8-dynamic, int4 weights"),
    Contest(
        "Hadamard of 1536", ours=lambda: rotation(x_down), peer=lambda: x_down @ dense, peer_name="dense product", target=0.5,
    ),
]  # fmt: skip
