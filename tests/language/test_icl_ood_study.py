"""The study's own pieces: its cases, its arms on each of them, and what it reads off."""

from types import SimpleNamespace

import pytest
import torch
from sklearn.datasets import load_diabetes

from assay.bench import NotApplicable
from assay.bench.log import Log
from assay.language.icl_ood import LINEAR, QUADRATIC, LeastSquares, MixturePosterior, sample_prompts
from assay.language.icl_ood.cases import Case, diabetes_prompts, references
from assay.language.icl_ood.mixtures import published_mixture, selected, unseen_prompts
from assay.language.icl_ood.readings import Learner, closeness, selection
from assay.language.icl_ood.study import IclConfig, prepare, study, trial

TINY = IclConfig(
    steps=2, batch=4, width=8, prompts=24, attention_d=2, attention_steps=2, selection_prompts=16, selection_k=8
)  # fmt: skip


def log(case, arm="icl"):
    return Log(seed=1000, replicate=f"{case}/1000", scale="smoke", device="cpu", arm=arm)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def run(case, arm):
    return trial(study.arms[arm], prepare(TINY, log(case)), TINY, log(case, arm))


@pytest.mark.parametrize("case", ["regression", "attention", "selection", "labels"])
def test_every_arm_measures_a_case_or_says_why_not(case):
    measured = {}
    for arm in study.arms:
        try:
            measured[arm] = run(case, arm)
        except NotApplicable:
            continue
    expected = {
        "regression": set(study.arms),
        "attention": set(study.arms) - {"icl_AB"},
        "selection": {"zero", "averaging", "knn", "ridge", "ols_A", "gd_A", "posterior", "posterior-released"},
        "labels": {"untrained", "icl", "icl_AB"},
    }
    assert set(measured) == expected[case]
    assert all(isinstance(v, float) for metrics in measured.values() for v in metrics.values())


def test_claims_read_metrics_that_there_are():
    read = {
        "regression": ("ols_A", "ridge", "icl", "icl_AB"),
        "attention": ("icl",),
        "selection": ("posterior", "posterior-released"),
    }
    replicates = {}
    for case, arms in read.items():
        outcomes = {arm: SimpleNamespace(metrics=run(case, arm)) for arm in arms}
        replicates[case] = type("R", (dict,), {"name": f"{case}/0"})(outcomes)
    for claim in study.claims:
        values = [claim.statistic(r) for r in replicates.values()]
        assert sum(v is not None for v in values) == 1, claim.text


def test_diabetes_rows_are_whole_rows_scaled_as_the_model_knows_them():
    xs, ys = diabetes_prompts(50, 9, 3, generator())
    x, y = load_diabetes(return_X_y=True)
    x, y = (x - x.mean(0)) / x.std(0, ddof=1), (y - y.mean()) / y.std(ddof=1)
    for b in (0, 7):
        labels = ys[b].numpy() / 3**0.5
        rows = [int(abs(y - v).argmin()) for v in labels]
        columns = [int(abs(x[rows] - xs[b, :, j, None].numpy()).sum(0).argmin()) for j in range(3)]
        assert len(set(columns)) == 3
        torch.testing.assert_close(
            xs[b].double(),
            torch.from_numpy(x[:, columns][[int(abs(x[:, columns] - p.numpy()).sum(1).argmin()) for p in xs[b]]]),
            rtol=1e-4,
            atol=1e-4,
        )
    with pytest.raises(ValueError, match="10 columns"):
        diabetes_prompts(2, 5, 11, generator())


def test_attention_prompts_of_the_unseen_class_are_no_larger_than_those_of_its_own():
    case = prepare(TINY.model_copy(update={"prompts": 400}), log("attention"))
    a, b = (case.prompts[letter][1][:, :-1].square().mean(1) for letter in "AB")
    assert len(a) == len(b) == 400
    assert b.max() <= a.quantile(0.99)


def test_closeness_of_known_predictors():
    prompts = {"A": sample_prompts(LINEAR, 300, 9, 2, generator()), "B": sample_prompts(QUADRATIC, 300, 9, 2, generator(1))}
    case = Case(2, (2, 6, 8), prompts, {"A": LINEAR, "B": QUADRATIC})
    assert case.judged == (6, 8)
    assert list(references(case)) == list(case.fits) == ["ols_A", "gd_A", "ols_B", "gd_B"]
    own, zero, other = (closeness(p, case, "ols") for p in (case.fits["ols_A"], torch.zeros(300, 3), case.fits["ols_B"]))
    assert own["c_4d"] == 0
    assert own["rho_A_4d"] == pytest.approx(1)
    assert zero["c_4d"] == pytest.approx(zero["c0_4d"])
    assert "c_4d" not in other
    assert other["rho_B_3d"] == pytest.approx(1)


def test_the_component_of_lowest_error_and_of_similar_inputs():
    learner = published_mixture("error", 1 / 9)
    xs = torch.randn(40, 12, 3, generator=generator())
    for m in range(4):
        ys = xs @ learner.w[m].float()
        assert (selected(learner, "error", xs, ys) == m).all()
        assert (learner.predict(xs, ys)["weights"][:, 11, m] > 0.999).all()
    shifted, labels = unseen_prompts("input", 20, 12, generator())
    similar = published_mixture("input", 1 / 9)
    assert (selected(similar, "input", shifted, labels) == 3).all()
    assert shifted.mean() == pytest.approx(-4, abs=0.2)
    with pytest.raises(ValueError, match="mode must be"):
        published_mixture("other", 1.0)


def test_the_right_component_gains_weight_with_a_narrow_prior():
    case = prepare(TINY.model_copy(update={"selection_prompts": 400, "selection_k": 32}), log("selection"))
    metrics = selection(study.arms["posterior"](case, TINY, log("selection")), case)
    assert metrics["tight_weight_last"] > metrics["tight_weight_first"] + 0.2
    assert metrics["wide_weight_last"] < metrics["tight_weight_last"]


def test_the_learner_of_a_class_is_its_least_squares():
    xs, ys = sample_prompts(QUADRATIC, 40, 12, 2, generator())
    learner = Learner(MixturePosterior(torch.zeros(1, 2), torch.zeros(1, 2), s_y=1e-3), QUADRATIC.features)
    torch.testing.assert_close(
        learner.predict(xs, ys, [11]), LeastSquares(QUADRATIC.features).predict(xs, ys, [11]), rtol=1e-3, atol=1e-3
    )


def test_models_of_a_replicate_start_alike():
    case = prepare(TINY, log("regression"))
    first, second = (study.arms["untrained"](case, TINY, log("regression")) for _ in range(2))
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True))
