"""The study's own pieces: its arms share weights within bounds, rivals are treated alike, its claims read what they say."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from assay.compression.rotated_runtime_smooth import RRSConfig, RRSLinear, configure_activations
from assay.compression.rotated_runtime_smooth import arms as shared
from assay.compression.rotated_runtime_smooth.arms import Rounded, SmoothQuant
from assay.compression.rotated_runtime_smooth.smoothquant import quantize_smoothquant
from assay.compression.rotated_runtime_smooth.study import Case, logit_change, loss, study

IDS = torch.randint(0, 96, (80,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _empty_cache():
    shared._WEIGHTS.clear()
    yield
    shared._WEIGHTS.clear()


def case(**changes):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=48, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return Case(LlamaForCausalLM(config).eval(), IDS[:32], IDS[32:], **changes)


def test_static_scales_meet_gptq_like_the_other_arms():
    correlated = case()
    with torch.no_grad():
        correlated.model.model.embed_tokens.weight.copy_(torch.randn(96, 5) @ torch.randn(5, 48) + 0.1 * torch.randn(96, 48))
        exact = correlated.model(input_ids=correlated.calib[None]).logits
        errors = {}
        for method in ("rtn", "gptq"):
            model = SmoothQuant()(correlated._replace(weights=method), 4, 16, 0)
            errors[method] = (model(input_ids=correlated.calib[None]).logits - exact).norm()
    assert errors["gptq"] < 0.9 * errors["rtn"]


def test_static_scales_come_from_all_of_the_calibration_text(monkeypatch):
    from assay.compression.rotated_runtime_smooth import smoothquant

    whole = quantize_smoothquant(case().fresh(), IDS, w_bits=16)
    monkeypatch.setattr(smoothquant, "SEQUENCE", 1)
    single = quantize_smoothquant(case().fresh(), IDS[:1].repeat(3), w_bits=16)
    several = quantize_smoothquant(case().fresh(), torch.stack([IDS[0], IDS[1]]), w_bits=16)
    first, both, all_ = (m.model.layers[0].mlp.gate_proj.weight.abs().sum() for m in (single, several, whole))
    assert first < both < all_  # maxima over more text are larger, and weights are multiplied by them


def test_arms_leave_the_model_and_each_other_alone():
    given = case()
    before = copy.deepcopy(given.model.state_dict())
    arms = {name: arm for name, arm in study.arms.items() if name != "torchao-w4a8"}
    for _ in range(2):
        for arm in arms.values():
            for bits in arm.settings.values() if isinstance(arm, Rounded) else [(4, 4), (16, 4)]:
                arm(given, *bits, 0)
    assert all(torch.equal(before[key], value) for key, value in given.model.state_dict().items())
    assert any(isinstance(m, RRSLinear) for m in Rounded()(given, 16, 4, 0).modules())
    # kept and shared, an arm gives what it gives on its own
    losses = [loss(study.arms["rrs"](given, 4, 4, 0), given.window)]
    shared._WEIGHTS.clear()
    losses.append(loss(study.arms["rrs"](given, 4, 4, 0), given.window))
    assert losses[0] == losses[1]
    assert logit_change(Rounded()(given, 16, 16, 0), given) == 0


def test_weights_are_kept_once_and_within_bounds(monkeypatch):
    given = case()
    size = sum(p.nbytes for p in given.model.parameters())
    embedding = given.model.model.embed_tokens.weight
    plain, rotated = Rounded(), Rounded(rotate="hadamard")
    assert plain(given, 16, 4, 0) is not plain(given, 16, 4, 0)  # cheap to make: not kept
    four = plain(given, 4, 4, 0)
    assert four is plain(given, 4, 16, 0)
    assert four.model.embed_tokens.weight.data_ptr() == embedding.data_ptr()
    wide, narrow = rotated(given, 16, 4, 0), rotated(given, 4, 4, 0)
    assert narrow.model.embed_tokens.weight.data_ptr() == wide.model.embed_tokens.weight.data_ptr()
    assert shared.held_bytes(given.model) < 1.7 * size  # one untied full-precision model, two packed ones

    monkeypatch.setattr(shared, "KEPT_BYTES", 3.1 * size)
    for seed in range(1, 6):
        rotated(given, 16, 4, seed)
        assert shared.held_bytes(given.model) <= 3.1 * size
    assert len(shared._WEIGHTS) < 3
    assert rotated(given, 16, 4, 5) is rotated(given, 16, 4, 5)


def test_the_four_spike_claim_has_its_bound():
    claim = next(c for c in study.claims if "four spikes" in c.text)
    assert claim.holds is not None

    def replicate(rrs):
        metrics = {"rrs": rrs, "rotation": 0.14}
        return {arm: SimpleNamespace(metrics={"synthetic_four_spikes": value}) for arm, value in metrics.items()}

    assert claim.statistic(replicate(0.80)) == pytest.approx(5.71, abs=0.01)
    assert claim.holds.low == 3 > claim.statistic(replicate(0.30))


def test_the_peer_is_no_four_bit_arm_and_leaves_the_model_alone():
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=160, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2
    )
    given = case()._replace(model=LlamaForCausalLM(config).eval())  # its groups are of 32 inputs
    before = given.model.model.layers[0].mlp.up_proj.weight.clone()
    arm = study.arms["torchao-w4a8"]
    assert list(arm.settings) == ["w4a8"]
    assert logit_change(arm(given, 4, 8, 0), given) > 0
    assert torch.equal(given.model.model.layers[0].mlp.up_proj.weight, before)


def test_configured_activations_follow_the_arm():
    given = case()
    model = study.arms["rrs-sink-out"](given, 4, 4, 0)
    assert {m.sink for m in model.modules() if isinstance(m, RRSLinear)} == {1}
    configure_activations(model, RRSConfig(group="auto"))
    assert {m.sink for m in study.arms["rrs"](given, 4, 4, 0).modules() if isinstance(m, RRSLinear)} == {0}
