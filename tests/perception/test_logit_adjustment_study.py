"""The study of logit adjustment: a user's own logits, what arms refuse, the collapse metrics, the figures."""

import math

import numpy as np
import pytest
import torch

from assay.bench import Log, NotApplicable, Outcome, Replicate
from assay.bench.claims import judge
from assay.perception.logit_adjustment import ETFLinear
from assay.perception.logit_adjustment import study as study_module
from assay.perception.logit_adjustment.collapse import class_means, neural_collapse
from assay.perception.logit_adjustment.figures import angle_figure, arms_figure
from assay.perception.logit_adjustment.rivals import PENALTIES, refitted_head, tau_normalised
from assay.perception.logit_adjustment.study import Case, Features, LongTailConfig, fitted, prepare, study, theory_ratio

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


def own_log(arm=""):
    return Log(seed=0, replicate="own/0", scale="desk", device="cpu", arm=arm)


def run(arm, case):
    log = Log(seed=0, replicate=f"{case.regime}/0", scale="desk", device="cpu", arm=arm)
    return study.trial(study.arms[arm], case, LongTailConfig(regimes=(case.regime,), seeds=1), log)


@pytest.mark.filterwarnings("ignore:the distribution is too skewed")
def test_logits_labels_and_counts_are_enough():
    case = own_case()
    for arm in study.arms.keys() - NEEDS_FEATURES - {"ala-loss"}:
        metrics = run(arm, case)
        assert {"balanced", "many", "medium", "few", "chance", "chance_error"} <= metrics.keys()
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

    study.trial(arm, own_case(), LongTailConfig(), own_log("mine"))
    assert seen == [0]


def test_the_own_regime_needs_a_case():
    with pytest.raises(ValueError, match="give them with --case"):
        prepare(LongTailConfig(regimes=("own",)), Log(seed=0, replicate="own/0", scale="desk", device="cpu"))


def test_prepare_trains_a_network_for_each_head_and_their_rival_once(monkeypatch):
    trained = []

    def counted(name, data, head, loss, *rest):
        trained.append((head, loss))
        return fitted(name, data, head, loss, *rest)

    monkeypatch.setattr(study_module, "fitted", counted)
    study_module._trained_with_the_additive_loss.cache_clear()  # other tests may have trained it already
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
    assert [case.regime for case in cases] == ["digits-etf", "digits-free"]
    assert sorted(trained) == [("etf", "ce"), ("free", "ala"), ("free", "ce")]
    again = prepare(config, Log(seed=1, replicate="digits-etf/0", scale="smoke", device="cpu"))
    assert torch.equal(again.test_logits, cases[0].test_logits)
    assert sorted(trained)[1:3] == [("etf", "ce"), ("free", "ala")]
    prepare(config, Log(seed=1, replicate="digits-etf/1", scale="smoke", device="cpu"))  # another seed has its own rival
    assert trained.count(("free", "ala")) == 2


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


# ---- a case of one's own -----------------------------------------------------------------------------------------------


def test_arrays_lists_and_whole_floats_are_taken():
    case = own_case(features=True)
    loose = Case(
        case.tune_logits.numpy(),
        case.tune_labels.tolist(),
        case.test_logits.double().tolist(),
        case.test_labels.numpy().astype(float),
        case.class_counts.tolist(),
        case.features._replace(train=case.features.train.numpy(), bias=[0.0] * 8),
    )
    for arm in ("none", "mla-tuned", "tau-norm"):
        assert run(arm, loose) == pytest.approx(run(arm, case), abs=1e-4)


