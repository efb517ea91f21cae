"""Whole models: rotation keeps the function, quantised models behave as transformers' users expect."""

import copy
import os

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from assay.compression.rotated_runtime_smooth import (
    RotatedLinear,
    RRSConfig,
    RRSLinear,
    configure_activations,
    packed_bytes,
    quantize_rrs,
    rotate_model,
)
from assay.compression.rotated_runtime_smooth.hadamard import hadamard_factors
from assay.compression.rotated_runtime_smooth.measure import integer_gap, layer_errors
from assay.compression.rotated_runtime_smooth.smoothquant import quantize_smoothquant

SIZES = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 160, "num_hidden_layers": 2, "num_key_value_heads": 2}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, num_attention_heads=4, tie_word_embeddings=True)),
    "llama, 24 heads": (LlamaForCausalLM, LlamaConfig(**SIZES, num_attention_heads=24, head_dim=8)),
    "llama, 6 heads: no Hadamard": (
        LlamaForCausalLM,
        LlamaConfig(**{**SIZES, "hidden_size": 60}, num_attention_heads=6, head_dim=8),
    ),
    "llama, 7·16 inside": (LlamaForCausalLM, LlamaConfig(**{**SIZES, "intermediate_size": 23 * 8}, num_attention_heads=4)),
    "llama, biases": (LlamaForCausalLM, LlamaConfig(**SIZES, num_attention_heads=4, attention_bias=True, mlp_bias=True)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, num_attention_heads=4)),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, num_attention_heads=4, head_dim=16, sliding_window=4)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, num_attention_heads=4, head_dim=16)),
}
IDS = torch.randint(3, 96, (2, 14), generator=torch.Generator().manual_seed(0))


def build(name, dtype=torch.float64):
    torch.manual_seed(0)
    cls, config = MODELS[name]
    model = cls(copy.deepcopy(config)).to(dtype).eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "norm" in key or key.endswith("bias"):
                value.copy_(1 + 0.5 * torch.randn_like(value))  # neither ones nor zeros, which hide mistakes
    return model


def logits(model, ids=IDS, **kwargs):
    with torch.no_grad():
        return model(input_ids=ids, **kwargs).logits


@pytest.mark.parametrize("rotation", ["hadamard", "random", "online"])
@pytest.mark.parametrize("name", MODELS)
def test_rotation_keeps_the_function(name, rotation):
    model = build(name)
    before = logits(model)
    embedding = model.get_input_embeddings().weight.clone()
    rotate_model(model, seed=3, rotation=rotation)
    # float64 everywhere but in the norms, which transformers computes in float32
    assert (logits(model) - before).norm() / before.norm() < 1e-6
    moved = not torch.equal(model.get_input_embeddings().weight, embedding)
    assert moved == (rotation != "online")
    assert isinstance(model.model.layers[0].mlp.down_proj, RotatedLinear)


def test_rotation_unties_and_its_seed_matters():
    model = build("llama")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    a, b = (rotate_model(copy.deepcopy(model), seed=seed) for seed in (0, 1))
    assert a.lm_head.weight is not a.model.embed_tokens.weight
    assert not a.config.tie_word_embeddings
    assert not torch.allclose(a.model.embed_tokens.weight, b.model.embed_tokens.weight)
    assert torch.equal(a.model.embed_tokens.weight, rotate_model(copy.deepcopy(model)).model.embed_tokens.weight)
    assert torch.equal(a.model.norm.weight, torch.ones_like(a.model.norm.weight))


def test_rotation_spreads_a_spike():
    model = build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[5, 7] = 100.0
    rotate_model(model)
    row = model.model.embed_tokens.weight[5].abs()
    assert row.max() < 1.2 * 100 / 48**0.5


def test_rotation_leaves_each_modules_mode():
    model = build("llama").train()
    model.model.layers[0].mlp.eval()  # as a user freezes a part
    modes = [module.training for module in model.model.layers[0].modules()]
    rotate_model(model)
    assert model.training
    assert [module.training for module in model.model.layers[0].modules()] == modes


def gemma():
    config = Gemma3TextConfig(**SIZES, num_attention_heads=4, head_dim=16, layer_types=["full_attention", "sliding_attention"])
    torch.manual_seed(0)
    return Gemma3ForCausalLM(config).double().eval()


def test_architectures_that_cannot_be_rotated_say_so():
    with pytest.raises(ValueError, match="rotate='online'"):
        rotate_model(gemma())
    model = gemma()
    before = logits(model)
    rotate_model(model, rotation="online")
    assert (logits(model) - before).norm() / before.norm() < 1e-6
    tiny = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32))
    with pytest.raises(ValueError, match="Llama-shaped"):
        rotate_model(tiny)
    model = rotate_model(build("llama"))
    with pytest.raises(ValueError, match="rotated already"):
        rotate_model(model)
    with pytest.raises(ValueError, match="rotation must be"):
        rotate_model(build("llama"), rotation="none")


