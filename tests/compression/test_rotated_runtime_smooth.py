"""The pieces: Hadamard matrices, run-time scales, packing, the integer product, weight rounding."""

import math
import warnings

import pytest
import torch
from torch.nn import functional as F

from assay.compression.rotated_runtime_smooth import (
    RotatedLinear,
    RRSConfig,
    RRSLinear,
    clip_scale,
    gptq_round,
    hadamard_factors,
    hadamard_matrix,
    pack_int4,
    quantize_tokens,
    round_weight,
    rrs_gemm,
    runtime_smooth,
    smoothness,
    unpack_int4,
    victim_rate,
)
from assay.compression.rotated_runtime_smooth.hadamard import apply_factors, kronecker_orders, orthogonal_factors
from assay.compression.rotated_runtime_smooth.linear import OnlineRotation
from assay.compression.rotated_runtime_smooth.measure import synthetic_error


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# Sylvester; Paley I over primes and over 27, 343; Paley II over 5, 9, 13, 25; products.
@pytest.mark.parametrize("n", [1, 2, 4, 8, 64, 12, 20, 24, 44, 28, 344, 36, 52, 60, 108, 140, 48, 576, 1536])
def test_hadamard_matrices_are_hadamard(n):
    H = hadamard_matrix(n)
    assert torch.equal(H.abs(), torch.ones(n, n, dtype=H.dtype))
    assert torch.equal(H @ H.T, n * torch.eye(n, dtype=H.dtype))


def test_orders_of_published_models_and_those_out_of_reach():
    for n in (576, 1536, 4096, 11008, 14336, 5120, 13824, 8192, 28672, 40):
        orders = kronecker_orders(n)
        assert orders is not None
        assert math.prod(orders) == n
    for n in (9, 3, 6, 92, 172, 13696):
        assert kronecker_orders(n) is None
    with pytest.raises(ValueError, match="order 9"):
        hadamard_matrix(9)
    with pytest.raises(ValueError, match="at least 1"):
        hadamard_matrix(0)


