"""A model trained in context on linear functions, shown quadratic ones: does it learn them, or fit a line?

Published (d 20, 12 layers, 500,000 steps): trained on linear functions and tested on quadratic ones the error stays above
that of predicting 0, and follows a *linear* model fitted by gradient descent; trained on both classes the model picks the
one of lower error. Desk: ``regression`` is a transformer of two layers on prompts of ten examples in R², tested on the class
it knows, on an unseen one, and on rows of scikit-learn's diabetes data, where no class is right; ``attention`` is a small
model of linear attention in R⁵; ``selection`` is the exact Bayesian learner of a mixture of regressions on prompts from
outside of it. ``labels`` (``--set cases=labels``) is the regression whose result is an abstract label. Desk cannot show:
d 20, language models, and what happens to abstract labels, which take longer training than a desk has.

Closeness c = E(ŷ − ŷ_A)² / E(ŷ − ŷ_B)² and alignments ρ are to least squares on the features of the class trained on (A) and
of the unseen one (B). A model that says 0 is nearer to the smaller fit: c₀ = E ŷ_A² / E ŷ_B² stands beside every c.

An arm is a callable ``(case, config, log) -> predictor``: it may train on ``case.classes`` and gives a callable
``(xs (B, n, d), ys (B, n)) -> (B, n)`` whose i-th prediction has seen i examples, or an object with
``predict(xs, ys, ks) -> (B, len(ks))``.

``prepare`` returns a ``Case``: ``d``, ``ks`` and ``prompts`` (name to inputs and labels), and for models that are trained
``classes``, ``model()`` and ``training``. With a case of your own add ``--set cases=regression``: prompts called ``A`` and
``B`` are judged like the study's.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field

from assay.bench import Claim, Config, NotApplicable, Replicate, Study, above, at_least, at_most

from .cases import CASES, Case, references
from .figures import figure
from .mixtures import published_mixture
from .posterior import MixturePosterior
from .readings import SIGMAS, Learner, closeness, errors_on_b, judged, label_accuracies, readings, selection
from .references import Averaging, KNearest, LeastSquares, Zero
from .training import Curriculum, train_icl

ClassName = Literal["linear", "quadratic", "cubic", "sqrt", "linear+quadratic", "relu", "sigmoid"]


class IclConfig(Config):
    cases: tuple[Literal["regression", "attention", "selection", "labels"], ...] = ("regression", "attention", "selection")
    """What is run."""
    trained_on: ClassName = "linear"
    """Class A, which the models are trained on."""
    tested_on: ClassName = "quadratic"
    """Class B, which they are not."""
    d: int = Field(2, ge=1)
    """Dimensions of x for the transformer."""
    examples: int = Field(10, ge=3)
    """Examples a prompt, the query among them."""
    layers: int = Field(2, ge=1)
    """Of the transformer."""
    width: int = Field(64, ge=1)
    """Of the transformer."""
    heads: int = Field(2, ge=1)
    """Of the transformer."""
    steps: int = Field(1600, ge=1)
    """Rounds of training: a step for every class."""
    batch: int = Field(128, ge=1)
    """Prompts a step."""
    lr: float = Field(2e-3, gt=0)
    """Learning rate of the transformer."""
    cosine: bool = True
    """Whether it falls along a cosine."""
    clip: float | None = 1.0
    """Largest norm of a gradient."""
    grow_every: int = Field(0, ge=0)
    """Rounds between two steps of the curriculum; 0: none."""
    prompts: int = Field(2048, ge=2)
    """Test prompts a class."""
    attention_d: int = Field(5, ge=1)
    """Dimensions of x for linear attention; contexts are 3d to 4d."""
    attention_steps: int = Field(800, ge=1)
    """Its rounds of training."""
    attention_match: float = Field(0.99, gt=0, le=1)
    """Its prompts of class B have labels no larger than this share of class A's; with 1 as large as the largest."""
    selection_prompts: int = Field(2000, ge=2)
    """Prompts for the Bayesian learner."""
    selection_k: int = Field(64, ge=2)
    """Its longest context."""
    shift: tuple[int, int] = (50, 450)
    """Shifts that `labels` trains on."""

    def curriculum(self) -> Curriculum | None:
        return Curriculum(every=self.grow_every) if self.grow_every else None


def case_name(log: Any) -> str:
    name = log.replicate.partition("/")[0]
    return name if name in CASES else "regression"


def prepare(config, log) -> Case:
    return CASES[case_name(log)](config, log.seed)


# -- arms ---------------------------------------------------------------------------------------------------------------


def same(predictor: Any, case: Case, config, log) -> Any:
    return predictor


def reference(name: str, case: Case, config, log) -> Any:
    known = references(case)
    if name not in known:
        raise NotApplicable(f"{name}: this case has no class of that letter, or none that can be fitted so")
    return known[name]


