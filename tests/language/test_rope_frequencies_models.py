"""Audit and ablation of whole models of many families, against brute force and against models built to be positional."""

import copy
import math
import pickle

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from assay.language.rope_frequencies import (
    analyse_rope,
    p_rope_inv_freq,
    positional_heads,
    rope_ablate,
    rotary_frequencies,
    rotary_layers,
    scores_without,
    theory,
)
from assay.language.rope_frequencies.layers import decoder_forward
from assay.language.rope_frequencies.tap import _TAPPED, Tap, tapped

SIZES = {
    "vocab_size": 48, "hidden_size": 64, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "llama": {}, "mistral": {"sliding_window": 8}, "qwen2": {}, "qwen3": {}, "olmo2": {}, "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 8},
    "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window": 8},
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "phi": {}, "phi3": {}, "stablelm": {}, "gpt_neox": {}, "cohere": {}, "glm": {}, "smollm3": {"num_hidden_layers": 4},
}  # fmt: skip
PAIRING = {"cohere": "interleaved", "glm": "interleaved"}
PARTIAL = {"phi": 4, "stablelm": 2, "gpt_neox": 2, "glm": 4}  # pairs of the eight
IDS = torch.randint(3, 48, (2, 24), generator=torch.Generator().manual_seed(0))


def build(family, **changes):
    torch.manual_seed(0)
    usual = AutoConfig.for_model(family)
    known = {key: value for key, value in SIZES.items() if hasattr(usual, key)}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**known, **FAMILIES[family], **changes})).eval()
    with torch.no_grad():  # as initialised, queries are so short that attention is uniform
        for name, weight in model.named_parameters():
            if any(part in name for part in ("q_proj.weight", "k_proj.weight", "qkv_proj.weight", "query_key_value.weight")):
                weight.mul_(15)
    return model


def seen(model, ids=IDS):
    """Queries, keys and attention weights of every layer, in order."""
    calls = []
    modules = [layer.attention for layer in rotary_layers(model)]
    with torch.no_grad(), tapped(model, modules, Tap(see=lambda m, call, weights, attend: calls.append((call, weights)))):
        decoder_forward(model, ids)
    return calls


