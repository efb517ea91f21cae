"""p-RoPE's frequencies beside transformers' own, in configs and in models, and the paper's propositions."""

import copy
import math
import warnings

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from assay.language.rope_frequencies import (
    apply_p_rope,
    p_rope_inv_freq,
    partial_inv_freq,
    rope_ablate,
    rotary_frequencies,
    rotary_layers,
    theory,
)

SIZES = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IDS = torch.randint(3, 48, (2, 24), generator=torch.Generator().manual_seed(0))


def llama(**changes):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).eval()
    with torch.no_grad():  # as initialised, queries are so short that positions hardly matter
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(20)
            layer.self_attn.k_proj.weight.mul_(20)
    return model


def gemma3():
    torch.manual_seed(0)
    config = Gemma3TextConfig(**SIZES, query_pre_attn_scalar=16, sliding_window=8, layer_types=[
        "sliding_attention", "full_attention", "sliding_attention"])  # fmt: skip
    return Gemma3ForCausalLM(config).eval()


@torch.no_grad()
def logits(model):
    return model(IDS, use_cache=False).logits


@pytest.mark.parametrize("head_dim", [2, 6, 64, 80, 128, 256])
@pytest.mark.parametrize("base", [10_000.0, 100_000.0, 500_000.0, 1_000_000.0])
@pytest.mark.parametrize("p", [0.0, 0.01, 0.1, 0.25, 1 / 3, 0.5, 0.75, 0.9, 1.0])
def test_equal_to_transformers_to_the_last_bit(head_dim, base, p):
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim,
        rope_parameters={"rope_type": "proportional", "rope_theta": base, "partial_rotary_factor": p},
    )  # fmt: skip
    theirs, _ = ROPE_INIT_FUNCTIONS["proportional"](config)
    assert torch.equal(p_rope_inv_freq(head_dim, base, p), theirs)


def test_limits_and_complements():
    full, _ = ROPE_INIT_FUNCTIONS["proportional"](LlamaConfig(**SIZES))
    assert torch.equal(p_rope_inv_freq(16, 10_000.0, 1.0), full)
    assert torch.equal(p_rope_inv_freq(16, 10_000.0, 1.0, reverse=True), full)
    assert torch.equal(partial_inv_freq(16, 10_000.0, 1.0), full)
    assert not p_rope_inv_freq(16, 10_000.0, 0.0).any()
    assert not partial_inv_freq(16, 10_000.0, 0.0).any()
    assert not p_rope_inv_freq(16, 10_000.0, 0.124).any()  # p so small that no pair is left is none
    high, low = p_rope_inv_freq(16, 10_000.0, 0.75), p_rope_inv_freq(16, 10_000.0, 0.25, reverse=True)
    assert torch.allclose(high + low, full, rtol=1e-6)
    assert ((high > 0) ^ (low > 0)).all()
    assert (p_rope_inv_freq(6, 10.0, 0.5) > 0).sum() == 1  # int(p·d // 2): the half pair is dropped, not rounded


def test_partial_is_not_p_rope_but_neox():
    """NeoX's own rotation of the first quarter gives the logits of these frequencies after a permutation of dimensions."""
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding, apply_rotary_pos_emb

    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}
    config = GPTNeoXConfig(hidden_size=32, num_attention_heads=1, rope_parameters=rope)
    q, k = torch.randn(2, 1, 1, 12, 32, generator=torch.Generator().manual_seed(0))
    at = torch.arange(12)[None]
    turned = apply_rotary_pos_emb(q, k, *GPTNeoXRotaryEmbedding(config)(q, at))
    theirs = turned[0] @ turned[1].mT

    order = torch.cat([torch.arange(4), torch.arange(8, 20), torch.arange(4, 8), torch.arange(20, 32)])
    angle = at[0, :, None] * partial_inv_freq(32, 10_000.0, 0.25)
    turn = torch.polar(torch.ones_like(angle), angle)
    pairs = [torch.complex(*x[0, 0][:, order].chunk(2, -1)) * turn for x in (q, k)]
    ours = (pairs[0].conj() @ pairs[1].mT).real
    assert torch.allclose(ours, theirs[0, 0], atol=1e-4)
    assert not torch.equal(partial_inv_freq(32, 10_000.0, 0.25), p_rope_inv_freq(32, 10_000.0, 0.25))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((7, 10.0, 0.5), "head_dim must be even"),
        ((0, 10.0, 0.5), "head_dim must be even"),
        ((8, 0.0, 0.5), "base must be positive"),
        ((8, math.inf, 0.5), "base must be positive"),
        ((8, 10.0, 1.01), r"p must be in \[0, 1\], got 1.01"),
        ((8, 10.0, -0.1), r"p must be in \[0, 1\]"),
        ((8, 10.0, math.nan), r"p must be in \[0, 1\]"),
    ],
)
def test_frequencies_refuse(arguments, message):
    for function in (p_rope_inv_freq, partial_inv_freq):
        with pytest.raises(ValueError, match=message):
            function(*arguments)
    with pytest.raises(ValueError, match="even in number"):
        partial_inv_freq(8, 10.0, 0.4)


