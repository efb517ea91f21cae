"""The study's own pieces: arms meet the same weights and text, perplexity is the model's, claims read what they say."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig

from assay.bench import NotApplicable
from assay.bench.config import with_overrides
from assay.bench.log import Log, seed_everything
from assay.language.rope_frequencies import apply_p_rope, partial_inv_freq
from assay.language.rope_frequencies.propositions import propositions, unflipped
from assay.language.rope_frequencies.reading import fresh, perplexities
from assay.language.rope_frequencies.study import Case, loaded, prepare, study, trial

SMOKE = study.scale("smoke")


def log_of(replicate, arm="", seed=0):
    return Log(seed=seed, replicate=replicate, scale="smoke", device="cpu", arm=arm)


def case_of(replicate, config=SMOKE):
    seed_everything(0)
    return prepare(config, log_of(replicate))


def run(arm, case, replicate, config=SMOKE):
    return trial(study.arms[arm], case, config, log_of(replicate, arm))


def test_replicates_are_cases_by_seed():
    assert study.replicate_names(study.scale("desk")) == [
        *(f"theory/{seed}" for seed in range(3)), *(f"smollm2-135m/{seed}" for seed in range(3)), "gemma3-270m/0",
        *(f"train/{seed}" for seed in range(3)),
    ]  # fmt: skip


def test_what_is_read_was_not_trained_on(tmp_path):
    text = bytearray(b"a" * 10_000)
    for start in torch.linspace(0, 10_000 - SMOKE.extrapolate, SMOKE.windows).long():
        text[start : start + SMOKE.extrapolate] = b"b" * SMOKE.extrapolate
    (tmp_path / "source.txt").write_bytes(text)
    case = case_of("train/0", with_overrides(SMOKE, {"source": str(tmp_path / "source.txt"), "steps": 200}))
    assert (case.text == ord("b")).all()
    assert (case.train == ord("a")).all()


def test_arms_start_alike():
    case = case_of("train/0")
    assert case.train.shape == (SMOKE.steps, SMOKE.batch, SMOKE.context + 1)
    assert case.text.shape == (SMOKE.windows, SMOKE.extrapolate)
    assert case.text.max() < 256
    weights = [fresh(case.model, 5).state_dict() for _ in range(2)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not torch.equal(fresh(case.model, 6).lm_head.weight, weights[0]["lm_head.weight"])
    assert run("rope", case, "train/0") == run("rope", case, "train/0")


def test_an_arm_trains_at_its_frequencies():
    """Trained through the arm, and by hand with the same weights and a config that says p-RoPE."""
    case = case_of("train/0")
    ours = run("p-rope-0.75", case, "train/0")
    config = apply_p_rope(copy.deepcopy(case.model), 0.75)
    theirs = trial(study.arms["p-rope-0.75"], case._replace(model=config), SMOKE, log_of("train/0", "p-rope-0.75"))
    assert ours == theirs
    assert ours != run("nope", case, "train/0")


@pytest.mark.parametrize("cap", [False, True])
def test_perplexity_is_the_models_own(cap):
    kind = Gemma2Config if cap else LlamaConfig
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**sizes, num_key_value_heads=1, head_dim=16, pad_token_id=0)).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(std=20.0 if cap else 1.0)
    text = torch.randint(64, (6, 40), generator=torch.Generator().manual_seed(0))
    found = perplexities(model, text, 16, log_of("x/0"))
    with torch.no_grad():
        logits = model(text, use_cache=False).logits
        nll = -logits[:, :-1].log_softmax(-1).gather(2, text[:, 1:, None])[..., 0]
        assert found["ppl"] == pytest.approx(float(model(text[:, :16], labels=text[:, :16]).loss.exp()), rel=1e-4)
    assert found["ppl"] == pytest.approx(float(nll[:, :15].mean().exp()), rel=1e-4)
    assert found["ppl_long"] == pytest.approx(float(nll[:, -16:].mean().exp()), rel=1e-4)


def test_a_trained_model_is_read_as_it_is_and_left_as_it_was():
    case = case_of("tiny-llama/0")
    assert case.text.shape == (1, SMOKE.long)
    model = loaded("tiny-llama")[0]
    before = model.model.rotary_emb.inv_freq.clone()
    results = {arm: run(arm, case, "tiny-llama/0") for arm in ("rope", "p-rope-0.75", "nope")}
    assert torch.equal(model.model.rotary_emb.inv_freq, before)
    assert {"read_ppl", "read_low", "read_prev_heads", "read_low_untrained"} <= set(results["rope"])
    assert set(results["nope"]) == {"read_ppl", "read_ppl_long"}
    assert results["nope"]["read_ppl"] != results["rope"]["read_ppl"]
    for arm in ("theta-5e5", "partial-0.75"):
        with pytest.raises(NotApplicable, match="rivals=true"):
            run(arm, case, "tiny-llama/0")
        with pytest.raises(NotApplicable, match="rivals=true"):
            run(arm, case_of("train/0"), "train/0", with_overrides(SMOKE, {"rivals": False}))


def test_a_model_whose_frequencies_cannot_be_replaced_is_still_audited():
    rope = {
        "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, rope_parameters=rope
    )
    case = Case(AutoModelForCausalLM.from_config(config), torch.randint(64, (1, 128)), None, 64)
    assert run("rope", case, "mine/0")["read_low"] > 0
    with pytest.raises(NotApplicable, match="llama3"):
        run("nope", case, "mine/0")


def test_gemma_reads_with_three_arms():
    case = case_of("tiny-llama/0")
    assert run("p-rope-0.75-reversed", case, "gemma3-270m/0")["read_ppl"] > 0
    with pytest.raises(NotApplicable, match=r"reads with rope, p-rope-0\.75"):
        run("nope", case, "gemma3-270m/0")


def test_theory_in_the_study():
    found = propositions(3, 2000)
    assert found["theory_p1_missed"] == found["theory_p5_missed"] == found["theory_p5_still"] == 0
    assert found["theory_p5_turning"] > 0.1
    assert found["theory_p4_gap_one"] < 1e-4 < found["theory_p4_gap_8"]
    assert unflipped(8, 100.0) == 0
    assert run("p-rope-0.25", case_of("theory/0"), "theory/0") == {"theory_differ": 0.0}
    wrong = trial(lambda d, b: partial_inv_freq(d, b, 0.75), case_of("theory/0"), SMOKE, log_of("theory/0", "p-rope-0.75"))
    assert wrong["theory_differ"] > 100  # the easy mistake is told apart
    with pytest.raises(NotApplicable):
        run("p-rope-0.75-reversed", case_of("theory/0"), "theory/0")


def replicate(name, **arms):
    class Fake(dict):
        pass

    r = Fake({arm: SimpleNamespace(metrics=metrics, **metrics) for arm, metrics in arms.items()})
    r.name = name
    return r


def claim(start):
    return next(c for c in study.claims if c.text.startswith(start))


def test_claims_read_what_they_say():
    arms = {"rope": 9.0, "p-rope-0.75": 9.09, "nope": 12.0}
    trained = replicate("train/0", **{arm: {"train_ppl": value, "train_ppl_long": 18.0} for arm, value in arms.items()})
    parity, behind = claim("Trained: perplexity of 0.75-RoPE and RoPE, apart"), claim("Trained: perplexity of NoPE above the w")
    assert parity.statistic(trained) == pytest.approx(0.01)
    assert parity.holds.high == 0.02
    assert parity.gates[0].statistic(trained) == pytest.approx(1 / 3)
    assert behind.statistic(trained) == pytest.approx(12 / 9.09 - 1)
    assert claim("Trained: rope, perplexity of the last").statistic(trained) == pytest.approx(1.0)
    read = replicate("smollm2-135m/1", **{
        "rope": {"read_low": 0.8, "read_low_untrained": 0.5},
        "p-rope-0.75": {"read_ppl": 20.0, "read_ppl_long": 8.0},
        "p-rope-0.75-reversed": {"read_ppl": 40.0, "read_ppl_long": 4.0},
    })  # fmt: skip
    assert claim("SmolLM2: that share above").statistic(read) == pytest.approx(0.3)
    assert claim("SmolLM2, 512 tokens: log perplexity").statistic(read) == pytest.approx(math.log(2))
    assert claim("SmolLM2, tokens 1,537 to 2,048: the same").statistic(read) == pytest.approx(-math.log(2))
    assert parity.statistic(read) is None
    assert claim("SmolLM2: share of usage").statistic(trained) is None
    judged = [c for c in study.claims if c.holds is not None]
    assert len(judged) == 16
