"""The study of logit adjustment: a user's own logits, what arms refuse, the collapse metrics, the figures."""

import pytest
import torch

from assay.bench import Log, NotApplicable, Outcome, Replicate
from assay.perception.logit_adjustment import ETFLinear
from assay.perception.logit_adjustment.collapse import class_means, neural_collapse
from assay.perception.logit_adjustment.figures import angle_figure, arms_figure
from assay.perception.logit_adjustment.study import Case, Features, LongTailConfig, prepare, study, theory_ratio

NEEDS_FEATURES = {"1v1-norms", "1v1-norms-tuned", "tau-norm", "oversampled-head"}


def own_case(features=False):
    """Eight classes on a simplex; the fewer rows, the further their test features scatter."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.tensor([200, 100, 60, 30, 20, 10, 6, 4])
    head = ETFLinear(16, 8, generator=generator)

    def draw(labels, spread):
        return 5 * (head.weight[labels] + spread[:, None] * torch.randn(len(labels), 16, generator=generator))

    balanced, train_labels = torch.arange(8).repeat(40), torch.arange(8).repeat_interleave(counts)
    tune, test = (draw(balanced, 2.0 / counts[balanced].sqrt()) for _ in range(2))
    train = draw(train_labels, torch.full((len(train_labels),), 0.1))
    given = Features(train, train_labels, tune, test, head.weight) if features else None
    return Case(head(tune), balanced, head(test), balanced, counts, given)


def run(arm, case):
    log = Log(seed=0, replicate="own/0", scale="desk", device="cpu", arm=arm)
    return study.trial(study.arms[arm], case, LongTailConfig(regimes=("own",), seeds=1), log)


@pytest.mark.filterwarnings("ignore:the distribution is too skewed")
def test_logits_labels_and_counts_are_enough():
    case = own_case()
    for arm in study.arms.keys() - NEEDS_FEATURES - {"ala-loss"}:
        metrics = run(arm, case)
        assert {"balanced", "many", "medium", "few", "chance"} <= metrics.keys()
    for arm in NEEDS_FEATURES | {"ala-loss"}:
        with pytest.raises(NotApplicable, match="this case has no"):
            run(arm, case)


@pytest.mark.filterwarnings("ignore:the distribution is too skewed")
def test_arms_on_a_case_with_features():
    pytest.importorskip("imblearn")
    case = own_case(features=True)
    metrics = {arm: run(arm, case) for arm in study.arms if arm != "ala-loss"}
    assert metrics["mla-tuned"]["balanced"] > metrics["none"]["balanced"]
    assert metrics["mla-tuned"]["few"] > metrics["none"]["few"] + 5
    assert metrics["tau-norm"]["balanced"] == metrics["none"]["balanced"]  # all weights of a simplex are of one length
    assert metrics["none"]["train_accuracy"] == 100
    assert metrics["none"]["nc1"] < 0.5


def test_the_labels_of_the_test_rows_are_withheld():
    seen = []

    def arm(case):
        seen.append(len(case.test_labels))
        return case.test_logits

    study.trial(arm, own_case(), LongTailConfig(), None)
    assert seen == [0]


def test_the_own_regime_needs_a_case():
    with pytest.raises(ValueError, match="give them with --case"):
        prepare(LongTailConfig(regimes=("own",)), Log(seed=0, replicate="own/0", scale="desk", device="cpu"))


def test_prepare_trains_a_network_and_its_rival_once():
    config = study.scales["smoke"].model_copy(update={"epochs": 20})
    cases = [
        prepare(config, Log(seed=1, replicate=f"digits-{head}/0", scale="smoke", device="cpu")) for head in ("etf", "free")
    ]
    for case in cases:
        f = case.features
        torch.testing.assert_close(case.test_logits, f.test @ f.weight.T + f.bias)
        assert run("none", case)["balanced"] > 60
        assert torch.bincount(case.tune_labels).tolist() == [30] * 10
    assert torch.equal(cases[0].loss_logits, cases[1].loss_logits)
    assert torch.equal(cases[0].features.bias, torch.zeros(10))
    assert cases[1].features.bias.abs().sum() > 0
    again = prepare(config, Log(seed=1, replicate="digits-etf/0", scale="smoke", device="cpu"))
    assert torch.equal(again.test_logits, cases[0].test_logits)


def test_theory_claim_holds_and_is_asked_once():
    config = LongTailConfig()
    ratios = [theory_ratio(Replicate(name, 0, config, {})) for name in study.replicates(config)]
    assert ratios[1:] == [None] * 8
    assert 0 < ratios[0] < 1


def test_collapse_metrics_of_a_simplex_and_of_noise():
    labels = torch.arange(4).repeat(50)
    head = ETFLinear(6, 4, generator=torch.Generator().manual_seed(0))
    perfect = neural_collapse(3 * head.weight[labels] + 7, labels, head.weight)  # where the origin lies does not matter
    assert perfect == pytest.approx({"nc1": 0, "nc2": 0, "nc3": 0}, abs=1e-6)
    noise = torch.randn(200, 6, generator=torch.Generator().manual_seed(1))
    assert neural_collapse(noise, labels, head.weight)["nc1"] > 5
    spread = 3 * head.weight[labels] + 0.5 * noise
    assert neural_collapse(spread, labels, head.weight)["nc1"] == pytest.approx(6 * 0.5**2 / 9, rel=0.15)  # d σ² / r²
    torch.testing.assert_close(class_means(spread, labels, 4)[2], spread[labels == 2].double().mean(0))
    with pytest.raises(ValueError, match="class 4 has none"):
        class_means(spread, labels, 5)


def test_figures_show_every_arm_and_regime():
    outcome = {arm: Outcome({"balanced": 30.0 + i}) for i, arm in enumerate(("none", "mla", "ala"))}
    results = [Replicate(name, 0, None, outcome) for name in ("cifar10-etf/0", "cifar10-etf/1", "cifar10-free/0")]
    figure = arms_figure([*results, Replicate("cifar100-etf/0", 0, None, {})])
    assert [axes.get_title() for axes in figure.axes] == ["cifar10-etf", "cifar10-free"]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["none", "mla", "ala"]
    assert [axes.get_title() for axes in angle_figure().axes] == ["K = 10", "K = 100"]