def icl(case: Case, config, log, *, letters: str = "A", steps: int | None = None) -> Any:
    """The model of the case, trained on the classes of these letters."""
    if case.model is None or not set(letters) <= set(case.classes):
        raise NotApplicable(f"nothing to train: this case has no model, or no classes {', '.join(letters)}")
    if len(letters) > 1 and case_name(log) == "attention":
        raise NotApplicable("linear attention has no layer that could square x")
    torch.manual_seed(log.seed)  # all models of a replicate start from the same weights
    model = case.model().to(log.device)
    if steps != 0:
        history = train_icl(model, [case.classes[letter] for letter in letters], seed=log.seed, **case.training)
        for letter in letters:
            for step, loss in zip(history["step"], history[case.classes[letter].name], strict=True):
                log.metric(f"loss_{letter}", loss, step)
    return model.eval()


def posterior(case: Case, config, log, *, released: bool = False) -> Any:
    """The learner of the published mixture, one for each σ; where a class was trained on, the one that knows that class."""
    if "error" in case.prompts:
        return [Learner(published_mixture("error", sigma), released=released) for sigma in SIGMAS.values()]
    known: Any = case.classes.get("A")
    if not hasattr(known, "features"):
        raise NotApplicable("the Bayesian learner needs a class that is linear in features")
    prior = torch.zeros(1, known.features(torch.zeros(1, case.d)).shape[-1])
    learner = MixturePosterior(prior, prior, s_w=known.scale, s_y=0.1)
    return Learner(learner, known.features, released=released)


ARMS: dict[str, Callable[..., Any]] = {
    "zero": partial(same, Zero()),
    "untrained": partial(icl, steps=0),
    "averaging": partial(same, Averaging()),
    "knn": partial(same, KNearest(3)),
    "ridge": partial(same, LeastSquares(ridge=1.0)),
    "ols_A": partial(reference, "ols_A"),
    "gd_A": partial(reference, "gd_A"),
    "ols_B": partial(reference, "ols_B"),
    "gd_B": partial(reference, "gd_B"),
    "icl": icl,
    "icl_AB": partial(icl, letters="AB"),
    "posterior": posterior,
    "posterior-released": partial(posterior, released=True),
}

# -- one arm on one case ------------------------------------------------------------------------------------------------


def trial(arm, case: Case, config, log) -> dict[str, float]:
    predictor = arm(case, config, log)
    if case_name(log) == "labels":
        if not isinstance(predictor, torch.nn.Module):
            raise NotApplicable("labels are vectors here: models alone predict them")
        return label_accuracies(predictor, case, log.device)
    if isinstance(predictor, list):
        return selection(predictor, case)
    predicted = readings(case, predictor, log.device)
    metrics: dict[str, float] = {}
    for name, (_, ys) in case.prompts.items():
        errors = (predicted[name] - ys[:, list(case.ks)]).double().square() / case.d
        for i, k in enumerate(case.ks):
            log.metric(f"error_{name}", errors[:, i].mean(), k)
        for label, k in judged(case):
            metrics[f"{name}_{label}"] = float(errors[:, case.ks.index(k)].mean())
    if "B" in predicted:
        middle = errors_on_b(predicted["B"], case).median(0).values
        metrics["B_4d_median"] = float(middle[case.ks.index(case.judged[1])])
        for kind in ("ols", "gd"):
            metrics |= closeness(predicted["B"], case, kind)
        peak = errors_on_b(predicted["B"], case).mean(0)
        metrics |= {"peak_k": float(case.ks[int(peak.argmax())]), "peak": float(peak.max())}
    return metrics


# -- what is read off ---------------------------------------------------------------------------------------------------


def only_in(case: str, statistic: Callable[[Replicate], float | None]) -> Callable[[Replicate], float | None]:
    """The statistic on the replicates of one case, None on the others."""
    return lambda r: statistic(r) if r.name.partition("/")[0] == case else None


def metric(case: str, arm: str, name: str) -> Callable[[Replicate], float | None]:
    return only_in(case, lambda r: r[arm].metrics.get(name))


def ratio(case: str, over: tuple[str, str], under: tuple[str, str]) -> Callable[[Replicate], float | None]:
    return only_in(case, lambda r: r[over[0]].metrics[over[1]] / r[under[0]].metrics[under[1]])


def magnitude(case: str, arm: str, name: str) -> Callable[[Replicate], float | None]:
    return only_in(case, lambda r: abs(r[arm].metrics[name]))


def sharpening(delta: str) -> Callable[[Replicate], float | None]:
    return only_in(
        "selection", lambda r: r["posterior"].metrics[f"{delta}_weight_last"] - r["posterior"].metrics[f"{delta}_weight_first"]
    )


def learnt_its_class(case: str, model: str) -> Claim:
    return Claim(
        f"The {model} learnt the class it was trained on: error/d at k = 3d (predicting 0 has 1)",
        statistic=metric(case, "icl", "A_3d"),
        holds=at_most(0.25),
    )


