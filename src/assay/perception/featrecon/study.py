"""FeatRecon on long-tailed images: do synthetic features make classes more symmetric, and help the rare ones?

Published: a supervised-contrastive loss pulls the centres of rare classes together as the imbalance grows; features drawn from
caps around class centres restore the symmetry, and accuracy rises most on rare classes. Desk: a small convolutional network on
CIFAR-10-LT (imbalance 100; the data, encoder and seeds of ``logit_adjustment``) for 12 epochs and one view a row, beside the
same loss without synthesis, with duplicated features in place of synthetic ones, around the wrong centre, and beside what else
is done about a long tail. All arms of a seed share data, order and initial weights; none is tuned. Desk scale cannot show: long
schedules of 200 to 400 epochs with two strong views, ImageNet-LT and iNaturalist. Expect small margins, and "not shown".

An arm is a callable ``(net, labels, class_counts, config) -> Plan``: how ``net`` is trained. A ``Plan`` holds an ``objective``
``(net, images, labels) -> loss``, and may hold ``after_step``, a ``sampler`` and a ``reconstructor``. ``net.encoder``,
``net.head`` and ``net.project`` (unit vectors) are its parts; it predicts with ``net.head``.

``prepare`` returns a ``Case``: training rows with a long tail, balanced tuning and test rows (images or feature vectors), and
the training counts. For your own work: ``assay run featrecon --case mywork.py:case --set regimes=own --set seeds=1``, where
``case`` is a ``Case`` or a function ``(config, log) -> Case``; ``encoder`` makes a network of your own. K is at least 3.
"""

