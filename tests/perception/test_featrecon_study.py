"""The study of FeatRecon: its arms on data of one's own, what they share, the rivals, the figures."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from assay.bench import Log, Outcome, Replicate
from assay.perception.featrecon.arms import Duplicates, Plan, WrongCenters
from assay.perception.featrecon.case import Case, checked_case
from assay.perception.featrecon.figures import arms_figure, theory_figure
from assay.perception.featrecon.geometry import angle_between
from assay.perception.featrecon.study import FeatReconConfig, network, prepare, shape_of, smallest_rise, study, theory

COUNTS = torch.tensor([120, 60, 30, 12, 6, 4])
CONFIG = FeatReconConfig(regimes=("own",), seeds=1, epochs=4, batch=32, projection=8)


def own_case(**changes):
    generator = torch.Generator().manual_seed(0)
    centers = 1.2 * torch.randn(6, 10, generator=generator)

    def draw(y):
        return centers[y] + torch.randn(len(y), 10, generator=generator)

    train, rest = torch.arange(6).repeat_interleave(COUNTS), torch.arange(6).repeat(40)
    case = Case(draw(train), train, draw(rest), rest, draw(rest), rest, COUNTS)
    return case._replace(**changes)


def own_log(arm=""):
    return Log(seed=0, replicate="own/0", scale="desk", device="cpu", arm=arm)


def test_every_arm_trains_on_feature_vectors_of_ones_own():
    case = own_case()
    found = {}
    for name, arm in study.arms.items():
        log = own_log(name)
        torch.manual_seed(0)
        found[name] = study.trial(arm, case, CONFIG, log)
        assert found[name]["balanced"] > 100 / 6 + 15
        assert len(log.curves["train_loss"][1]) == 4
    contrastive = {name for name, metrics in found.items() if "simplex_gap" in metrics}
    assert contrastive == study.arms.keys() - {"ce", "ala-loss", "oversampling"}
    assert found["balanced-supcon"]["synthetic"] == 0
    for name in ("featrecon", "duplicates", "wrong-centers"):
        assert found[name]["synthetic"] > 10
    replicate = Replicate("own/0", 0, CONFIG, {name: Outcome(m) for name, m in found.items()})
    values = [claim.statistic(replicate) for claim in (*study.claims, *study.gates)]
    assert all(math.isfinite(v) for v in values)
    assert arms_figure([replicate]).axes
    assert theory_figure().axes
    assert arms_figure([]) is not None


def test_a_network_of_ones_own_and_an_arm_of_ones_own():
    def make():
        return nn.Sequential(nn.Linear(10, 7), nn.Tanh())

    def mine(net, labels, class_counts, config):
        assert net.head.in_features == 7
        return Plan(lambda net, x, y: F.cross_entropy(net(x), y))

    assert study.trial(mine, own_case(encoder=make), CONFIG, own_log("mine"))["balanced"] > 20
    with pytest.raises(ValueError, match="add --set regimes=own"):
        study.trial(mine, own_case(regime="cifar10-free"), CONFIG, own_log("mine"))
    with pytest.raises(ValueError, match="give it with --case"):
        prepare(CONFIG, own_log())


def test_cross_entropy_and_the_additive_loss_are_those_of_logit_adjustment():
    """Same data, order, initial weights and steps, so that the two studies' arms compare."""
    from assay.perception.logit_adjustment import study as other

    recipe = {"epochs": 4, "lr": 0.1, "weight_decay": 5e-4, "shift": 0}
    config = FeatReconConfig(regimes=("digits-free",), **recipe)
    log = Log(seed=1, replicate="digits-free/1", scale="desk", device="cpu", arm="ce")
    case = prepare(config, log)
    data = other.load_long_tail("digits", **other.DESK_SETTINGS["digits"], seed=1)
    assert torch.equal(case.train_images, data.train_images)
    for ours, theirs in (("ce", "ce"), ("ala-loss", "ala")):
        net, losses = other.fitted("digits", data, "free", theirs, 0.0, recipe, 1, log)
        mine = Log(seed=1, replicate="digits-free/1", scale="desk", device="cpu", arm=ours)
        metrics = study.trial(study.arms[ours], case, config, mine)
        assert mine.curves["train_loss"][1] == pytest.approx(losses, rel=1e-5)
        predicted = net.head(other.features_of(net, data.test_images)).argmax(1)
        expected = other.balanced_metrics(predicted, data.test_labels, data.class_counts)["balanced"]
        assert metrics["balanced"] == pytest.approx(expected, abs=0.3)


def test_arms_start_from_the_same_weights():
    case = checked_case(own_case())
    a, b = (network(case, CONFIG, 3).state_dict() for _ in range(2))
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert any(not torch.equal(a[k], v) for k, v in network(case, CONFIG, 4).state_dict().items())


def statistics_of(kind):
    y = torch.arange(4).repeat_interleave(torch.tensor([40, 20, 10, 3]))
    generator = torch.Generator().manual_seed(0)
    base = F.normalize(torch.tensor([[1.0, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0.1, 1, 0.4, 0, 0], [0, 0, 0, 1, 0]]), dim=1)
    z = F.normalize(base[y] + 0.05 * torch.randn(73, 5, generator=generator), dim=1)
    rec = kind(4, 5, [40, 20, 10, 3])
    rec.update(z, y)
    return rec, z, y


