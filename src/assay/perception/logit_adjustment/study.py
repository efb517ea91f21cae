"""Logit adjustment on long-tailed images: does the multiplicative rule match the optimum it approximates, and beat the additive?

Published: on CIFAR-10-LT, CIFAR-100-LT and ImageNet-LT with heads fixed to a simplex, multiplicative adjustment (MLA) is level
with the 1-vs-1 adjuster that neural-collapse theory calls optimal, and ahead of additive adjustment (ALA). Desk: a small
convolutional network on CIFAR-10-LT (imbalance 100) with such a head and with a free one, and on CIFAR-100-LT (imbalance 20).
One network is trained a replicate; the adjustments cost nothing. Everything tuned is tuned on balanced rows held out of the
training images. Desk scale cannot show: full collapse (the paper trains for 320 epochs), ImageNet-LT. Where collapse is weak
the best exponent drifts away from theory's, and with a free head the additive rule is expected to win.

An arm is a callable ``(case) -> scores`` or ``(case) -> (scores, {metric: number})``: scores ``(n_test, K)`` of the test rows,
whose argmax predicts. It may tune on the case's ``tune_*`` rows; its ``test_labels`` are withheld. Arms that need what the case
does not have raise ``NotApplicable``.

``prepare`` returns a ``Case``: logits and labels of balanced tuning rows and of test rows, and the training counts. That much
is enough for your own work: ``assay run logit_adjustment --case mywork.py:case --set regimes=own --set seeds=1``, where
``case`` is a ``Case`` or a function ``(config, log) -> Case``. ``features`` (for the 1-vs-1 norms, the classifier baselines and
the collapse metrics) and ``loss_logits`` (a second network, trained with the additive loss) are optional. Lists and arrays do;
K is at least 3. Nothing is judged of your own case, since nobody knows its head; differences are reported.
"""

import warnings
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from assay.bench import Claim, Config, NotApplicable, Replicate, Study, at_least, at_most, below, require
from assay.perception.long_tail import (
    DESK_SETTINGS,
    Classifier,
    LongTail,
    balanced_metrics,
    encoder_for,
    errors_above_chance,
    features_of,
    guessing,
    load_long_tail,
    share_above_chance,
    train,
)

from . import arms
from .case import Case, Features, NotInCase, checked_case, needed
from .etf import ETFLinear
from .losses import LogitAdjustedLoss
from .rivals import refitted_head
from .theory import largest_error_ratio

Regime = Literal["cifar10-etf", "cifar10-free", "cifar100-etf", "digits-etf", "digits-free", "own"]


class LongTailConfig(Config):
    regimes: tuple[Regime, ...] = ("cifar10-etf", "cifar10-free", "cifar100-etf")
    """Data set and head; each is repeated over the seeds. ``own`` is for ``--case``."""
    imbalance: float | None = Field(None, ge=1)
    """Largest over smallest class; by default 100 (cifar10), 20 (cifar100), 50 (digits)."""
    epochs: int = Field(25, ge=1)
    """Passes over the training rows."""
    lr: float = Field(0.1, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(5e-4, ge=0)
    """On all trained weights."""
    feature_penalty: float = Field(0.01, ge=0)
    """Half this times the mean squared feature norm is added to the loss of a network with a simplex head."""
    shift: int = Field(0, ge=0)
    """Training images are moved by up to this many pixels. With 0 the small network fits its training rows, as the theory
    takes for granted; with 4 it reaches 80 % of them in 25 epochs, and is no better on balanced rows."""


def prepare(config: LongTailConfig, log: Any) -> Case:
    regime, _, seed = log.replicate.rpartition("/")
    name, _, head = regime.partition("-")
    if not head:
        raise ValueError("the regime 'own' is for your own logits: give them with --case module:attribute")
    settings = dict(DESK_SETTINGS[name])
    if config.imbalance is not None:
        settings["imbalance"] = config.imbalance
    data = load_long_tail(name, **settings, seed=int(seed))
    recipe = {"epochs": config.epochs, "lr": config.lr, "weight_decay": config.weight_decay, "shift": config.shift}
    penalty = config.feature_penalty if head == "etf" else 0.0
    net, losses = fitted(name, data, head, "ce", penalty, recipe, int(seed), log)
    for epoch, loss in enumerate(losses):
        log.metric("train_loss", loss, epoch + 1)
    features = Features(
        train=features_of(net, data.train_images),
        train_labels=data.train_labels,
        tune=features_of(net, data.tune_images),
        test=features_of(net, data.test_images),
        weight=net.head.state_dict()["weight"].cpu(),
        bias=net.head.state_dict().get("bias", torch.zeros(len(data.class_counts))).cpu(),
    )
    tune_logits, test_logits = (F.linear(z, features.weight, features.bias) for z in (features.tune, features.test))
    key = (name, tuple(sorted(settings.items())), tuple(sorted(recipe.items())), int(seed), str(log.device))
    rival = None if name == "cifar100" else _trained_with_the_additive_loss(_Shared(key, data, recipe, log))
    return Case(tune_logits, data.tune_labels, test_logits, data.test_labels, data.class_counts, features, rival, regime)


def fitted(
    name: str, data: LongTail, head: str, loss: str, penalty: float, recipe: dict[str, Any], seed: int, log: Any
) -> tuple[Classifier, list[float]]:
    """A network trained from the seed's initialisation; both heads and both losses start from the same encoder."""
    torch.manual_seed(seed)
    classes = len(data.class_counts)
    encoder, width = encoder_for(data)
    top: nn.Module = ETFLinear(width, classes) if head == "etf" else nn.Linear(width, classes)
    net = Classifier(encoder, top).to(log.device)
    criterion: nn.Module = LogitAdjustedLoss(data.class_counts) if loss == "ala" else nn.CrossEntropyLoss()
    criterion.to(log.device)

    def objective(net: Classifier, images: Tensor, labels: Tensor) -> Tensor:
        z = net.encoder(images)
        return criterion(net.head(z), labels) + penalty / 2 * z.square().sum(1).mean()

    if name == "digits":
        recipe = {**recipe, "shift": 0, "flip": False}
    track = partial(log.track, label=f"train {head} {loss}")
    return net, train(net, data.train_images, data.train_labels, objective, seed=seed, track=track, **recipe)


class _Shared(NamedTuple):
    """Arguments of a training that several regimes of a seed share, hashed by what decides its result."""

    key: tuple[Any, ...]
    data: LongTail
    recipe: dict[str, Any]
    log: Any

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shared) and self.key == other.key


