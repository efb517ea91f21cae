"""The study's own pieces: arms undo themselves, rivals are as strong as they say, halves are kept apart."""

import pytest
import torch
from torch import nn

from assay.bench import NotApplicable
from assay.bench.claims import Outcome, Replicate
from assay.bench.log import Log, seed_everything
from assay.language import AssociationProbe, NoisyRecall, RecallTransformer, best_cut
from assay.language.recall_vs_reasoning.arms import Chosen, WithoutTop, matching_bias, out_value, random_drop
from assay.language.recall_vs_reasoning.competing import NAMES, city_prompts, name_prompts
from assay.language.recall_vs_reasoning.study import RUN_IN, PromptCase, RecallCase, noise_before_answer, study
from assay.models import load_language_model

PROMPTS = [(f"{a} is in", b, "!") for a, b in zip("PQRSTUVW", "abcdefgh", strict=True)]


def recall_case(kind="mlp"):
    torch.manual_seed(0)
    task = NoisyRecall(torch.full((12,), 1 / 12), torch.full((12, 12), 1 / 12), seq_len=30)
    return RecallCase(RecallTransformer(12, dim=16, max_len=30, ffn=("mlp", kind)), task.clean().sample(64))


def prompt_case():
    torch.manual_seed(0)
    model, tok = load_language_model("tiny-llama")
    text = torch.tensor(tok("some held-out text to measure damage on, twice over")["input_ids"])
    return PromptCase(
        model, AssociationProbe(PROMPTS), torch.arange(4), torch.arange(4, 8), (text[:20], text[20:]), (0, 1), (0.5, 0.0),
        tokenizer=tok,
    )  # fmt: skip


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("make", [recall_case, lambda: recall_case("linear"), prompt_case])
def test_every_arm_changes_what_is_measured_and_leaves_the_model_alone(make):
    case = make()
    name = "cities" if isinstance(case, PromptCase) else "recall"
    before, plain = weights(case.model), case.measure()
    for arm_name, arm in study.arms.items():
        if name not in RUN_IN.get(arm_name, (name,)):
            continue
        with arm(case):
            found = case.measure()
        if arm_name not in ("full", "mlp-budget", "random-layer"):
            assert found != plain, arm_name
        assert all(torch.equal(before[key], value) for key, value in case.model.state_dict().items()), arm_name
        assert case.measure() == plain, arm_name


def test_the_random_drop_takes_the_mass_of_the_last_feed_forward():
    case = recall_case()
    trained = [p for p in case.model.parameters() if p.requires_grad]
    mass = sum(float(p.detach().square().sum()) for p in case.model.blocks[1].ff.parameters())
    before = [p.detach().clone() for p in trained]
    with random_drop(case):
        gone = sum(float((a - p.detach()).square().sum()) for a, p in zip(before, trained, strict=True))
        assert all(((p == a) | (p == 0)).all() for a, p in zip(before, trained, strict=True))
    assert gone == pytest.approx(mass, rel=1e-2)


def test_without_the_largest_singular_value_alone():
    case = recall_case()
    out, value = (case.model.get_parameter(f"{name}.weight") for name in out_value(1))
    before = torch.linalg.svdvals((out @ value).detach())
    with WithoutTop(out_value(1))(case):
        after = torch.linalg.svdvals((out @ value).detach())
    assert torch.allclose(after[:-1], before[1:], atol=1e-5)
    assert after[-1] < 1e-5


def test_the_choice_looks_at_its_own_half_only():
    case = prompt_case()
    with Chosen("mlp")(case):
        chosen = weights(case.model)
    case.test = torch.arange(0, 0)  # nothing there to look at
    with Chosen("mlp")(case):
        assert all(torch.equal(chosen[key], value) for key, value in case.model.state_dict().items())
    cuts = case.scan("mlp")
    best = best_cut(cuts, case.tune)
    assert all(best.scores.p_answer[:4].mean() >= cut.scores.p_answer[:4].mean() for cut in cuts)
    assert case.scan("mlp") is cuts
    with pytest.raises(ValueError, match="at least the model"):
        best_cut([])


def test_the_constant_makes_the_token_as_rare_as_the_cut():
    case = prompt_case()
    wanted = best_cut(case.scan("mlp"), case.tune).scores.summary(case.tune)["p_distractor"]
    assert abs(matching_bias(case)) < 29
    with study.arms["logit-bias"](case):
        assert case.tuning_scores().summary()["p_distractor"] == pytest.approx(wanted, rel=1e-4)
    recall = recall_case()
    with study.arms["logit-bias"](recall):
        assert recall.measure()["p_noise"] < 1e-9


def test_the_direction_is_the_gradient_of_the_distractors_logit_through_a_norm_that_is_one():
    case = prompt_case()
    with torch.no_grad():
        case.model.model.norm.weight.uniform_(0.5, 1.5)
    x = torch.zeros(case.model.config.hidden_size, requires_grad=True)
    token = case.generic_tokens()
    assert token == [case.tok("!")["input_ids"][-1]]
    case.model.lm_head(x * case.model.model.norm.weight)[token].sum().backward()
    assert torch.allclose(x.grad, case.distractor_direction(), atol=1e-6)


def test_halves_are_apart_and_arms_belong_to_their_cases():
    config = study.scale("desk").model_copy(update={"model": "tiny-llama", "steps": 1})
    log = Log(seed=0, replicate="recall/0", scale="desk", device="cpu", arm="mlp")
    with pytest.raises(NotApplicable, match="cities alone"):
        study.trial(study.arms["mlp"], recall_case(), config, log)
    with pytest.raises(ValueError, match="cases must be among"):
        study.prepare(config, Log(seed=0, replicate="capitals/0", scale="desk", device="cpu"))
    seed_everything(0)
    case = study.prepare(config, Log(seed=0, replicate="cities/0", scale="desk", device="cpu"))
    assert sorted(torch.cat([case.tune, case.test]).tolist()) == list(range(40))
    assert len(case.tune) == 20
    assert len(case.others.items) == 28
    assert not torch.equal(case.texts[0], case.texts[1])


def test_prompts_name_everyone_once_and_answers_differ_from_what_is_said_last():
    assert len({item.prompt for item in city_prompts().items}) == 40
    items = name_prompts().items
    assert len(items) == len(NAMES) * (len(NAMES) - 1)
    assert all(item.prompt.startswith(f"When{item.answer} and ") for item in items)
    assert all(item.prompt.count(item.answer) == 1 for item in items)


def test_noise_before_answer_reads_the_curves():
    curves = {"p_noise": ([10, 20, 30], [0.1, 0.3, 0.5]), "p_answer": ([10, 20, 30], [0.0, 0.1, 0.3])}
    r = Replicate("recall/0", 0, study.scale("desk"), {"full": Outcome({}, curves)})
    assert noise_before_answer(r) == pytest.approx(2 / 3)
    curves["p_answer"] = ([10], [0.0])
    assert noise_before_answer(r) == 0


def test_claims_of_one_case_say_nothing_of_another():
    outcomes = {arm: Outcome({}) for arm in study.arms}
    r = Replicate("linear/0", 0, study.scale("desk"), outcomes)
    bound = [claim for claim in study.claims if claim.holds is not None]
    assert len(bound) == 6
    assert all(claim.statistic(r) is None for claim in bound)


def test_every_arm_trains_and_measures_on_a_module_of_the_users_own():
    case = recall_case()
    own = RecallCase(nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12)), case.test)
    with study.arms["full"](own):
        assert 0 < own.measure()["p_noise"] < 1
