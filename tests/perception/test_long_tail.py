import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from assay.data import needs
from assay.perception.long_tail import (
    Classifier,
    augment,
    balanced_metrics,
    conv_encoder,
    features_of,
    load_long_tail,
    long_tail_counts,
    mlp_encoder,
    shot_groups,
    train,
)


def test_counts_fall_by_a_constant_factor_from_n_max_to_its_share():
    counts = long_tail_counts(100_000, 100, 10)
    assert counts[0] == 100_000
    assert counts[-1] == 1000
    assert (counts[1:] / counts[:-1]).tolist() == pytest.approx([100 ** (-1 / 9)] * 9, rel=1e-3)
    assert long_tail_counts(30, 1, 5).tolist() == [30] * 5
    assert long_tail_counts(5, 1000, 3)[-1] == 1
    with pytest.raises(ValueError, match="n_max ≥ 1"):
        long_tail_counts(0, 10, 3)


@pytest.fixture(scope="module")
def digits():
    return load_long_tail("digits", n_max=100, imbalance=50, holdout=30, seed=0)


def rows(images):
    return {bytes(image.numpy().tobytes()) for image in images}


def test_splits_have_the_stated_sizes_and_share_no_image(digits):
    assert torch.equal(torch.bincount(digits.train_labels), digits.class_counts)
    assert digits.class_counts[0] == 100
    assert digits.class_counts[-1] == 2
    assert torch.bincount(digits.tune_labels).tolist() == [30] * 10
    train_rows, tune_rows, test_rows = (rows(x) for x in (digits.train_images, digits.tune_images, digits.test_images))
    assert not train_rows & tune_rows
    assert not (train_rows | tune_rows) & test_rows
    assert digits.train_images.mean().abs() < 1e-5
    assert digits.train_images.std() == pytest.approx(1.0, abs=1e-3)


def test_the_seed_chooses_training_rows_and_nothing_else(digits):
    again = load_long_tail("digits", n_max=100, imbalance=50, holdout=30, seed=0)
    other = load_long_tail("digits", n_max=100, imbalance=50, holdout=30, seed=1)
    assert torch.equal(again.train_images, digits.train_images)
    assert not torch.equal(other.train_images, digits.train_images)
    assert torch.equal(other.tune_labels, digits.tune_labels)
    with pytest.raises(ValueError, match=r"\d+ training images, 150 \+ 30 held out were asked for"):
        load_long_tail("digits", n_max=150, imbalance=50, holdout=30, seed=0)


@pytest.mark.slow
def test_the_coloured_subsets_have_what_the_studies_ask_for():
    needs("cifar10")
    needs("cifar100")
    for name, n_max, imbalance, holdout, classes in [("cifar10", 900, 100, 100, 10), ("cifar100", 80, 20, 20, 100)]:
        data = load_long_tail(name, n_max=n_max, imbalance=imbalance, holdout=holdout, seed=0)
        assert data.train_images.shape[1:] == (3, 32, 32)
        assert torch.bincount(data.tune_labels).tolist() == [holdout] * classes
        assert len(torch.bincount(data.test_labels).unique()) == 1


def test_shot_groups_partition_the_classes_by_count_in_any_order():
    counts = torch.tensor([5, 90, 7, 300, 1, 2, 40])
    groups = shot_groups(counts)
    assert [len(g) for g in groups.values()] == [3, 2, 2]
    assert sorted(torch.cat(list(groups.values())).tolist()) == list(range(7))
    assert counts[groups["many"]].min() >= counts[groups["medium"]].max()
    assert counts[groups["medium"]].min() >= counts[groups["few"]].max()