@pytest.mark.parametrize(("n", "inner"), [(48, 1), (1536, 1), (24, 16), (1, 8)])
def test_factored_application_equals_the_dense_product(n, inner):
    factors = hadamard_factors(n)
    x = normal(2, 3, n * inner, dtype=torch.float64)
    dense = torch.kron(hadamard_matrix(n) / math.sqrt(n), torch.eye(inner, dtype=torch.float64))
    # Kronecker products of the same factors in another order are another Hadamard matrix, so compare up to what is applied:
    applied = apply_factors(torch.eye(n * inner, dtype=torch.float64), factors, inner)
    assert torch.allclose(applied @ applied.T, torch.eye(n * inner, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(applied.abs(), dense.abs(), atol=1e-12)
    assert torch.allclose(apply_factors(x, factors, inner), x @ applied, atol=1e-12)


def test_online_rotation_never_forms_the_dense_matrix():
    assert max(f.numel() for f in hadamard_factors(14336)) <= 64 * 64
    assert max(f.shape[0] for f in hadamard_factors(1536)) <= 64


def test_orders_without_a_hadamard_matrix_fall_back_to_an_orthogonal_one():
    factors = orthogonal_factors(6 * 16, torch.Generator().manual_seed(0))
    Q = apply_factors(torch.eye(96, dtype=torch.float64), factors)
    assert torch.allclose(Q @ Q.T, torch.eye(96, dtype=torch.float64), atol=1e-12)
    Q = apply_factors(torch.eye(107 * 8, dtype=torch.float64), orthogonal_factors(107 * 8, torch.Generator().manual_seed(0)))
    assert torch.allclose(Q @ Q.T, torch.eye(107 * 8, dtype=torch.float64), atol=1e-12)


def test_factors_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="do not fit 30"):
        apply_factors(torch.zeros(2, 30), (torch.eye(5),), inner=3)


def brute_force_scales(x, group):
    s = x.abs().amax(0).clamp_min(1e-5)
    order = sorted(range(len(s)), key=lambda j: (-s[j].item(), j))
    out = s.clone()
    for start in range(0, len(s), group):
        members = order[start : start + group]
        for j in members:
            out[j] = max(s[k] for k in members)
    return out


@pytest.mark.parametrize("group", [1, 2, 8, 24])
def test_scales_against_brute_force(group):
    x = normal(5, 24) * torch.linspace(0.1, 3, 24)
    x[:, 3] = 0.0
    x_hat, s = runtime_smooth(x, group)
    assert torch.equal(s[0], brute_force_scales(x, group))
    assert torch.equal(x_hat, x / s)


def test_group_of_one_bounds_every_channel_and_one_group_is_plain_rounding():
    x = normal(2, 10, 32)
    x_hat, _ = runtime_smooth(x, 1)
    assert torch.allclose(x_hat.abs().amax(1), torch.ones(2, 32))
    x_hat, s = runtime_smooth(x, 32)
    assert torch.equal(quantize_tokens(x_hat * s)[0], quantize_tokens(x)[0])
    assert (s == s[..., :1]).all()


def test_scales_are_equivariant_to_channel_order_and_to_positive_scaling():
    x = normal(6, 16)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    assert torch.equal(runtime_smooth(x[:, order], 4)[1], runtime_smooth(x, 4)[1][:, order])
    assert torch.equal(runtime_smooth(4 * x, 4)[0], runtime_smooth(x, 4)[0])


def test_scope_mask_and_sink():
    x = normal(3, 7, 8)
    x[1] *= 10
    per_sequence, per_batch = runtime_smooth(x, 2)[1], runtime_smooth(x, 2, scope="batch")[1]
    assert per_sequence.shape == (3, 1, 8)
    assert per_batch.shape == (1, 1, 8)
    assert torch.equal(runtime_smooth(x[1], 2)[1], per_sequence[1])
    assert torch.equal(per_batch, runtime_smooth(x.flatten(0, 1), 2)[1][None])

    padded = torch.cat([100 * torch.ones(3, 2, 8), x], 1)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]]).expand(3, -1)
    assert torch.equal(runtime_smooth(padded, 2, mask)[1], per_sequence)

    spiked = x.clone()
    spiked[:, 4] = 1e4
    without = torch.ones(3, 7).index_fill(1, torch.tensor(4), 0)
    assert torch.equal(runtime_smooth(spiked, 2, sink=1)[1], runtime_smooth(spiked, 2, without)[1])
    everything = torch.full((1, 8), 3.0)  # one decoded token that is its own sink: nothing is left to smooth by
    assert torch.equal(runtime_smooth(everything, 2, sink=1)[1], torch.ones(1, 8))
    assert torch.equal(runtime_smooth(x, 2, torch.zeros(3, 7))[1], torch.ones(3, 1, 8))


def test_a_lone_token_is_degenerate_with_group_one():
    x_hat, _ = runtime_smooth(normal(1, 16), 1)
    assert torch.equal(x_hat.abs(), torch.ones(1, 16))  # only signs are left: prefill and decoding differ


def test_token_rounding():
    x = normal(4, 9, 16)
    x[1, 2] = 0.0
    q, alpha = quantize_tokens(x)
    assert q.min() >= -7  # -8 cannot be reached with scales from the maximum
    assert q.max() <= 7
    assert alpha[1, 2] == 1
    assert ((q * alpha - x).abs() <= alpha / 2 * (1 + 1e-6)).all()
    assert torch.equal(quantize_tokens(torch.tensor([[7.0, 0.5, 1.5, 2.5]]))[0], torch.tensor([[7.0, 0.0, 2.0, 2.0]]))


def test_half_precision_maxima_do_not_overflow():
    x = torch.tensor([[60000.0, 1.0], [-60000.0, 2.0]], dtype=torch.float16)
    x_hat, s = runtime_smooth(x, 1)
    assert s.dtype == torch.float32
    assert torch.isfinite(x_hat).all()
    assert torch.equal(s, torch.tensor([[60000.0, 2.0]]))


def test_diagnostics():
    x = torch.tensor([[1.0, 0.0, 0.01, -0.02]])
    assert victim_rate(x, quantize_tokens(x)[0]).item() == pytest.approx(2 / 3)
    spike = torch.zeros(1, 64)
    spike[0, 5] = 3.0
    assert smoothness(spike).item() == pytest.approx(8.0)
    assert smoothness(torch.ones(2, 3, 5)).tolist() == [[1.0] * 3] * 2