def test_a_norm_stored_as_one_plus_weight_is_found_by_probing():
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    model = build("llama")
    model.model.norm = GemmaRMSNorm(48).double()
    with pytest.raises(ValueError, match="GemmaRMSNorm"):
        rotate_model(model)


@pytest.mark.parametrize("name", MODELS)
def test_config_without_rounding_is_the_identity(name):
    model = build(name)
    before = logits(model)
    quantize_rrs(model, RRSConfig(w_bits=16, a_bits=16))
    assert (logits(model) - before).norm() / before.norm() < 1e-6


def test_eight_bit_activations_stay_close():
    model = build("qwen2", torch.float32)
    before = logits(model)
    close = quantize_rrs(copy.deepcopy(model), RRSConfig(w_bits=16, a_bits=8, group="auto"))
    coarse = quantize_rrs(copy.deepcopy(model), RRSConfig(w_bits=16, a_bits=4, group="auto"))
    error8, error4 = ((logits(m) - before).norm() / before.norm() for m in (close, coarse))
    assert error8 < 0.05 < error4


def test_the_released_placement_and_all():
    model = quantize_rrs(build("llama"), RRSConfig(group="auto"))
    layer = model.model.layers[0]
    smoothed = {m.name: m.smooth for m in layer.modules() if isinstance(m, RRSLinear)}
    assert {name for name, flag in smoothed.items() if flag} == {"o_proj", "gate_proj", "up_proj", "down_proj"}
    assert isinstance(model.lm_head, torch.nn.Linear)
    configure_activations(model, RRSConfig(group="auto", smooth_targets="all"))
    assert all(m.smooth for m in layer.modules() if isinstance(m, RRSLinear))


def test_group_that_does_not_divide_is_reported_before_anything_changes():
    model = build("llama")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="does not divide the 48 inputs of o_proj"):
        quantize_rrs(model, RRSConfig(group=32))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("scope", ["sequence"])
@pytest.mark.parametrize("sink", [0, 1])
def test_left_padding_does_not_change_the_result(scope, sink):
    model = quantize_rrs(build("llama"), RRSConfig(group="auto", scope=scope, sink=sink, smooth_targets="all"))
    short, long = IDS[:1, :9], IDS[1:]
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), short], 1)
    mask = torch.cat([torch.zeros(1, 5, dtype=torch.long), torch.ones(1, 9, dtype=torch.long)], 1)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    batch = logits(
        model,
        torch.cat([padded, long]),
        attention_mask=torch.cat([mask, torch.ones_like(long)]),
        position_ids=torch.cat([positions, torch.arange(14)[None]]),
    )
    assert torch.allclose(batch[0, 5:], logits(model, short)[0], atol=1e-5)
    assert torch.allclose(batch[1], logits(model, long)[0], atol=1e-5)
    # and without the mask the padding would have counted
    assert model.model.layers[0].mlp.down_proj.tokens.valid is None


def test_batch_scope_looks_at_every_sequence():
    per_sequence = quantize_rrs(build("llama"), RRSConfig(group="auto"))
    per_batch = quantize_rrs(build("llama"), RRSConfig(group="auto", scope="batch"))
    assert torch.allclose(logits(per_sequence)[:1], logits(per_sequence, IDS[:1]), atol=1e-5)
    assert not torch.allclose(logits(per_batch)[:1], logits(per_batch, IDS[:1]), atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "llama, 7·16 inside", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "config", [RRSConfig(group="auto"), RRSConfig(group="auto", kv_bits=4, smooth_targets="all", rotate="random")]
)
def test_save_and_load(tmp_path, name, config):
    model = quantize_rrs(build(name, torch.float32), copy.deepcopy(config))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded.model.layers[1].mlp.down_proj, RRSLinear)
    assert torch.equal(loaded.model.layers[1].mlp.down_proj.qweight, model.model.layers[1].mlp.down_proj.qweight)
    assert isinstance(loaded.config.quantization_config, RRSConfig)
    assert loaded.config.quantization_config.to_dict() == config.to_dict()
    assert torch.equal(logits(loaded), logits(model))
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    assert torch.equal(logits(loaded, attention_mask=mask), logits(model, attention_mask=mask))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_save_and_load_in_half_precision(tmp_path, dtype):
    build("llama", torch.float32).save_pretrained(tmp_path / "fp")  # .to(dtype) would also round the rotary frequencies
    model = quantize_rrs(AutoModelForCausalLM.from_pretrained(tmp_path / "fp", dtype=dtype), RRSConfig(group="auto"))
    assert model.model.layers[0].mlp.up_proj.wscale.dtype == dtype
    model.save_pretrained(tmp_path / "q")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=dtype)
    assert torch.equal(logits(loaded), logits(model))