def test_balanced_metrics_of_a_known_case():
    counts = torch.tensor([100, 10, 1])
    labels = torch.tensor([0] * 8 + [1] * 2 + [2] * 1)
    always_first = torch.zeros(11, dtype=torch.long)
    assert balanced_metrics(always_first, labels, counts) == pytest.approx(
        {"balanced": 100 / 3, "many": 100, "medium": 0, "few": 0}
    )
    metrics = balanced_metrics(torch.tensor([0] * 4 + [1] * 5 + [2] * 2), labels, counts)
    assert metrics == pytest.approx({"balanced": (50 + 50 + 100) / 3, "many": 50, "medium": 50, "few": 100})
    with pytest.raises(ValueError, match="no row of the 1 classes with few"):
        balanced_metrics(always_first[:10], labels[:10], counts)
    with pytest.raises(ValueError, match="one shape"):
        balanced_metrics(always_first[:9], labels, counts)


def test_augmentation_moves_and_mirrors_whole_images():
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(64, 3, 8, 8, generator=generator) + 1
    assert torch.equal(augment(images, 0, False, generator), images)
    moved = augment(images, 2, True, generator)
    assert moved.shape == images.shape
    padded = F.pad(images, (2,) * 4)
    for i in range(64):
        windows = [padded[i, :, y : y + 8, x : x + 8] for y in range(5) for x in range(5)]
        assert any(torch.equal(moved[i], w) or torch.equal(moved[i], w.flip(-1)) for w in windows)
    flips = augment(images, 0, True, generator)
    mirrored = torch.tensor([torch.equal(a, b.flip(-1)) for a, b in zip(flips, images, strict=True)])
    assert 15 < mirrored.sum() < 49
    assert torch.equal(flips[~mirrored], images[~mirrored])


def test_encoders_give_the_width_asked_for():
    assert conv_encoder(3, (8, 8, 16))(torch.zeros(2, 3, 32, 32)).shape == (2, 16)
    assert mlp_encoder(64, features=24)(torch.zeros(2, 1, 8, 8)).shape == (2, 24)
    net = conv_encoder(1).eval()
    assert any(isinstance(layer, nn.ReLU) for layer in net)
    assert not isinstance(net[-3], nn.ReLU)  # features may be negative: see the docstring


def small_net(seed=0):
    torch.manual_seed(seed)
    return Classifier(mlp_encoder(64), nn.Linear(32, 10))


def cross_entropy(net, images, labels):
    return F.cross_entropy(net(images), labels)


def test_training_learns_and_repeats_itself(digits):
    nets, curves = [], []
    for _ in range(2):
        net, seen = small_net(), []
        curves.append(
            train(
                net, digits.train_images, digits.train_labels, cross_entropy, epochs=15, seed=3, shift=0, flip=False,
                after_step=lambda net, x, y, seen=seen: seen.append((len(x), net.training)),
            )
        )  # fmt: skip
        nets.append(net)
        assert seen == [(64, True)] * (15 * (len(digits.train_labels) // 64))
    assert curves[0] == curves[1]
    assert curves[0][-1] < 0.2 * curves[0][0]
    assert not nets[0].training
    z = [features_of(net, digits.test_images, batch=97) for net in nets]
    assert torch.equal(z[0], z[1])
    predicted = nets[0].head(z[0]).argmax(-1)
    assert balanced_metrics(predicted, digits.test_labels, digits.class_counts)["balanced"] > 60


def test_a_batch_larger_than_the_data_is_the_data(digits):
    net = small_net()
    losses = train(net, digits.train_images[:20], digits.train_labels[:20], cross_entropy, epochs=2, seed=0, batch=64)
    assert len(losses) == 2
    assert all(math.isfinite(loss) for loss in losses)


def test_a_sampler_chooses_the_rows_of_each_epoch_in_as_many_steps(digits):
    seen = []
    train(
        small_net(), digits.train_images, digits.train_labels, cross_entropy, epochs=2, seed=0, batch=32, shift=0, flip=False,
        sampler=[5] * len(digits.train_labels), after_step=lambda net, x, y: seen.append((x, y)),
    )  # fmt: skip
    assert len(seen) == 2 * (len(digits.train_labels) // 32)
    assert all(torch.equal(x, digits.train_images[5].expand_as(x)) for x, _ in seen)
    assert all((y == digits.train_labels[5]).all() for _, y in seen)