def test_packing_round_trip_over_every_byte():
    every = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8)).reshape(16, 32).to(torch.int8)
    packed = pack_int4(every)
    assert packed.dtype == torch.uint8
    assert packed.nbytes * 2 == every.numel()
    assert torch.equal(unpack_int4(packed), every)
    assert packed[0, 0] == 0x88  # even column in the low nibble, two's complement
    assert pack_int4(torch.tensor([[1, -1]])).item() == 0xF1


@pytest.mark.parametrize(
    ("q", "message"),
    [(torch.zeros(2, 3), "even"), (torch.full((1, 2), 8), r"\[-8, 7\]"), (torch.full((1, 2), 0.5), "integers")],
)
def test_packing_refuses(q, message):
    with pytest.raises(ValueError, match=message):
        pack_int4(q)
    with pytest.raises(ValueError, match="uint8"):
        unpack_int4(torch.zeros(1, 2))


@pytest.mark.parametrize("shape", [(40, 96), (3, 40, 96)])
@pytest.mark.parametrize("group", [1, 8, 48])
@pytest.mark.parametrize("int32", [False, True])
def test_integer_product_equals_fake_quantisation(shape, group, int32):
    x, W = normal(*shape), normal(32, 96, seed=1)
    x[..., 5] += 30
    scale = clip_scale(W)
    q_w = round_weight(W, scale)
    x_hat, s = runtime_smooth(x, group)
    q_x, alpha = quantize_tokens(x_hat)
    fake = F.linear((q_x * alpha * s).double(), (q_w * scale).double())
    tiled = rrs_gemm(q_x, alpha, s, pack_int4(q_w), scale, group=group, int32=int32)
    folded = rrs_gemm(q_x, alpha, s, pack_int4(q_w), scale)
    for y in (tiled, folded):
        assert (y - fake).norm() / fake.norm() < 1e-6


def test_integer_product_refuses_mismatched_operands():
    q = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="8 channels"):
        rrs_gemm(q, torch.ones(2, 1), None, torch.zeros(3, 3, dtype=torch.uint8), torch.ones(3, 1))
    with pytest.raises(ValueError, match="group must divide"):
        rrs_gemm(q, torch.ones(2, 1), torch.ones(1, 8), torch.zeros(3, 4, dtype=torch.uint8), torch.ones(3, 1), group=3)


def official_input(*shape):
    i = torch.arange(math.prod(shape), dtype=torch.float64)
    x = (torch.sin(0.37 * i * i) * (1 + 0.01 * i % 3)).reshape(shape).float()
    x[..., 3] += 20.0
    x[..., 1, 200] = 300
    return x


@pytest.mark.parametrize(
    ("group", "total", "magnitude", "first"),
    [
        (1, 70.87262757122517, 504.0307142287493, [-3.5561017990112305, -9.31664752960205, 14.555105209350586]),
        (128, 19.089631609618664, 426.60108987241983, [-1.8606656789779663, -10.694196701049805, 14.970813751220703]),
    ],
)
def test_agrees_with_the_released_code(group, total, magnitude, first):
    """Values of `ActQuantWrapper.forward` (src/quant_utils.py of Coco58323/Rotated_Runtime_Smooth), run on a CPU."""
    i = torch.arange(8 * 256, dtype=torch.float64)
    W = torch.cos(0.11 * i * i).reshape(8, 256).float() / 16
    x_hat, s = runtime_smooth(official_input(2, 16, 256), group)
    q, alpha = quantize_tokens(x_hat)
    y = F.linear(q * alpha * s, W)
    assert y[0, 1, :3].tolist() == pytest.approx(first, rel=1e-5)
    assert y.double().sum().item() == pytest.approx(total, rel=1e-5)
    assert y.abs().double().sum().item() == pytest.approx(magnitude, rel=1e-5)


def test_clip_search_agrees_with_the_released_code():
    """Scales of `WeightQuantizer.find_params` (same source) with perchannel, sym and mse."""
    i = torch.arange(8 * 256, dtype=torch.float64)
    W = torch.cos(0.11 * i * i).reshape(8, 256).float() / 16
    W[2, 7] = 0.9
    W[5] *= W[5].abs() * 16
    official = [
        0.00857142824,
        0.0086552966,
        0.0899999961,
        0.00866070762,
        0.00874886848,
        0.0085713434,
        0.0086607011,
        0.00866071321,
    ]
    assert clip_scale(W)[:, 0].tolist() == pytest.approx(official, rel=1e-6)