def test_a_config_and_a_model_say_the_same(tmp_path):
    weights = llama()
    config = copy.deepcopy(weights.config)
    assert apply_p_rope(config, 0.5) is config
    built = LlamaForCausalLM(config).eval()
    built.load_state_dict(weights.state_dict())
    patched = llama()
    assert apply_p_rope(patched, 0.5) is patched
    assert torch.equal(patched.model.rotary_emb.inv_freq, built.model.rotary_emb.inv_freq)
    assert torch.equal(patched.model.rotary_emb.original_inv_freq, built.model.rotary_emb.original_inv_freq)
    assert torch.equal(logits(patched), logits(built))
    assert not torch.allclose(logits(patched), logits(weights), atol=1e-4)

    patched.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval()), logits(patched))
    apply_p_rope(patched, 1.0)  # and back, from the base
    assert torch.equal(logits(patched), logits(weights))


def test_p_zero_is_no_positional_encoding():
    order = torch.cat([torch.randperm(23, generator=torch.Generator().manual_seed(1)), torch.tensor([23])])
    for p, positional in ((0.0, False), (0.25, True)):
        model = apply_p_rope(llama(num_hidden_layers=1), p)
        with torch.no_grad():
            here, there = (model(ids, use_cache=False).logits[:, -1] for ids in (IDS, IDS[:, order]))
        assert torch.allclose(here, there, atol=1e-5) is not positional


def test_gemma3_has_two_tables_and_a_linear_factor():
    model = gemma3()
    config = copy.deepcopy(model.config)
    config.rope_parameters["full_attention"] |= {"rope_type": "linear", "factor": 8.0}
    linear = Gemma3ForCausalLM(copy.deepcopy(config)).eval()
    linear.load_state_dict(model.state_dict())
    for patched, built in ((model, apply_p_rope(copy.deepcopy(model.config), 0.5)), (linear, apply_p_rope(config, 0.5))):
        again = Gemma3ForCausalLM(built).eval()
        again.load_state_dict(patched.state_dict())
        apply_p_rope(patched, 0.5)
        for kind in ("sliding_attention", "full_attention"):
            ours, theirs = (getattr(m.model.rotary_emb, f"{kind}_inv_freq") for m in (patched, again))
            assert torch.equal(ours, theirs)
            assert (ours == 0).sum() == 4
            assert torch.equal(getattr(patched.model.rotary_emb, f"{kind}_original_inv_freq"), ours)
        assert torch.equal(logits(patched), logits(again))
    assert not torch.equal(model.model.rotary_emb.full_attention_inv_freq, linear.model.rotary_emb.full_attention_inv_freq)