def test_quantising_while_loading(tmp_path):
    model = build("llama", torch.float32)
    model.save_pretrained(tmp_path / "fp")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fp", quantization_config=RRSConfig(group="auto"))
    assert torch.allclose(logits(loaded), logits(quantize_rrs(model, RRSConfig(group="auto"))), atol=1e-4)
    loaded.save_pretrained(tmp_path / "q")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "q")), logits(loaded))
    with pytest.raises(ValueError, match="needs calib"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "fp", quantization_config=RRSConfig(group="auto", weight_method="gptq"))


def test_generates_copies_and_dequantises():
    model = quantize_rrs(build("llama", torch.float32), RRSConfig(group="auto", kv_bits=4))
    out = model.generate(IDS[:, :4], max_new_tokens=5, do_sample=False, pad_token_id=0, attention_mask=torch.ones(2, 4).long())
    assert out.shape[1] > 4
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin), logits(model))
    assert twin.model.layers[0].mlp.down_proj.tokens is not model.model.layers[0].mlp.down_proj.tokens

    weights_only = quantize_rrs(build("llama", torch.float32), RRSConfig(a_bits=16))
    expected = logits(weights_only)
    restored = weights_only.dequantize()
    assert not any(isinstance(m, RRSLinear) for m in restored.modules())
    assert torch.allclose(logits(restored), expected, atol=1e-4)


def test_four_bit_keys_and_values():
    model = build("llama", torch.float32)
    before = logits(model)
    keys = quantize_rrs(copy.deepcopy(model), RRSConfig(w_bits=16, a_bits=16, kv_bits=4))
    change = (logits(keys) - before).norm() / before.norm()
    assert 1e-4 < change < 0.5
    assert keys.config._attn_implementation.startswith("rrs_kv4")
    with pytest.raises(ValueError, match="head_dim of which there is a Hadamard matrix, got 6"):
        quantize_rrs(
            LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, head_dim=6)),
            RRSConfig(w_bits=16, a_bits=16, kv_bits=4),
        )


def test_rotating_queries_and_keys_keeps_their_products():
    from assay.compression.rotated_runtime_smooth.keyvalue import rotated_round_keys

    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, h, 5, 16, generator=generator, dtype=torch.float64) for h in (4, 2))
    rotated_q, fine = rotated_round_keys(q, k, bits=8)
    exact = q @ k.repeat_interleave(2, 1).mT
    assert (rotated_q @ fine.repeat_interleave(2, 1).mT - exact).norm() / exact.norm() < 0.01
    assert (rotated_q.norm(dim=-1) - q.norm(dim=-1)).abs().max() < 1e-12


def test_eager_and_sdpa_agree_with_four_bit_keys():
    model = build("llama", torch.float64)
    outputs = []
    for implementation in ("sdpa", "eager"):
        twin = copy.deepcopy(model)
        twin.set_attn_implementation(implementation)
        outputs.append(logits(quantize_rrs(twin, RRSConfig(w_bits=16, a_bits=16, kv_bits=4))))
    assert torch.allclose(*outputs, atol=1e-5)