def test_clip_search_against_brute_force():
    W = normal(6, 50) * torch.tensor([[1.0], [5], [0.01], [1], [1], [0]])
    W[0, 3], W[3, 1] = 9.0, -20.0
    ratios = 1 - torch.arange(80) / 100
    scales = ratios[:, None, None] * W.abs().amax(1, keepdim=True).clamp_min(1e-5) / 7
    error = ((W / scales).round().clamp(-8, 7) * scales - W).abs().pow(2.4).sum(-1)  # (80, N)
    chosen = clip_scale(W)[:, 0]
    cost = ((W / chosen[:, None]).round().clamp(-8, 7) * chosen[:, None] - W).abs().pow(2.4).sum(-1)
    assert torch.allclose(cost, error.min(0).values, rtol=1e-4)
    assert (clip_scale(W) <= clip_scale(W, search=False)).all()
    with pytest.raises(ValueError, match="finite"):
        clip_scale(torch.tensor([[float("nan"), 1.0]]))


def test_gptq_with_a_diagonal_hessian_is_rounding_to_nearest():
    W = normal(5, 40)
    scale = clip_scale(W)
    H = torch.diag(torch.rand(40, generator=torch.Generator().manual_seed(0)) + 0.1)
    assert torch.equal(gptq_round(W, H, scale, block=16), round_weight(W, scale))


def test_gptq_lowers_the_output_error_and_does_not_depend_on_the_block():
    W = normal(16, 64)
    X = normal(500, 8, seed=1) @ normal(8, 64, seed=2) + 0.1 * normal(500, 64, seed=3)
    scale = clip_scale(W)

    def error(q):
        return (X @ (q * scale - W).T).norm()

    H = X.T @ X
    q = gptq_round(W, H, scale)
    assert error(q) < 0.6 * error(round_weight(W, scale))
    assert torch.equal(q, gptq_round(W, 3 * H, scale, block=5))
    H[7] = H[:, 7] = 0  # a dead channel
    assert torch.isfinite(gptq_round(W, H, scale).float()).all()
    with pytest.raises(ValueError, match="hessian"):
        gptq_round(W, H[:3], scale)


def test_layer_equals_its_formula_and_stores_a_quarter():
    linear = torch.nn.Linear(1024, 48)
    linear.weight.data, linear.bias.data = normal(48, 1024), normal(48)
    layer = RRSLinear.from_linear(linear, RRSConfig())
    assert (layer.qweight.nbytes + layer.wscale.half().nbytes) / linear.weight.half().nbytes <= 0.27
    assert set(dict(layer.named_buffers())) == {"qweight", "wscale", "bias"}
    assert not list(layer.parameters())
    x = normal(2, 30, 1024)
    x_hat, s = runtime_smooth(x, 128)
    q, alpha = quantize_tokens(x_hat)
    expected = F.linear(q * alpha * s, layer.dequantize(), linear.bias)
    assert (layer(x) - expected).norm() / expected.norm() < 1e-5
    # 16-bit activations with 4-bit weights leave only the weights' rounding.
    exact = RRSLinear.from_linear(linear, RRSConfig(a_bits=16))
    assert torch.allclose(exact(x), F.linear(x, layer.dequantize(), linear.bias), atol=1e-4)