@torch.no_grad()
def logits(model, ids=IDS):
    return model(ids, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_pairs_give_the_attention_of_every_family(family):
    """Softmax of the pairs' products, all rotations undone and redone by hand, is what the model itself attends to."""
    model = build(family)
    before = logits(model)
    layers = rotary_layers(model)
    assert len(layers) == model.config.num_hidden_layers
    for layer, (call, weights) in zip(layers, seen(model), strict=True):
        turning = bool(layer.inv_freq.any())
        assert turning == (family != "smollm3" or layer.index != 3)
        assert layer.pairs == PARTIAL.get(family, 8)
        assert layer.pairing == PAIRING.get(family, "half")
        q, k = layer.as_complex(call.query), layer.as_complex(call.key).repeat_interleave(layer.heads // layer.kv_heads, 1)
        assert torch.allclose(layer.from_complex(q, call.query), call.query)
        at = torch.arange(24)
        angle = (at[None, :] - at[:, None])[..., None] * layer.inv_freq  # (i, j, pairs)
        back = torch.polar(torch.ones(24, layer.pairs), -at[:, None] * layer.inv_freq)
        still_q, still_k = q * back, k * back
        product = torch.einsum("bhif,bhjf,ijf->bhij", still_q.conj(), still_k, torch.polar(torch.ones_like(angle), angle)).real
        rest = (x[..., 2 * layer.pairs :] for x in (call.query, call.key.repeat_interleave(layer.heads // layer.kv_heads, 1)))
        product = product + torch.einsum("bhid,bhjd->bhij", *rest)
        scaled = product * getattr(layer.attention, "scaling", 0.25)
        if family == "gemma2":
            scaled = 50 * (scaled / 50).tanh()
        ours = scaled.masked_fill(~call.visible, -torch.inf).softmax(-1)
        assert torch.allclose(ours, weights, atol=2e-5)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_reports_of_every_family(family):
    model = build(family)
    report = analyse_rope(model, IDS, contrib=True)
    heads = report.head_scores
    assert report.usage.shape == (model.config.num_hidden_layers, 4, PARTIAL.get(family, 8))
    assert torch.allclose(report.shares(1), torch.ones(1))
    assert len(heads) == 4 * model.config.num_hidden_layers
    assert heads[["self", "prev", "sink"]].to_numpy().min() >= 0
    assert heads[["self", "prev", "sink"]].to_numpy().max() <= 1
    bound = report.q_norm * report.k_norm
    assert (report.contrib <= 4 * bound).all()  # Cauchy-Schwarz holds token by token; means of few tokens are near it
    assert (report.contrib > 0).all()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma2", "cohere", "qwen3", "phi3", "smollm3"])
def test_unturning_everything_equals_zero_frequencies(family):
    """Two ways to no positions: rotations taken back inside attention, and frequencies of zero."""
    model = build(family)
    before = logits(model)
    with rope_ablate(model, torch.zeros(8, dtype=torch.bool)):
        ours = logits(model)
    with rotary_frequencies(model, lambda head_dim, base: torch.zeros(head_dim // 2)):
        theirs = logits(model)
    assert torch.allclose(ours, theirs, atol=2e-4)
    assert not torch.allclose(ours, before, atol=1e-2)
    half = torch.arange(8) < 4
    with rope_ablate(model, half):
        ours = logits(model)
    with rotary_frequencies(model, lambda head_dim, base: p_rope_inv_freq(head_dim, base, 0.5)):
        assert torch.allclose(ours, logits(model), atol=2e-4)
    with rope_ablate(model, torch.ones(1, 1, 8, dtype=torch.bool)):
        assert torch.allclose(logits(model), before, atol=1e-5)
    assert torch.equal(logits(model), before)
    assert not _TAPPED


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere"])
def test_heads_that_share_a_key_can_differ(family):
    model = build(family)
    without = torch.zeros(4, 8, dtype=torch.bool)
    with rope_ablate(model, {0: without}):
        all_still = seen(model)[0][1]
    plain = seen(model)[0][1]
    mixed = without.clone()
    mixed[[0, 2, 3]] = True  # heads 0 and 1 share a key, heads 2 and 3 too
    with rope_ablate(model, {0: mixed}):
        found = seen(model)[0][1]
        out = logits(model)
    assert torch.allclose(found[:, 1], all_still[:, 1], atol=1e-5)
    assert torch.allclose(found[:, [0, 2, 3]], plain[:, [0, 2, 3]], atol=1e-5)
    assert not torch.allclose(out, logits(model), atol=1e-3)
    assert model.model.layers[0].self_attn.num_key_value_groups == 2
    with rope_ablate(model, {0: mixed, 1: without}):
        assert not torch.allclose(logits(model), out, atol=1e-3)


def test_ablations_nest_and_an_audit_sees_them():
    model = build("llama")
    band = torch.arange(8) >= 4
    with rope_ablate(model, {0: band}), rope_ablate(model, {1: band}):
        nested, report = logits(model), analyse_rope(model, IDS)
    with rope_ablate(model, band):
        assert torch.allclose(logits(model), nested, atol=1e-4)
    with rotary_frequencies(model, lambda head_dim, base: p_rope_inv_freq(head_dim, base, 0.5, reverse=True)):
        patched = analyse_rope(model, IDS)
    for name in ("self", "prev", "sink"):
        assert torch.allclose(report.scores[name], patched.scores[name], atol=1e-5)
    assert torch.allclose(report.usage, patched.usage, rtol=1e-4)
    alone = scores_without(model, IDS, {"all": torch.ones(8).bool(), "band": band})
    plain = analyse_rope(model, IDS)
    for name in ("self", "prev", "sink"):
        assert torch.allclose(alone["all"][name], plain.scores[name], atol=1e-5)
        assert torch.allclose(alone["band"][name][0], patched.scores[name][0], atol=1e-5)
        # in later layers the heads are tested on the intact model's stream, which the patched one no longer has
    assert not torch.allclose(alone["band"]["prev"][1], patched.scores["prev"][1], atol=1e-4)


def positional_llama(back=1, dtype=torch.float32, heads=2):
    """A head that looks `back` tokens back whatever they are (P4), by biases alone; the other head looks nowhere."""
    config = LlamaConfig(**SIZES | {"num_attention_heads": heads, "num_key_value_heads": heads}, attention_bias=True)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    psi = 8 * (torch.arange(16) % 8 < 4).double()
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            for projection in (attention.q_proj, attention.k_proj):
                projection.weight.zero_()
                projection.bias.zero_()
            attention.q_proj.bias[:16] = psi
            attention.k_proj.bias[:16] = theory.rotate(psi, back, 10_000.0)
    return model.to(dtype)


@pytest.mark.parametrize(("kind", "back"), [("prev", 1), ("self", 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_built_to_be_positional_is_found(kind, back, dtype):
    model = positional_llama(back, dtype)
    report = analyse_rope(model, IDS)
    assert positional_heads(report, kind) == [(0, 0), (1, 0)]
    assert positional_heads(report, {"prev": "self", "self": "prev"}[kind]) == []
    assert report.scores[kind][0, 0] > 0.9
    rows = torch.arange(9, 25, dtype=torch.float32)
    assert report.scores[kind][0, 1] == pytest.approx(float((1 / rows).mean()), rel=1e-2)  # no positions: uniform
    share = report.shares(2)[0, 0]
    assert share[0] == pytest.approx(1.0, abs=1e-3)
    high, low = torch.arange(8) >= 4, torch.arange(8) < 4  # what is kept
    without = scores_without(model, IDS, {"high": high, "low": low})
    assert without["low"][kind][0, 0] == pytest.approx(float(report.scores[kind][0, 0]), rel=1e-2)
    assert without["high"][kind][0, 0] < 0.2


def test_a_head_that_looks_at_content_is_not_positional():
    """Every token looks at the one token that its predecessor happens to be: prev by content, gone once shuffled."""
    model = positional_llama()
    ids = torch.arange(3, 27)[None]
    with torch.no_grad():
        for layer in model.model.layers[:1]:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                projection.weight.zero_()
                projection.bias.zero_()
            embeddings = torch.nn.functional.normalize(torch.randn(48, 64), dim=1) * 8
            model.model.embed_tokens.weight.copy_(embeddings)
            code = torch.linalg.qr(torch.randn(26, 16)).Q * 30
            pinv = torch.linalg.pinv(embeddings[3:27])
            layer.self_attn.k_proj.weight[:16] = (pinv @ code[1:25]).T
            layer.self_attn.q_proj.weight[:16] = (pinv @ code[0:24]).T
    with rotary_frequencies(model, lambda head_dim, base: torch.zeros(8)):
        report = analyse_rope(model, ids)
    assert report.scores["prev"][0, 0] > 0.5
    assert (0, 0) not in positional_heads(report)
    assert (0, 0) in positional_heads(report, stable=0.0)
    plain = rotary_layers(model)  # and the pairing of frequencies that are all zero does not matter
    assert plain[0].inv_freq.any()


def test_audit_against_brute_force():
    model = build("llama")
    caught = {}
    attention = model.model.layers[1].self_attn
    hooks = [
        getattr(attention, f"{name}_proj").register_forward_hook(lambda m, i, o, name=name: caught.__setitem__(name, o))
        for name in "qk"
    ]
    report = analyse_rope(model, IDS, contrib=True, shuffle_control=False)
    median = analyse_rope(model, IDS, average="median", attention=False)
    for hook in hooks:
        hook.remove()
    q = caught["q"].detach().view(2, 24, 4, 16)
    k = caught["k"].detach().view(2, 24, 2, 16)
    weights = seen(model)[1][1]
    for h in range(4):
        for pair in range(8):
            q_pair, k_pair = q[:, :, h, [pair, pair + 8]], k[:, :, h // 2, [pair, pair + 8]]
            lengths = q_pair.norm(dim=-1), k_pair.norm(dim=-1)
            assert report.q_norm[1, h, pair] == pytest.approx(float(lengths[0].mean()), rel=1e-4)
            assert report.k_norm[1, h, pair] == pytest.approx(float(lengths[1].mean()), rel=1e-4)
            assert report.q_norm_without_first[1, h, pair] == pytest.approx(float(lengths[0][:, 1:].mean()), rel=1e-4)
            assert median.k_norm[1, h, pair] == pytest.approx(float(lengths[1].median(1).values.mean()), rel=1e-4)
            total, attended = 0.0, 0.0
            for b in range(2):
                for i in range(24):
                    for j in range(i + 1) if pair in (0, 5) else ():
                        a = (j - i) * 10_000.0 ** (-2 * pair / 16)
                        turn = torch.tensor([[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]])
                        size = abs(float(q_pair[b, i] @ turn @ k_pair[b, j]))
                        total += size / (2 * 24 * 25 / 2)
                        attended += size * float(weights[b, h, i, j]) / (2 * 24)
            if pair in (0, 5):
                assert report.contrib[1, h, pair] == pytest.approx(total, rel=1e-3)
                assert report.contrib_attended[1, h, pair] == pytest.approx(attended, rel=1e-3)
        rows = range(8, 24)
        for name, column in (("self", lambda i: i), ("prev", lambda i: i - 1), ("sink", lambda i: 0)):
            wanted = sum(float(weights[:, h, i, column(i)].mean()) for i in rows) / len(rows)
            assert report.scores[name][1, h] == pytest.approx(wanted, rel=1e-4)
    assert torch.equal(report.usage, report.q_norm * report.k_norm)


def test_contributions_in_blocks_and_through_a_window(monkeypatch):
    from assay.language.rope_frequencies import scores

    model = build("mistral")
    whole = analyse_rope(model, IDS, contrib=True)
    monkeypatch.setattr(scores, "_ELEMENTS", 8 * 24 * 3)
    blocks = analyse_rope(model, IDS, contrib=True)
    assert torch.allclose(whole.contrib, blocks.contrib, rtol=1e-4)
    assert torch.allclose(whole.contrib_attended, blocks.contrib_attended, rtol=1e-4)
    call, _ = seen(model)[0]
    layer = rotary_layers(model)[0]
    q, k = layer.as_complex(call.query), layer.as_complex(call.key).repeat_interleave(2, 1)
    size = torch.einsum("bhif,bhjf->bhijf", q.conj(), k).real.abs()
    near = call.visible.expand(2, 4, 24, 24)
    assert near[0, 0].sum(1).max() == 8  # tokens outside the window count for nothing
    wanted = torch.stack([size[:, h][near[:, h]].mean(0) for h in range(4)])
    assert torch.allclose(whole.contrib[0], wanted, rtol=1e-4)


def test_lengths_do_not_hear_of_positions_or_scaling():
    yarn = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 16.0, "original_max_position_embeddings": 64}
    plain, scaled = build("llama"), build("llama", rope_parameters=yarn, max_position_embeddings=1024)
    assert rotary_layers(scaled)[0].scale > 1.2
    reports = [analyse_rope(model, IDS) for model in (plain, scaled)]
    assert torch.allclose(reports[0].usage[0], reports[1].usage[0], rtol=1e-4)
    assert not torch.allclose(reports[0].inv_freq, reports[1].inv_freq)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(analyse_rope(plain, IDS[:, order]).usage[0], reports[0].usage[0], rtol=1e-4)
    with rope_ablate(scaled, torch.zeros(8, dtype=torch.bool)):
        ours = logits(scaled)
    scaled.model.rotary_emb.inv_freq.zero_()
    assert torch.allclose(ours, logits(scaled), atol=2e-4)


def test_an_untrained_model_uses_all_frequencies_alike():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | {"hidden_size": 256, "num_hidden_layers": 6}))
    ids = torch.randint(48, (1, 256), generator=torch.Generator().manual_seed(1))
    assert torch.allclose(analyse_rope(model, ids).shares(4).mean((0, 1)), torch.full((4,), 0.25), atol=0.02)


def test_the_model_is_left_as_it_was():
    model = build("llama").train()
    config = copy.deepcopy(model.config)
    assert config._attn_implementation == "sdpa"
    state = pickle.dumps(model.state_dict())
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    report = analyse_rope(model, IDS)
    assert torch.equal(analyse_rope(model, IDS).usage, report.usage)
    with pytest.raises(RuntimeError, match="stop"), rope_ablate(model, torch.zeros(8, dtype=torch.bool)):
        raise RuntimeError("stop")
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert pickle.dumps(model.state_dict()) == state
    assert model.config.to_dict() == config.to_dict()
    assert not _TAPPED


def test_gradients_pass_through_an_ablated_model():
    model = build("llama")
    with rope_ablate(model, {1: torch.arange(8) < 2}):
        model(IDS, labels=IDS, use_cache=False).loss.backward()
    gradient = model.model.layers[1].self_attn.q_proj.weight.grad
    assert gradient.abs().sum() > 0
    assert torch.isfinite(gradient).all()


def test_caches_are_refused_and_generation_works_without():
    model = build("llama")
    with rope_ablate(model, torch.arange(8) < 4):
        with pytest.raises(ValueError, match="use_cache=False"):
            model.generate(IDS, max_new_tokens=3, do_sample=False, eos_token_id=None)
        ours = model.generate(IDS, max_new_tokens=3, do_sample=False, eos_token_id=None, use_cache=False)
    with rotary_frequencies(model, lambda head_dim, base: p_rope_inv_freq(head_dim, base, 0.5)):
        assert torch.equal(ours, model.generate(IDS, max_new_tokens=3, do_sample=False, eos_token_id=None))


def test_the_report_shows_itself(tmp_path):
    report = analyse_rope(build("llama"), IDS)
    for kind in ("usage", "heads"):
        report.plot(kind).savefig(tmp_path / f"{kind}.png")
    assert report.angles[0, 0] == 23
    assert report.shares(3).shape == (2, 4, 3)
    assert torch.allclose(report.shares(8), report.usage / report.usage.sum(-1, keepdim=True))
    assert list(report.head_scores.columns[:5]) == ["layer", "head", "self", "prev", "sink"]
    with pytest.raises(ValueError, match="kind must be"):
        report.plot("heat")
    with pytest.raises(ValueError, match="parts must be in"):
        report.shares(9)
    for arguments, message in (
        ({"kind": "sink"}, "kind"), ({"threshold": 1.0}, "threshold"), ({"stable": 2.0}, "stable"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"{message} must be"):
            positional_heads(report, **arguments)
    blind = analyse_rope(build("llama"), IDS, attention=False)
    for ask in (lambda: blind.head_scores, lambda: positional_heads(blind), lambda: blind.plot("heads")):
        with pytest.raises(ValueError, match="attention=True"):
            ask()
    assert blind.contrib is None


GPT2 = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=48)
GPTJ = GPTJConfig(n_layer=1, n_head=2, n_embd=16, rotary_dim=4, vocab_size=48)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (lambda: torch.nn.Linear(2, 2), TypeError, "PreTrainedModel, got Linear"),
        (lambda: GPT2LMHeadModel(GPT2), ValueError, "GPT2LMHeadModel has no rotary position encoding"),
        (lambda: GPTJForCausalLM(GPTJ), ValueError, "GPT-J keeps tables of sines"),
    ],
)
def test_models_that_are_refused(model, error, message):
    with pytest.raises(error, match=message):
        analyse_rope(model(), IDS)


def test_latent_attention_is_refused_by_looking():
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "deepseek_v3", vocab_size=48, hidden_size=32, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
            first_k_dense_replace=1, pad_token_id=0,
        )
    )  # fmt: skip
    with pytest.raises(ValueError, match="do not turn by position"):
        rotary_layers(model)


def test_a_wrong_pairing_is_seen():
    """A model that turns by other angles than its buffer says is refused, not plotted."""
    model = build("llama")
    model.model.rotary_emb.register_forward_hook(lambda m, i, o: tuple(t.flip(-1) for t in o))
    with pytest.raises(ValueError, match="do not turn by position · inv_freq in their first 16 dimensions"):
        rotary_layers(model)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (IDS[0], r"int64 \(batch, tokens\), got torch.int64 \(24,\)"),
        (IDS.float(), "int64"),
        (IDS[:0], "int64"),
        ([1, 2], "got list"),
        (IDS[:, :15], "at least 16 tokens, got 15"),
        (IDS + 40, r"in \[0, 48\)"),
        (-IDS, r"in \[0, 48\)"),
    ],
)
def test_ids_that_are_refused(ids, message):
    with pytest.raises(ValueError, match=message):
        analyse_rope(build("llama"), ids)
    with pytest.raises(ValueError, match=message):
        scores_without(build("llama"), ids, {})


@pytest.mark.parametrize(
    ("keep", "error", "message"),
    [
        (torch.zeros(8), ValueError, "must be bool"),
        (torch.zeros(7).bool(), ValueError, r"\(heads, pairs\) = \(4, 8\)"),
        (torch.zeros(3, 8).bool(), ValueError, "broadcast"),
        (torch.zeros(3, 4, 8).bool(), ValueError, "2 layers"),
        ({2: torch.zeros(8).bool()}, ValueError, "layers 0 … 1, got 2"),
        ({0: [True] * 8}, ValueError, "got list"),
        ([True] * 8, TypeError, "got list"),
    ],
)
def test_masks_that_are_refused(keep, error, message):
    model = build("llama")
    with pytest.raises(error, match=message), rope_ablate(model, keep):
        pass
    assert not _TAPPED
    assert model.config._attn_implementation == "sdpa"


def test_other_bad_input():
    model = build("llama")
    with pytest.raises(ValueError, match="average must be"):
        analyse_rope(model, IDS, average="mode")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"queries of model.layers.1.self_attn are not finite"):
        analyse_rope(model, IDS)
    assert model.config._attn_implementation == "sdpa"