import itertools
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from assay.bench import Claim, Config, Replicate, Study, above, at_least, below, between
from assay.perception.long_tail import (
    DESK_SETTINGS,
    Classifier,
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
from .arms import Duplicates, Plan, WrongCenters, projection_head
from .case import Case, checked_case
from .geometry import cap_overlap, mean_cosine, simplex_gap
from .reconstructor import FeatureReconstructor
from .theory import tail_cosines

Regime = Literal["cifar10-free", "cifar100-free", "digits-free", "own"]


class FeatReconConfig(Config):
    regimes: tuple[Regime, ...] = ("cifar10-free",)
    """Data sets; each is repeated over the seeds. ``own`` is for ``--case``."""
    n_max: int | None = Field(None, ge=1)
    """Training rows of the largest class; by default 900 (cifar10), 80 (cifar100), 100 (digits)."""
    imbalance: float | None = Field(None, ge=1)
    """Largest over smallest class; by default 100 (cifar10), 20 (cifar100), 50 (digits)."""
    epochs: int = Field(12, ge=1)
    """Passes over the training rows."""
    batch: int = Field(64, ge=2)
    """Rows of a step."""
    lr: float = Field(0.1, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(5e-4, ge=0)
    """On all trained weights."""
    shift: int = Field(0, ge=0)
    """Training images are moved by up to this many pixels."""
    projection: int = Field(64, ge=2)
    """Dimensions of the space that is contrasted in."""
    tau: float = Field(0.1, gt=0)
    """Temperature of the contrast."""
    kappa: float = Field(1.0, ge=0)
    """Weight of the contrast beside the cross-entropy."""
    warmup: float = Field(0.1, ge=0, le=1)
    """Share of the epochs before features are drawn."""


class Contrastive(Classifier):
    """A classifier with a second head, into the space that is contrasted in."""

    def __init__(self, encoder: nn.Module, head: nn.Module, projection: nn.Module):
        super().__init__(encoder, head)
        self.projection = projection

    def project(self, features: Tensor) -> Tensor:
        return F.normalize(self.projection(features), dim=1)


def prepare(config: FeatReconConfig, log: Any) -> Case:
    regime, _, seed = log.replicate.rpartition("/")
    name, _, head = regime.partition("-")
    if not head:
        raise ValueError("the regime 'own' is for your own data: give it with --case module:attribute")
    chosen = {key: value for key in ("n_max", "imbalance") if (value := getattr(config, key)) is not None}
    return Case(*load_long_tail(name, **DESK_SETTINGS[name] | chosen, seed=int(seed)), regime=regime)


def network(case: Case, config: FeatReconConfig, seed: int) -> Contrastive:
    """The encoder and head of a seed are those of the logit adjustment study."""
    torch.manual_seed(seed)
    if case.encoder is None:
        encoder, width = encoder_for(case)  # type: ignore[arg-type]  # has the fields of a LongTail that it looks at
    else:
        rows = case.train_images[:2]
        flat = rows.shape[2:] == (1, 1)
        encoder = nn.Sequential(nn.Flatten(), case.encoder()) if flat else nn.Sequential(case.encoder())
        with torch.no_grad():
            width = encoder.eval()(rows).shape[1]
        torch.manual_seed(seed)
    head = nn.Linear(width, len(case.class_counts))
    return Contrastive(encoder, head, projection_head(width, width, config.projection))


def trial(arm: Any, shared: Case, config: FeatReconConfig, log: Any) -> dict[str, float]:
    case = checked_case(shared)
    regime, _, seed = log.replicate.rpartition("/")
    if case.regime != regime:
        raise ValueError(f"a case of your own is not {regime}: add --set regimes=own --set seeds=1")
    labels = case.test_labels
    balanced_metrics(labels, labels, case.class_counts)  # before any training: says which third of the classes is missing
    net = network(case, config, int(seed)).to(log.device)
    plan: Plan = arm(net, case.train_labels, case.class_counts, config)
    pictures = regime != "digits-free" and case.train_images.shape[2:] != (1, 1)
    losses = train(
        net,
        case.train_images,
        case.train_labels,
        plan.objective,
        epochs=config.epochs,
        seed=int(seed),
        batch=config.batch,
        lr=config.lr,
        weight_decay=config.weight_decay,
        shift=config.shift if pictures else 0,
        flip=pictures,
        track=partial(log.track, label="epochs"),
        after_step=plan.after_step,
        sampler=plan.sampler,
    )
    for epoch, loss in enumerate(losses):
        log.metric("train_loss", loss, epoch + 1)
    features = {part: features_of(net, getattr(case, f"{part}_images")) for part in ("train", "tune", "test")}
    net.cpu()
    with torch.no_grad():
        predicted = {part: net.head(rows).argmax(1) for part, rows in features.items()}
        metrics = balanced_metrics(predicted["test"], case.test_labels, case.class_counts)
        metrics |= guessing(case.test_labels, len(case.class_counts))
        metrics["train_accuracy"] = 100 * (predicted["train"] == case.train_labels).double().mean().item()
        if plan.reconstructor is not None:
            z = {part: net.project(rows) for part, rows in features.items()}
            metrics |= shape_of(z["train"], case.train_labels, z["tune"], case.tune_labels, case.class_counts)
    if plan.synthetic is not None:
        metrics["synthetic"] = plan.synthetic()
    return metrics


def shape_of(z: Tensor, y: Tensor, other_z: Tensor, other_y: Tensor, class_counts: Tensor) -> dict[str, float]:
    """How symmetric the classes' centres are, on the training rows; how many foreign caps hold a tuning row, in percent.

    (Not whether any does: with ten wide caps one nearly always does.)
    """
    K = len(class_counts)
    rec = FeatureReconstructor(K, z.shape[1], class_counts).fit(z, y)
    held_out = torch.zeros(K, z.shape[1]).index_add_(0, other_y, other_z)
    return {
        "simplex_gap": simplex_gap(rec.centers),
        "tail_cosine": mean_cosine(rec.centers[torch.argsort(class_counts, descending=True)[-(K // 2) :]]),
        "heldout_gap": simplex_gap(held_out),
        "overlap": 100 * cap_overlap(other_z, other_y, rec.centers, rec.radii),
    }


def gain(arm: str, over: str, metric: str = "balanced") -> Any:
    return lambda r: getattr(r[arm], metric) - getattr(r[over], metric)


@lru_cache
def theory() -> tuple[float, ...]:
    """Tail–tail cosines at the optimum for τ = 1, K = 4 and ratios 1, 3, 10, 30, 100."""
    return tuple(tail_cosines((1, 3, 10, 30, 100)))


def of_theory(read: Any) -> Any:
    """Mathematics alone, so asked of one replicate."""
    return lambda r: read(theory()) if r.name == f"{r.config.regimes[0]}/0" else None


def smallest_rise(cosines: tuple[float, ...]) -> float:
    return min(b - a for a, b in itertools.pairwise(cosines))


def figure(results: list[Replicate]) -> dict[str, Any]:
    from .figures import arms_figure, theory_figure

    return {"arms": arms_figure(results), "theory": theory_figure()}


study = Study(
    prepare=prepare,
    trial=trial,
    replicates=lambda config: [f"{regime}/{seed}" for regime in config.regimes for seed in range(config.seeds)],
    arms={
        "ce": arms.cross_entropy,
        "ala-loss": arms.additive_loss,
        "oversampling": arms.oversampling,
        "balanced-supcon": partial(arms.feature_reconstruction, budget=0.0),
        "simplex-targets": arms.simplex_targets,
        "duplicates": partial(arms.feature_reconstruction, kind=Duplicates),
        "featrecon": arms.feature_reconstruction,
        "featrecon-simplex": partial(arms.feature_reconstruction, eta=1.0),
        "featrecon-unbounded": partial(arms.feature_reconstruction, bound=False),
        "wrong-centers": partial(arms.feature_reconstruction, kind=WrongCenters),
    },
    scales={
        "smoke": FeatReconConfig(regimes=("digits-free",), seeds=2, epochs=6, projection=16),
        "desk": FeatReconConfig(),
        "paper": FeatReconConfig(regimes=("cifar10-free", "cifar100-free"), epochs=200, batch=256, projection=128, shift=4),
    },
    paper=(
        "ResNet-32 on the full CIFAR-10-LT and CIFAR-100-LT (IF 100), 200 to 400 epochs, SGD 0.9, cosine, two strong views, 128-d "
        "projection; ResNet-50 and ResNeXt-50 on ImageNet-LT and iNaturalist 2018, 90 to 180 epochs, 1024-d; about 4 GPU hours a "
        "CIFAR network, 2 to 4 GPU days an ImageNet-LT one. This configuration runs the long schedule on the small network with "
        "one view and the desk's class counts (with the full sets: --set n_max=4900; give a large network with --case)."
    ),
    compare=("balanced", "many", "medium", "few"),
    gates=[
        Claim("the network tells classes apart: balanced accuracy with cross-entropy or the additive loss, as a share of the way from guessing to perfect", share_above_chance("ce", "ala-loss"), at_least(0.1)),
        Claim("the test rows suffice to see it: the same, in standard errors of guessing", errors_above_chance("ce", "ala-loss"), at_least(3.0)),
        Claim("features were drawn: synthetic ones a batch, on average", lambda r: r["featrecon"].synthetic, above(1.0)),
    ],
    claims=[
        Claim("theory (τ = 1, four classes): tail centres draw together with every rise of the ratio 1, 3, 10, 30, 100 (smallest rise of their cosine)", of_theory(smallest_rise), above(0.0), "they do"),
        Claim("theory: at ratio 100 they have collapsed (cosine)", of_theory(lambda c: c[-1]), above(0.99), "collapse past a critical ratio"),
        Claim("theory: at ratio 1 the centres are a simplex (cosine)", of_theory(lambda c: c[0]), between(-1 / 3 - 0.005, -1 / 3 + 0.005), "−1/3"),
        Claim("synthesis makes class centres more symmetric: distance of their cosines from a simplex, FeatRecon minus balanced contrast without synthesis", gain("featrecon", "balanced-supcon", "simplex_gap"), below(0.0), "more symmetric"),
        Claim("FeatRecon is at least 1 point better on the rare third than as many duplicated features", gain("featrecon", "duplicates", "few"), at_least(1.0), "better"),
        Claim("FeatRecon is at most 0.5 points of balanced accuracy behind the additive loss alone", gain("featrecon", "ala-loss"), at_least(-0.5), "ahead"),
        Claim("features around the nearest rival's centre are worse than duplicates (balanced accuracy)", gain("wrong-centers", "duplicates"), below(0.0)),
        Claim("FeatRecon minus cross-entropy, balanced accuracy", gain("featrecon", "ce")),
        Claim("FeatRecon minus oversampled images", gain("featrecon", "oversampling")),
        Claim("FeatRecon minus balanced contrast without synthesis", gain("featrecon", "balanced-supcon")),
        Claim("FeatRecon minus contrast with simplex corners as targets", gain("featrecon", "simplex-targets")),
        Claim("FeatRecon minus FeatRecon around centres moved to the nearest simplex", gain("featrecon", "featrecon-simplex")),
        Claim("FeatRecon minus FeatRecon without the limit on radii", gain("featrecon", "featrecon-unbounded")),
        Claim("FeatRecon minus duplicated features, balanced accuracy", gain("featrecon", "duplicates")),
        Claim("held-out rows inside a foreign class's cap, FeatRecon minus balanced contrast, points", gain("featrecon", "balanced-supcon", "overlap")),
        Claim("cosine between tail centres, FeatRecon minus balanced contrast", gain("featrecon", "balanced-supcon", "tail_cosine")),
    ],
    figure=figure,
)  # fmt: skip