@pytest.mark.parametrize("build", [llama, gemma3])
def test_single_layers(build):
    model, still = build(), torch.ones(3, 1, 8, dtype=torch.bool)
    still[1, :, 4:] = False
    with rope_ablate(model, still):
        wanted = logits(model)
    before = logits(model)
    with pytest.warns(UserWarning, match="save_pretrained does not keep"):
        apply_p_rope(model, 0.5, layers=[1])
    assert torch.allclose(logits(model), wanted, atol=1e-5)
    assert torch.equal(logits(copy.deepcopy(model)), logits(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        apply_p_rope(model, 0.25, layers=[1])
        assert not torch.allclose(logits(model), wanted, atol=1e-5)
        apply_p_rope(model, 1.0, layers=[1])  # replaces, does not add
    assert torch.equal(logits(model), before)


def test_the_lowest_alone_is_said_not_to_be_saved():
    model = llama()
    with pytest.warns(UserWarning, match="save_pretrained does not keep"):
        apply_p_rope(model, 0.25, reverse=True)
    assert torch.equal(model.model.rotary_emb.inv_freq, p_rope_inv_freq(16, 10_000.0, 0.25, reverse=True))
    assert model.config.rope_parameters["rope_type"] == "default"


def test_frequencies_for_a_while():
    model = gemma3()
    before, buffers = logits(model), copy.deepcopy(dict(model.named_buffers()))
    asked = []

    def schedule(head_dim, base):
        asked.append((head_dim, base))
        return torch.zeros(head_dim // 2)

    with rotary_frequencies(model, schedule):
        assert not torch.allclose(logits(model), before, atol=1e-6)
    assert sorted(asked) == [(16, 10_000.0), (16, 1_000_000.0)]
    with pytest.raises(KeyError), rotary_frequencies(model, schedule):
        raise KeyError
    with pytest.raises(ValueError, match=r"shape \(8,\), got \(3,\)"), rotary_frequencies(model, lambda d, b: torch.ones(3)):
        pass
    with pytest.raises(ValueError, match="finite"), rotary_frequencies(model, lambda d, b: torch.full((8,), math.nan)):
        pass
    assert all(torch.equal(buffers[name], buffer) for name, buffer in model.named_buffers())
    assert torch.equal(logits(model), before)


YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "rope",
    [
        YARN,
        {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
        {
            "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {
            "rope_type": "longrope", "rope_theta": 10_000.0, "factor": 8.0, "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8, "original_max_position_embeddings": 64,
        },
    ],
)  # fmt: skip
def test_scaled_frequencies_are_refused(rope):
    config = LlamaConfig(**SIZES, rope_parameters=rope)
    for target in (config, LlamaForCausalLM(config)):
        with pytest.raises(ValueError, match=f"rope_type must be one of .* got '{rope['rope_type']}'"):
            apply_p_rope(target, 0.5)
        assert config.rope_parameters["rope_type"] == rope["rope_type"]


def test_what_cannot_be_patched_is_refused():
    with pytest.raises(TypeError, match="PreTrainedModel or a PreTrainedConfig, got Linear"):
        apply_p_rope(torch.nn.Linear(2, 2), 0.5)
    gpt2 = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16)
    for target in (gpt2, GPT2LMHeadModel(gpt2)):
        with pytest.raises(ValueError, match="no rotary position encoding"):
            apply_p_rope(target, 0.5)
    for target in (PhiConfig(), GPTNeoXConfig()):
        with pytest.raises(ValueError, match=r"of each head \(partial_rotary_factor"):
            apply_p_rope(target, 0.5)
    phi = AutoModelForCausalLM.from_config(
        PhiConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=48)
    )
    with pytest.raises(ValueError, match="rotated whole"):
        apply_p_rope(phi, 0.5)
    for arguments in ({"reverse": True}, {"layers": [0]}):
        with pytest.raises(ValueError, match="a config cannot say"):
            apply_p_rope(LlamaConfig(**SIZES), 0.5, **arguments)
    for target in (LlamaConfig(**SIZES), llama()):
        with pytest.raises(ValueError, match=r"p must be in \[0, 1\], got 1.5"):
            apply_p_rope(target, 1.5)
    with pytest.raises(ValueError, match=r"layers must be in 0 … 2, got 3, 7"):
        apply_p_rope(llama(), 0.5, layers=[1, 7, 3])


# -- the propositions ---------------------------------------------------------------------------------------------------


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_rotations_are_rotations():
    x, y = normal(5, 16), normal(5, 16, seed=1)
    at = torch.tensor([0, 1, 7, 100, 4095])
    turned = theory.rotate(x, at, 10_000.0)
    assert torch.allclose(turned.norm(dim=1), x.norm(dim=1))
    assert torch.equal(turned[0], x[0])
    assert torch.allclose(theory.rotate(theory.rotate(x, 3, 10_000.0), 4, 10_000.0), theory.rotate(x, 7, 10_000.0))
    for i, j in ((9, 2), (4, 4), (300, 17)):  # a logit depends on i − j alone
        product = (theory.rotate(x, i, 10_000.0) * theory.rotate(y, j, 10_000.0)).sum(1)
        wanted = theory.logits_by_distance(x, y, torch.tensor([i - j]), 10_000.0)[:, 0]
        assert torch.allclose(product, wanted)


def test_rope_need_not_decay():
    for seed in range(20):
        r = int(torch.randint(4096, (), generator=torch.Generator().manual_seed(seed)))
        assert theory.maximal_distance(normal(256, seed=seed), r, 10_000.0) == r
    hole = normal(16)
    hole[[3, 11]] = 0.0
    with pytest.raises(ValueError, match="every pair of q must be non-zero"):
        theory.maximal_distance(hole, 3, 10_000.0)
    with pytest.raises(ValueError, match=r"r must be in \[0, 8192\], got 9000"):
        theory.maximal_distance(normal(16), 9000, 10_000.0)
    with pytest.raises(ValueError, match="finite"):
        theory.maximal_distance(torch.tensor([math.nan, 1.0]), 3, 10_000.0)


def test_gaussian_logits_have_no_mean_and_equal_entries_decay():
    found = theory.gaussian_expectation([0, 5, 4000], 64, 10_000.0, draws=20_000, generator=torch.Generator().manual_seed(0))
    assert (found.mean.abs() < 4 * found.standard_error).all()
    assert torch.allclose(found.standard_error * math.sqrt(20_000), torch.full((3,), 8.0, dtype=torch.float64), rtol=0.05)
    ones = torch.ones(64)
    near, far = theory.logits_by_distance(ones, ones, torch.tensor([0, 4000]), 10_000.0)
    assert near == pytest.approx(64)
    assert abs(far) < 16
    with pytest.raises(ValueError, match="draws"):
        theory.gaussian_expectation([0], 8, 10.0, draws=1)


def test_without_positions_no_head_is_positional():
    q, k = normal(16), normal(16, seed=1)
    weights = theory.causal_attention(q.expand(9, -1), k.expand(9, -1), None)
    assert torch.allclose(weights, (1 / torch.arange(1, 10, dtype=torch.float64))[:, None].expand(9, 9).tril())
    assert not torch.allclose(theory.causal_attention(q.expand(9, -1), k.expand(9, -1), 10_000.0), weights, atol=1e-3)


@pytest.mark.parametrize("back", [0, 1, 5])
@pytest.mark.parametrize(("band", "N", "epsilon"), [(1, 40, 0.1), (1, 44, 0.1), (8, 300, 0.01), (32, 512, 0.3), (32, 6, 0.9)])
def test_rope_can_be_positional(back, band, N, epsilon):
    assert theory.target_weight(band, N, 10_000.0, 64, back=back, epsilon=epsilon) >= 1 - epsilon - 1e-12


def test_the_gap_closes_at_44_and_a_band_opens_it():
    brute = min(sum(1 - math.cos(delta * 10_000 ** (-2 * k / 16)) for k in range(3)) for delta in range(1, 101))
    assert theory.diagonal_gap(3, 100, 10_000.0, 16) == pytest.approx(brute)
    gaps = [theory.diagonal_gap(band, 512, 10_000.0, 64) for band in range(1, 33)]
    assert gaps == sorted(gaps)
    assert gaps[0] < 1e-4 < 0.5 < gaps[-1]
    for arguments, message in (((0, 4), "band"), ((33, 4), "band"), ((1, 0), "N must be")):
        with pytest.raises(ValueError, match=message):
            theory.diagonal_gap(*arguments, 10_000.0, 64)
    with pytest.raises(ValueError, match="epsilon"):
        theory.target_weight(1, 4, 10_000.0, 64, back=0, epsilon=0.0)
    with pytest.raises(ValueError, match="back"):
        theory.target_weight(1, 4, 10_000.0, 64, back=4, epsilon=0.5)


def test_every_turning_pair_turns_against_its_content():
    for pair in range(32):
        horizon = theory.semantic_horizon(10_000.0, 64, pair)
        q = torch.zeros(64)
        q[pair] = 2.0
        before, after = theory.logits_by_distance(q, q, torch.tensor([math.floor(horizon), math.floor(horizon) + 1]), 10_000.0)
        assert before > 0 > after
    assert theory.semantic_horizon(10_000.0, 64, 31) == theory.semantic_horizon(10_000.0, 64)
    with pytest.raises(ValueError, match="pair"):
        theory.semantic_horizon(10_000.0, 64, 32)
    with pytest.raises(ValueError, match="head_dim"):
        theory.semantic_horizon(10_000.0, 7)
    with pytest.raises(ValueError, match="base"):
        theory.semantic_horizon(0.0, 8)


def test_looking_at_a_model_leaves_each_modules_mode():
    model = llama().train()
    model.model.layers[0].eval()  # as a user freezes a part
    modes = [module.training for module in model.modules()]
    rotary_layers(model)
    assert [module.training for module in model.modules()] == modes
    assert len(set(modes)) == 2