def test_rotated_layer_equals_the_plain_one_without_rounding():
    linear = torch.nn.Linear(96, 8).double()
    online = OnlineRotation(24, 4)
    twin = torch.nn.Linear(96, 8).double()
    twin.load_state_dict(linear.state_dict())
    twin.weight.data = apply_factors(twin.weight.data, hadamard_factors(24), 4)
    rotated = RotatedLinear.of(twin, online)
    x = normal(2, 5, 96, dtype=torch.float64)
    assert torch.allclose(rotated(x), linear(x), atol=1e-12)
    layer = RRSLinear.from_linear(rotated, RRSConfig(w_bits=16, a_bits=16))
    assert torch.allclose(layer(x), linear(x), atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_layer_keeps_the_dtype_of_its_input(dtype):
    layer = RRSLinear.from_linear(torch.nn.Linear(64, 32).to(dtype), RRSConfig(group=16))
    y = layer(normal(2, 5, 64).to(dtype))
    assert y.dtype == dtype
    assert torch.isfinite(y).all()
    assert layer(torch.zeros(2, 5, 64, dtype=dtype)).shape == (2, 5, 32)  # rows of zeros


def test_plain_rounding_ignores_other_tokens_and_smoothing_does_not():
    linear = torch.nn.Linear(64, 8)
    x = normal(1, 10, 64)
    longer = torch.cat([x, 10 * normal(1, 3, 64, seed=2)], 1)
    plain, smooth = (RRSLinear.from_linear(linear, RRSConfig(group=16, smooth=flag)) for flag in (False, True))
    assert torch.allclose(plain(longer)[:, :10], plain(x), atol=1e-6)
    assert not torch.allclose(smooth(longer)[:, :10], smooth(x), atol=1e-2)  # scales look at all tokens: not causal


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: runtime_smooth(torch.zeros(3), 1), r"\(tokens, K\)"),
        (lambda: runtime_smooth(torch.zeros(3, 4).long(), 1), "float"),
        (lambda: runtime_smooth(torch.zeros(3, 10), 4), "group must divide the 10 channels, got 4"),
        (lambda: runtime_smooth(torch.zeros(3, 10), 0), "group"),
        (lambda: runtime_smooth(torch.zeros(3, 4), 1, torch.ones(4)), r"shape \(3,\)"),
        (lambda: runtime_smooth(torch.zeros(3, 4), 1, sink=-1), "sink"),
        (lambda: runtime_smooth(torch.zeros(3, 4), 1, scope="token"), "scope"),
        (lambda: runtime_smooth(torch.tensor([[1.0, float("nan")]]), 1), "finite"),
        (lambda: runtime_smooth(torch.tensor([[1.0, float("inf")]]), 1), "finite"),
        (lambda: quantize_tokens(torch.tensor([[float("nan")]])), "finite"),
        (lambda: RRSLinear(65, 4, False, RRSConfig(group=5)), "even"),
        (lambda: RRSLinear(576, 4, False, RRSConfig()), r"group=128 does not divide the 576.*96"),
        (lambda: RRSConfig(w_bits=3), "w_bits"),
        (lambda: RRSConfig(a_bits=5), "a_bits"),
        (lambda: RRSConfig(kv_bits=2), "kv_bits"),
        (lambda: RRSConfig(rotate="dense"), "rotate"),
        (lambda: RRSConfig(group="best"), "group"),
        (lambda: RRSConfig(group=0), "group"),
        (lambda: RRSConfig(smooth_targets=("mlp",)), "smooth_targets"),
        (lambda: RRSConfig(weight_method="awq"), "weight_method"),
        (lambda: RRSConfig(scope="model"), "scope"),
        (lambda: RRSConfig(sink=-2), "sink"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_sink_is_reported_once_and_not_when_it_is_left_out():
    x = normal(1, 20, 64)
    x[0, 0] *= 200
    layer = RRSLinear.from_linear(torch.nn.Linear(64, 8), RRSConfig(group=16))
    with pytest.warns(UserWarning, match="sink=1 leaves it out"):
        layer(x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer(x)
        RRSLinear.from_linear(torch.nn.Linear(64, 8), RRSConfig(group=16, sink=1))(x)
    assert not [str(w.message) for w in caught]


def output_errors(kind):
    return {
        "rtn": synthetic_error(kind, 3, rotate=False, group=None),
        "rs": synthetic_error(kind, 3, rotate=False, group=128),
        "rotation": synthetic_error(kind, 3, rotate=True, group=None),
        "rrs": synthetic_error(kind, 3, rotate=True, group=128),
        "sink out": synthetic_error(kind, 3, rotate=True, group=128, sink=1),
    }


def test_outliers_in_channels_are_smoothed_away():
    errors = output_errors("channels")
    assert errors["rrs"] <= 0.65 * errors["rotation"] < errors["rtn"]


def test_one_spike_hurts_smoothing_without_rotation_only():
    errors = output_errors("one_spike")
    assert errors["rrs"] <= 1.05 * errors["rotation"]
    assert errors["rs"] >= 2 * errors["rotation"]


def test_four_spikes_in_one_token_break_the_rotated_scales_unless_it_is_left_out():
    errors = output_errors("four_spikes")
    assert errors["rrs"] >= 3 * errors["rotation"]
    assert errors["sink out"] <= 1.05 * errors["rotation"]