@lru_cache(maxsize=3)
def _trained_with_the_additive_loss(shared: _Shared) -> Tensor:
    """Test logits. The simplex and the free regime of a seed have the same rival: it is trained once a process."""
    name, *_, seed, _device = shared.key
    net, _ = fitted(name, shared.data, "free", "ala", 0.0, shared.recipe, seed, shared.log)
    with torch.no_grad():
        return net.head(features_of(net, shared.data.test_images).to(shared.log.device)).cpu()


def regime_of(replicate: str) -> str:
    return replicate.rpartition("/")[0]


def trial(arm: Any, shared: Case, config: LongTailConfig, log: Any) -> dict[str, float]:
    case = checked_case(shared)
    if case.regime != regime_of(log.replicate):
        raise ValueError(f"a case of your own is not {regime_of(log.replicate)}: add --set regimes=own --set seeds=1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            given = arm(case._replace(test_labels=torch.empty(0, dtype=torch.long)))
        except NotInCase as missing:
            raise NotApplicable(str(missing)) from None
    for text in dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, UserWarning)):
        log.note(text)  # a grid that ended too early, logits that a rule is not made for: a reader should know
    scores, extra = given if isinstance(given, tuple) else (given, {})
    if scores.shape != case.test_logits.shape:
        raise ValueError(f"an arm returns scores {tuple(case.test_logits.shape)} of the test rows, got {tuple(scores.shape)}")
    metrics = balanced_metrics(scores.argmax(-1), case.test_labels, case.class_counts)
    return {**metrics, **guessing(case.test_labels, len(case.class_counts)), **extra}


def oversampled_head(case: Case):
    """The head trained again on features with the rare classes drawn as often as the largest (imbalanced-learn)."""
    over_sampling = require("imblearn.over_sampling", extra="perception")
    sampler = over_sampling.RandomOverSampler(random_state=0)
    scores, C = refitted_head(needed(case.features, "features"), case.tune_labels, sampler)
    return scores, {"strength": C}


OPTIONAL = {"ala-loss", "tau-norm", "oversampled-head", "1v1-norms-tuned"}  # a case need not have what they take
GROUPS = {"cifar10-etf": "10 etf", "digits-etf": "10 etf", "cifar100-etf": "100 etf"}


def group(r: Replicate) -> str:
    """The regimes that one claim is about; data sets are not averaged, and of your own logits nobody knows the head."""
    return GROUPS.get(regime_of(r.name), "other")


def gain(where: str, arm: str, over: str, metric: str = "balanced"):
    """Difference of two arms in points on the replicates of a group, where both apply."""

    def statistic(r: Replicate) -> float | None:
        if group(r) != where or (OPTIONAL & {arm, over}) - r.outcomes.keys():
            return None
        return getattr(r[arm], metric) - getattr(r[over], metric)

    return statistic


def distance(where: str, arm: str, other: str):
    difference = gain(where, arm, other)
    return lambda r: None if (value := difference(r)) is None else abs(value)


def metric_of(where: str, arm: str, metric: str):
    return lambda r: r[arm].metrics.get(metric) if group(r) == where else None


def theory_ratio(r: Replicate) -> float | None:
    """Mathematics alone, so asked of one replicate."""
    return largest_error_ratio() if r.name == f"{r.config.regimes[0]}/0" else None