def one_class_claims(case: str, model: str, learnt: Claim) -> list[Claim]:
    """What the paper says of a model trained on one class, for the transformer and for linear attention alike."""
    claims = [
        Claim(
            f"The {model} does not learn the unseen class: error/d at k = 4d (predicting 0 has 1)",
            published="1.38 at k = 3d, 1.3 at 5d",
            statistic=metric(case, "icl", "B_4d"),
            holds=at_least(0.8),
            gates=(learnt,),
        )
    ]
    for label in ("3d", "4d"):
        claims += [
            Claim(
                f"The {model} goes with the fit of the class trained on: ρ_A at k = {label}",
                statistic=metric(case, "icl", f"rho_A_{label}"),
                holds=at_least(0.45),
                gates=(learnt,),
            ),
            Claim(
                f"The {model} does not go with the fit of the unseen class: |ρ_B| at k = {label}",
                statistic=magnitude(case, "icl", f"rho_B_{label}"),
                holds=at_most(0.2),
                gates=(learnt,),
            ),
            Claim(
                f"The {model} is nearer to the class trained on than predicting 0 is: c / c₀ at k = {label}",
                statistic=ratio(case, ("icl", f"c_{label}"), ("icl", f"c0_{label}")),
                holds=at_most(0.7),
                gates=(learnt,),
            ),
            Claim(
                f"The {model}, against fits by gradient descent: c / c₀ at k = {label}",
                statistic=ratio(case, ("icl", f"gd_c_{label}"), ("icl", f"gd_c0_{label}")),
                gates=(learnt,),
            ),
        ]
    return claims


TRANSFORMER_LEARNT = learnt_its_class("regression", "transformer")
ATTENTION_LEARNT = learnt_its_class("attention", "linear attention")
study = Study(
    prepare=prepare,
    trial=trial,
    arms=ARMS,
    replicates=lambda config: [f"{case}/{seed}" for case in config.cases for seed in range(config.seeds)],
    scales={
        "smoke": IclConfig(
            cases=("regression",), seeds=1, steps=60, batch=64, width=32, prompts=128, attention_d=2, attention_steps=20, selection_prompts=64, selection_k=16
        ),
        "desk": IclConfig(),
        "paper": IclConfig(
            cases=("regression", "selection", "labels"), d=20, examples=101, layers=12, width=256, heads=8, steps=500_000, batch=64,
            lr=1e-4, cosine=False, clip=None, grow_every=2000, prompts=1280, selection_prompts=20_000, selection_k=127, num_gpus=1,
        ),
    },
    paper=(
        "Five training sets: --set trained_on=linear, quadratic or relu (each also with tested_on=quadratic, linear, relu, cubic, sqrt, "
        "linear+quadratic, sigmoid), linear with quadratic, and these with relu; 500,000 rounds of batch 64 at d = 20, 101 examples, a GPT-2 of "
        "12 layers and width 256 (9.5 million weights), curriculum 5 to 20 dimensions and 11 to 101 examples: about 20 hours on one "
        "A100 for each; abstract labels at d = 7 the same. Beside them meta-llama/Llama-2-7b-hf and meta-llama/Meta-Llama-3-8B on "
        "reversed labels and on synthetic word classification: give `ood_report` a function that writes the prompt as text."
    ),
    claims=[
        *one_class_claims("regression", "transformer", TRANSFORMER_LEARNT),
        Claim(
            "Training on both classes makes the difference: error on the unseen class at k = 4d, trained on both / on one",
            published="0.001 at d = 20, k = 3d",
            statistic=ratio("regression", ("icl_AB", "B_4d"), ("icl", "B_4d")),
            holds=at_most(0.6),
            gates=(TRANSFORMER_LEARNT,),
        ),
        *one_class_claims("attention", "linear attention", ATTENTION_LEARNT),
        Claim(
            "The Bayesian learner selects the component of lowest error: its weight at the last k above that at k = 1, δ = 1/81",
            published="yes",
            statistic=sharpening("tight"),
            holds=above(0),
        ),
        Claim("The same at δ = 1", published="yes, less", statistic=sharpening("even")),
        Claim("The same at δ = 81", published="none", statistic=sharpening("wide")),
        Claim("With equal w it selects the component of similar inputs: its weight at the last k, δ = 1/81", published="1",
              statistic=metric("selection", "posterior", "tight_input_weight_last")),
        Claim("Trained on both: error/d on the class of the one at k = 4d", statistic=metric("regression", "icl_AB", "A_4d")),
        Claim("Trained on both: error/d on the other at k = 4d", statistic=metric("regression", "icl_AB", "B_4d")),
        Claim("Real rows (diabetes), k = 4d: the transformer's error over that of least squares",
              statistic=ratio("regression", ("icl", "diabetes_4d"), ("ols_A", "diabetes_4d"))),
        Claim("Real rows (diabetes), k = 4d: the transformer's error over that of ridge",
              statistic=ratio("regression", ("icl", "diabetes_4d"), ("ridge", "diabetes_4d"))),
        Claim("Error of the Bayesian learner as released, with whole numbers for w̃, over ours, δ = 1/81",
              statistic=ratio("selection", ("posterior-released", "tight_loss"), ("posterior", "tight_loss"))),
    ],
    figure=figure,
    compare=("A_4d", "B_4d", "rho_A_4d", "rho_B_4d", "c_4d", "c0_4d", "diabetes_4d", "tight_weight_first", "tight_weight_last"),
)  # fmt: skip