FEATURES = own_case(features=True).features


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("class_counts", [5, 4], "class_counts must be a vector of at least 3 classes"),
        ("class_counts", [5, 4, 0, 1, 1, 1, 1, 1], "class_counts must be positive: class 2"),
        ("class_counts", "many", "class_counts cannot be read"),
        ("class_counts", [5, 4, 3], r"tune_logits must be \(n, 3\) and not empty, got shape \(320, 8\)"),
        ("test_logits", torch.zeros(5), r"test_logits must be \(n, 8\)"),
        ("test_logits", torch.zeros(0, 8), "test_logits must be .* not empty"),
        ("test_logits", torch.full((320, 8), math.nan), "test_logits must be finite, 2560 of 2560"),
        ("test_logits", torch.full((320, 8), math.inf), "test_logits must be finite"),
        ("tune_logits", {"a": 1}, "tune_logits cannot be read as a tensor"),
        ("tune_labels", torch.zeros(7, dtype=torch.long), r"tune_labels must be \(320,\)"),
        ("test_labels", torch.full((320,), 8), r"test_labels must lie in \[0, 8\) for 8 class_counts, got 8..8"),
        ("test_labels", torch.full((320,), -1), "test_labels must lie in"),
        ("test_labels", torch.full((320,), 0.5), "test_labels must be class indices"),
        ("test_labels", torch.ones(320, dtype=torch.bool), "test_labels must be class indices"),
        ("loss_logits", torch.zeros(3, 8), r"loss_logits must be \(320, 8\)"),
        ("features", {"train": 1}, "features must be Features"),
        ("features", FEATURES._replace(tune=FEATURES.tune[:9]), r"features.tune must be \(320, 16\)"),
        ("features", FEATURES._replace(test=FEATURES.test[:, :9]), r"features.test must be \(320, 16\)"),
        ("features", FEATURES._replace(weight=FEATURES.weight[:7]), r"features.weight must be \(8, 16\)"),
        ("features", FEATURES._replace(bias=torch.zeros(3)), r"features.bias must be \(1, 8\)"),
        ("features", FEATURES._replace(train_labels=0 * FEATURES.train_labels), "train_labels must hold every class, 7 have"),
    ],
)
def test_what_is_wrong_with_a_case_is_named_with_its_field(field, value, message):
    with pytest.raises(ValueError, match=message):
        run("none", own_case()._replace(**{field: value}))


def test_a_masked_class_is_no_error():
    case = own_case()
    masked = case.test_logits.clone()
    masked[:, 7] = -math.inf
    assert run("mla", case._replace(test_logits=masked))["few"] < run("mla", case)["few"]


def test_a_case_of_ones_own_is_not_taken_for_the_studys():
    with pytest.raises(ValueError, match="not cifar10-etf: add --set regimes=own"):
        study.trial(
            study.arms["none"], own_case(), LongTailConfig(), Log(seed=0, replicate="cifar10-etf/0", scale="desk", device="cpu")
        )


def test_an_arm_that_returns_something_else_is_told_what_it_should():
    with pytest.raises(ValueError, match=r"returns scores \(320, 8\) of the test rows, got \(320,\)"):
        study.trial(lambda case: case.test_logits.argmax(-1), own_case(), LongTailConfig(), own_log())


def outcomes(balanced, chance=10.0, chance_error=1.0, **arms):
    def outcome(value):
        return Outcome(
            {"balanced": value, "many": value, "few": value, "chance": chance, "chance_error": chance_error, "strength": 0.5}
        )

    return {arm: outcome(balanced + arms.get(arm.replace("-", "_"), 0.0)) for arm in study.arms}


def findings(replicates):
    return {claim.text: judge(claim, replicates) for claim in study.claims}


def test_nothing_but_theory_is_judged_of_a_case_of_ones_own():
    config = LongTailConfig(regimes=("own",), seeds=1)
    found = findings([Replicate("own/0", 0, config, outcomes(50.0, mla_tuned=9.0))])
    judged = [finding for claim in study.claims if claim.holds and (finding := found[claim.text]).values]
    assert [finding.text[:6] for finding in judged] == ["theory"]
    assert found["free head or your own: tuned MLA minus no adjustment"].values == {"own/0": 9.0}
    assert not any(finding.values for text, finding in found.items() if "simplex head" in text)