def judged(K: str) -> list[Claim]:
    """What the paper says of a simplex head with K classes."""
    at, mine = f"{K} etf", f"K = {K}, simplex head: "
    return [
        Claim(mine + "tuned MLA adds at least 3 points of balanced accuracy", gain(at, "mla-tuned", "none"), at_least(3.0), "more"),
        Claim(mine + "tuned MLA and the tuned 1-vs-1 optimum are within 2 points", distance(at, "mla-tuned", "1v1-tuned"), at_most(2.0), "level"),
        Claim(mine + "tuned MLA is at least 1 point ahead of tuned ALA", gain(at, "mla-tuned", "ala-tuned"), at_least(1.0), "ahead"),
        Claim(mine + "tuned MLA adds at least 8 points on the rare third of classes", gain(at, "mla-tuned", "none", "few"), at_least(8.0)),
        Claim(mine + "it takes accuracy from the frequent third", gain(at, "mla-tuned", "none", "many"), below(0.0)),
    ]  # fmt: skip


def reported(K: str) -> list[Claim]:
    at, mine = f"{K} etf", f"K = {K}, simplex head: "
    return [
        Claim(mine + "MLA with theory's γ = ½ minus tuned MLA", gain(at, "mla", "mla-tuned")),
        Claim(mine + "tuned MLA minus the tuned 1-vs-1 adjuster with feature norms", gain(at, "mla-tuned", "1v1-norms-tuned")),
        Claim(mine + "tuned MLA minus a head refitted on oversampled features", gain(at, "mla-tuned", "oversampled-head")),
        Claim(mine + "tuned γ (theory: 0.39 to 0.5; the paper's best: 0.65 for K = 100, 1.6 for K = 10)", metric_of(at, "mla-tuned", "strength")),
        Claim(mine + "training rows the network fits, % (theory: all of them)", metric_of(at, "none", "train_accuracy")),
        Claim(mine + "collapse of the training features, NC1 (0: complete)", metric_of(at, "none", "nc1")),
    ]  # fmt: skip


def reported_elsewhere() -> list[Claim]:
    """With a free head the paper claims nothing; of your own logits nobody knows the head, so nothing is judged."""
    rivals = {
        "no adjustment": "none",
        "tuned ALA": "ala-tuned",
        "a network trained with the additive loss": "ala-loss",
        "a head refitted on oversampled features": "oversampled-head",
        "the τ-normalised classifier": "tau-norm",
    }
    text = "free head or your own: tuned MLA minus"
    return [Claim(f"{text} {words}", gain("other", "mla-tuned", arm)) for words, arm in rivals.items()]


def figure(results: list[Replicate]) -> dict[str, Any]:
    from .figures import angle_figure, arms_figure

    return {"balanced": arms_figure(results), "angles": angle_figure()}


study = Study(
    prepare=prepare,
    trial=trial,
    replicates=lambda config: [f"{regime}/{seed}" for regime in config.regimes for seed in range(config.seeds)],
    arms={
        "none": arms.none,
        "ala": arms.ala,
        "ala-tuned": partial(arms.ala, tau=None),
        "mla": arms.mla,
        "mla-tuned": partial(arms.mla, gamma=None),
        "1v1": arms.one_vs_one,
        "1v1-tuned": partial(arms.one_vs_one, tau=None),
        "1v1-norms": partial(arms.one_vs_one, norms=True),
        "1v1-norms-tuned": partial(arms.one_vs_one, tau=None, norms=True),
        "ala-loss": arms.ala_loss,
        "tau-norm": arms.tau_norm,
        "oversampled-head": oversampled_head,
    },
    scales={
        "smoke": LongTailConfig(regimes=("digits-etf",), seeds=2, epochs=30),
        "desk": LongTailConfig(),
        "paper": LongTailConfig(epochs=320, lr=0.01, weight_decay=5e-3, shift=4, seeds=5),
    },
    paper=(
        "ResNet-34 on CIFAR-10-LT and CIFAR-100-LT (IF 100, full sets), ResNeXt-50 on ImageNet-LT, and an MLP on Helena; batch "
        "64, SGD, lr 0.01, 320 epochs, weight decay 5e-3, simplex head, feature penalty 0.01; 5 seeds; about 3 GPU hours a "
        "CIFAR network. This configuration runs that schedule on the small network: give the large ones' logits with --case."
    ),
    compare=("balanced", "many", "medium", "few"),
    gates=[
        Claim("the classifier tells classes apart: balanced accuracy, unadjusted or with tuned ALA, as a share of the way from guessing to perfect", share_above_chance("none", "ala-tuned"), at_least(0.1)),
        Claim("the test rows suffice to see it: the same, in standard errors of guessing", errors_above_chance("none", "ala-tuned"), at_least(3.0)),
    ],
    claims=[
        *judged("10"),
        *judged("100"),
        Claim("theory: MLA's boundaries (γ = 0.45) are closer to the optimum than ALA's, whatever τ in ½, 1, 2, feature length in 3, 5, 10 and K in 10, 100, 1000 (largest ratio of errors)", theory_ratio, below(1.0)),
        *reported("10"),
        Claim("K = 10, simplex head: tuned MLA minus a free-headed network trained with the additive loss", gain("10 etf", "mla-tuned", "ala-loss")),
        *reported("100"),
        *reported_elsewhere(),
    ],
    figure=figure,
)  # fmt: skip