def test_gptq_is_nearer_than_rounding_on_its_calibration_data():
    model = build("llama", torch.float32)
    ids = torch.randint(0, 96, (8, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(
            torch.randn(96, 6) @ torch.randn(6, 48) + 0.1 * torch.randn(96, 48)
        )  # correlated inputs, which GPTQ uses
    before = logits(model, ids)
    errors = {}
    for method in ("rtn", "gptq"):
        config = RRSConfig(a_bits=16, weight_method=method, w_clip=True)
        twin = quantize_rrs(copy.deepcopy(model), config, calib=list(ids))
        errors[method] = ((logits(twin, ids) - before).norm() / before.norm()).item()
    assert errors["gptq"] < 0.9 * errors["rtn"]
    with pytest.raises(ValueError, match="needs calib"):
        quantize_rrs(copy.deepcopy(model), RRSConfig(group="auto", weight_method="gptq"))
    with pytest.raises(ValueError, match="empty"):
        quantize_rrs(copy.deepcopy(model), RRSConfig(group="auto", weight_method="gptq"), calib=[])


def test_gptq_takes_mappings():
    batch = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    a = quantize_rrs(build("mistral", torch.float32), RRSConfig(group="auto", weight_method="gptq"), calib=[batch])
    b = quantize_rrs(build("mistral", torch.float32), RRSConfig(group="auto", weight_method="gptq"), calib=[IDS])
    assert torch.equal(a.model.layers[1].mlp.up_proj.qweight, b.model.layers[1].mlp.up_proj.qweight)


def test_padding_is_no_calibration_data():
    config = RRSConfig(group="auto", weight_method="gptq")
    ids, padding = IDS[:1], torch.zeros(1, 40, dtype=torch.long)
    padded = {
        "input_ids": torch.cat([padding, ids], 1),
        "attention_mask": torch.cat([padding, torch.ones_like(ids)], 1),
    }
    a = quantize_rrs(build("llama", torch.float32), config, calib=[ids])
    b = quantize_rrs(build("llama", torch.float32), config, calib=[padded])
    for depth in (0, 1):
        x, y = (m.model.layers[depth].mlp.up_proj.qweight for m in (a, b))
        assert (x != y).float().mean() < 0.02  # rounding of the same sums in another order; it was a fifth


def test_changed_activations_are_saved_and_leave_keys_and_values(tmp_path):
    model = quantize_rrs(build("llama", torch.float32), RRSConfig(group="auto", kv_bits=4))
    configure_activations(model, RRSConfig(group="auto", a_bits=16))
    assert model.model.layers[0].self_attn.v_proj.out_bits == 4
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.model.layers[0].mlp.up_proj.a_bits == 16
    assert torch.equal(logits(again), logits(model))


def test_a_rotated_model_is_not_quantised_as_if_it_were_not():
    model = rotate_model(build("llama", torch.float32))
    with pytest.raises(ValueError, match="rotated already"):
        quantize_rrs(model, RRSConfig(group="auto", rotate="none"))


def test_factors_made_in_inference_mode_serve_training():
    hadamard_factors.cache_clear()
    model = rotate_model(build("llama", torch.float32))
    with torch.inference_mode():
        model(IDS)
    model(IDS).logits.square().sum().backward()
    gradient = model.get_input_embeddings().weight.grad
    assert torch.isfinite(gradient).all()
    assert gradient.abs().sum() > 0


def test_packed_bytes_and_double_quantising():
    model = quantize_rrs(build("llama", torch.float16), RRSConfig(group="auto"))
    held, fp16 = packed_bytes(model)
    assert held == sum(b.nbytes for m in model.modules() if isinstance(m, RRSLinear) for b in m.buffers(recurse=False))
    assert 0.25 < held / fp16 < 0.3
    with pytest.raises(ValueError, match="quantised already"):
        quantize_rrs(model, RRSConfig(group="auto"))


def test_the_rival_keeps_the_function_and_helps_against_outlier_channels():
    model = build("llama", torch.float32)
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight[3] = 60.0
    before = logits(model)
    exact = quantize_smoothquant(copy.deepcopy(model), IDS[0], w_bits=16)
    assert (logits(exact) - before).norm() / before.norm() < 1e-5
    plain = quantize_rrs(copy.deepcopy(model), RRSConfig(w_bits=16, a_bits=4, rotate="none", smooth=False))
    configure_activations(exact, RRSConfig(w_bits=16, a_bits=4, rotate="none", smooth=False))
    scaled, rounded = ((logits(m) - before).norm() for m in (exact, plain))
    assert scaled < 0.8 * rounded


def test_measures_of_a_model():
    model = quantize_rrs(build("llama", torch.float32), RRSConfig(group="auto"))
    assert integer_gap(model, IDS[0]) < 1e-5
    summary, by_layer = layer_errors(model, IDS[0])
    assert len(by_layer) == 2
    assert 0 < summary["error"] < 1
    assert all(m.a_bits == 4 for m in model.modules() if isinstance(m, RRSLinear))
    configure_activations(model, RRSConfig(group="auto", a_bits=8))
    assert layer_errors(model, IDS[0])[0]["error"] < summary["error"] / 5


@pytest.mark.slow
def test_a_real_model_round_trips_and_speaks(tmp_path):
    from assay.models import load_language_model

    try:
        model, tokenizer = load_language_model("smollm2-135m")
    except FileNotFoundError as missing:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(missing))
    text = "The cat sat on the mat. The dog sat on the rug. Water boils at one hundred degrees."
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    plain = quantize_rrs(copy.deepcopy(model), RRSConfig(rotate="none", smooth=False, w_clip=False))
    losses = {"full": loss(model, ids), "rounded": loss(plain, ids)}
    with pytest.warns(UserWarning, match="sink=1") as caught:  # its first token carries massive activations
        losses["rrs"] = loss(quantize_rrs(model, RRSConfig(group=96, w_clip=False)), ids)
    assert sum("sink=1" in str(w.message) for w in caught) == 1
    assert losses["full"] < losses["rrs"] < losses["rounded"] - 1
    with pytest.raises(ValueError, match="quantised already"):
        rotate_model(model)
    held, fp16 = packed_bytes(model)
    assert held / fp16 < 0.27
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, ids), logits(model, ids))


def loss(model, ids):
    return torch.nn.functional.cross_entropy(logits(model, ids)[0, :-1], ids[0, 1:]).item()