def test_duplicates_are_real_rows_of_their_class_and_as_many():
    rec, z, y = statistics_of(Duplicates)
    new, owner = rec.sample(torch.tensor([0, 5, 60, 400]))
    assert torch.bincount(owner).tolist() == [0, 5, 60, 400]
    for k in (1, 2, 3):
        mine = z[y == k]
        distance = (new[owner == k][:, None] - mine).norm(dim=-1)
        assert distance.min(1).values.max() < 1e-6
        if k == 3:
            assert len(distance.argmin(1).unique()) == 3


def test_the_placebo_draws_around_the_nearest_rival_and_leaves_the_statistics_alone():
    rec, *_ = statistics_of(WrongCenters)
    before = rec.targets.clone()
    new, owner = rec.sample(torch.tensor([0, 300, 300, 0]))
    assert torch.equal(rec.targets, before)
    nearest = (new @ rec.centers.T).argmax(1)
    assert (nearest[owner == 1] == 2).double().mean() > 0.9  # classes 1 and 2 are each other's nearest
    assert (nearest[owner == 2] == 1).double().mean() > 0.9
    assert (angle_between(new, rec.centers[owner]) > angle_between(new, rec.centers[nearest])).double().mean() > 0.9


def test_the_shape_of_a_simplex_is_perfect():
    from assay.perception import aligned_simplex

    T = aligned_simplex(torch.randn(6, 8, generator=torch.Generator().manual_seed(0)))
    y = torch.arange(6).repeat_interleave(COUNTS)
    shape = shape_of(T[y], y, T, torch.arange(6), COUNTS)
    assert shape["simplex_gap"] < 1e-5
    assert shape["heldout_gap"] < 1e-5
    assert shape["overlap"] == 0
    assert shape["tail_cosine"] == pytest.approx(-0.2, abs=1e-5)


def test_overlap_is_of_the_caps_that_features_are_drawn_from():
    z = F.normalize(torch.randn(232, 8, generator=torch.Generator().manual_seed(0)), dim=1)  # no classes: wide caps
    y = torch.arange(6).repeat_interleave(COUNTS)
    from assay.perception import FeatureReconstructor, cap_overlap

    rec = FeatureReconstructor(6, 8, COUNTS).fit(z, y)
    assert (rec.radii < rec.spread).any()
    limited, free = (100 * cap_overlap(z, y, rec.centers, radii) for radii in (rec.radii, rec.spread))
    assert shape_of(z, y, z, y, COUNTS)["overlap"] == pytest.approx(limited)
    assert limited < free < 100


def test_oversampling_follows_the_seed():
    case = checked_case(own_case())

    def order(seed):
        net = network(case, CONFIG, seed)
        return list(study.arms["oversampling"](net, case.train_labels, COUNTS, CONFIG).sampler)

    assert order(0) == order(0)
    assert order(0) != order(1)


def test_a_sampler_must_fill_the_epoch():
    def short(net, labels, class_counts, config):
        return Plan(lambda net, x, y: F.cross_entropy(net(x), y), sampler=range(40))

    with pytest.raises(ValueError, match="at least 224 rows an epoch, it gave 40"):
        study.trial(short, own_case(), CONFIG, own_log("short"))


def test_the_moving_centres_of_the_simplex_arm_ramp_up():
    case = checked_case(own_case())
    plan = study.arms["featrecon-simplex"](network(case, CONFIG, 0), case.train_labels, COUNTS, CONFIG)
    assert (plan.reconstructor.eta, plan.reconstructor.ramp) == (1.0, CONFIG.epochs // 2)


def test_theory_is_monotone():
    assert len(theory()) == 5
    assert smallest_rise(theory()) > 0
    assert smallest_rise((0.0, 1.0, 0.5)) == -0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"class_counts": COUNTS[:2]}, "at least 3 classes"),
        ({"class_counts": COUNTS + 1}, "must be the rows of each class"),
        ({"train_images": torch.full((232, 10), math.nan)}, "train_images must be finite"),
        ({"tune_images": torch.zeros(240, 2, 3)}, "tune_images must be"),
        ({"test_images": torch.zeros(240, 9)}, "one shape"),
        ({"test_labels": torch.arange(240)}, r"test_labels must be 240 class indices in \[0, 6\)"),
        ({"tune_labels": torch.zeros(3, dtype=torch.long)}, "tune_labels must be 240 class indices"),
        ({"tune_labels": torch.arange(240) % 5}, "tune_labels must hold every class, class 5 is missing"),
    ],
)
def test_what_a_case_must_be(changes, message):
    with pytest.raises(ValueError, match=message):
        checked_case(own_case(**changes))


def test_test_rows_that_miss_a_third_of_the_classes_are_refused_before_training():
    def never(net, labels, class_counts, config):
        raise AssertionError("trained")

    with pytest.raises(ValueError, match="no row of the 2 classes with few training rows"):
        study.trial(never, own_case(test_labels=torch.arange(240) % 4), CONFIG, own_log("never"))