def test_data_sets_and_heads_are_not_averaged():
    gains = {"cifar10-etf/0": 5.0, "cifar100-etf/0": 1.0, "cifar10-free/0": -2.0}
    found = findings([Replicate(name, 0, LongTailConfig(), outcomes(30.0, mla_tuned=gain)) for name, gain in gains.items()])
    for text, name in (
        ("K = 10, simplex", "cifar10-etf/0"),
        ("K = 100, simplex", "cifar100-etf/0"),
        ("free head", "cifar10-free/0"),
    ):
        mine = [finding for claim, finding in found.items() if claim.startswith(text)]
        assert len(mine) >= 5
        assert all(finding.values.keys() <= {name} for finding in mine)
        assert any(finding.values == {name: gains[name]} for finding in mine)
    assert found["K = 10, simplex head: tuned MLA adds at least 3 points of balanced accuracy"].verdict == "holds"
    assert found["K = 100, simplex head: tuned MLA adds at least 3 points of balanced accuracy"].verdict == "fails"


def test_tau_normalisation_is_compared_where_it_can_do_something():
    found = findings([Replicate(f"{regime}/0", 0, LongTailConfig(), outcomes(30.0)) for regime in LongTailConfig().regimes])
    compared = {name for text, finding in found.items() if "τ-norm" in text for name in finding.values}
    assert compared == {"cifar10-free/0"}


@pytest.mark.parametrize(
    ("none", "tuned", "chance", "error", "met"),
    [
        (14.0, 16.0, 1.0, 0.2, True),  # a hundred classes
        (60.0, 60.0, 100 / 3, 2.0, True),  # three classes, below twice chance
        (35.0, 35.0, 100 / 3, 0.1, False),  # significant and next to nothing
        (45.0, 45.0, 100 / 3, 8.0, False),  # thirty-six rows
        (100 / 3, 70.0, 100 / 3, 2.0, True),  # neglects rare classes altogether, which is what is to be mended
        (2.5, 2.5, 1.0, 0.2, False),  # more than twice chance
    ],
)
def test_gates_correct_for_chance(none, tuned, chance, error, met):
    measured = outcomes(none, chance, error, ala_tuned=tuned - none)
    verdicts = [judge(gate, [Replicate("own/0", 0, LongTailConfig(), measured)]).verdict for gate in study.gates]
    assert (verdicts == ["holds", "holds"]) == met


# ---- rivals ------------------------------------------------------------------------------------------------------------


def test_a_refitted_head_is_logistic_regression_on_repeated_standardised_rows():
    over_sampling = pytest.importorskip("imblearn.over_sampling")
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    case = own_case(features=True)
    f = case.features._replace(train=case.features.train * torch.logspace(-3, 3, 16))
    f = f._replace(tune=f.tune * torch.logspace(-3, 3, 16), test=f.test * torch.logspace(-3, 3, 16))
    sampler = over_sampling.RandomOverSampler(random_state=0)
    scores, C = refitted_head(f, case.tune_labels, sampler, penalties=(1e-3,))
    X, y = sampler.fit_resample(f.train.double().numpy(), f.train_labels.numpy())
    model = make_pipeline(StandardScaler(), LogisticRegression(C=C, max_iter=2000)).fit(X, y)
    np.testing.assert_allclose(scores.numpy(), model.decision_function(f.test.double().numpy()), atol=2e-3)
    assert math.log10(PENALTIES[0]) == -6
    assert math.log10(PENALTIES[-1]) == 3


def test_ends_of_grids_and_heads_that_do_not_converge_are_noted():
    over_sampling = pytest.importorskip("imblearn.over_sampling")
    case = own_case(features=True)
    sampler = over_sampling.RandomOverSampler(random_state=0)

    def arm(case):
        return refitted_head(case.features, case.tune_labels, sampler, penalties=(1e-4, 1e-1), iterations=2)[0], {}

    log = own_log("mine")
    study.trial(arm, case, LongTailConfig(), log)
    assert any("at an end of the grid" in note for note in log.notes)
    assert any("has not converged in 2 steps" in note for note in log.notes)
    free = case.features._replace(weight=case.features.weight * torch.linspace(1, 20, 8)[:, None])
    assert tau_normalised(free, case.tune_labels)[1] > 0.3


def test_other_warnings_do_not_become_notes():
    import warnings

    def arm(case):
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        for _ in range(3):
            warnings.warn("said once", UserWarning, stacklevel=1)
        return case.test_logits

    log = own_log("mine")
    study.trial(arm, own_case(), LongTailConfig(), log)
    assert log.notes == ["said once"]
