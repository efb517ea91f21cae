"""What every long-tail study needs: data with a long tail, a small network, its training, and balanced metrics.

Images come by name from ``assay.data``. Training images are thinned out to ``n_k = n_max · IF^(−k/(K−1))``; the rows a
method is tuned on are balanced and come out of the training images too, so no test image decides anything.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from assay.data import load_images

# What the desk studies take of each set: `load_long_tail(name, **DESK_SETTINGS[name], seed=...)`.
DESK_SETTINGS: dict[str, dict[str, Any]] = {
    "cifar10": {"n_max": 900, "imbalance": 100.0, "holdout": 100},
    "cifar100": {"n_max": 80, "imbalance": 20.0, "holdout": 20},
    "digits": {"n_max": 100, "imbalance": 50.0, "holdout": 30},
}


class LongTail(NamedTuple):
    """Long-tailed training rows, balanced tuning rows and the test rows of one data set.

    Shapes: images ``(n, channels, height, width)`` float32, standardised by the training pixels; labels ``(n,)`` int64;
    ``class_counts (K,)`` int64, the training rows of each class.
    """

    train_images: Tensor
    train_labels: Tensor
    tune_images: Tensor
    tune_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    class_counts: Tensor


def long_tail_counts(n_max: int, imbalance: float, classes: int) -> Tensor:
    """``n_k = n_max · imbalance^(−k/(classes−1))``, rounded, at least one; ``(classes,)`` int64.

    Example:
        >>> long_tail_counts(900, 100, 10).tolist()
        [900, 540, 323, 194, 116, 70, 42, 25, 15, 9]
    """
    if n_max < 1 or imbalance < 1 or classes < 2:
        raise ValueError(f"need n_max ≥ 1, imbalance ≥ 1 and classes ≥ 2, got {n_max}, {imbalance} and {classes}")
    rank = torch.arange(classes, dtype=torch.float64) / (classes - 1)
    return (n_max * imbalance**-rank).round().clamp_min(1).long()


def load_long_tail(name: str, *, n_max: int, imbalance: float, holdout: int, seed: int) -> LongTail:
    """A long-tailed version of a data set that ``load_images`` knows.

    Args:
        name: ``"cifar10"``, ``"cifar100"``, ``"digits"`` … or a folder of images.
        n_max: Training rows of the largest class, which is class 0.
        imbalance: Largest over smallest class, ≥ 1.
        holdout: Tuning rows of every class: its last training images, never trained on.
        seed: Which of the remaining images of a class stay.

    Raises:
        ValueError: a class has fewer than ``n_k + holdout`` training images.
    """
    data = load_images(name)
    labels, is_test = torch.from_numpy(data.labels), torch.from_numpy(data.is_test)
    counts = long_tail_counts(n_max, imbalance, len(data.classes))
    generator = torch.Generator().manual_seed(seed)
    train_rows, tune_rows = [], []
    for k, n in enumerate(counts.tolist()):
        rows = torch.nonzero(~is_test & (labels == k))[:, 0]
        pool = rows[: len(rows) - holdout]
        if n > len(pool):
            raise ValueError(f"class {k} of {name} has {len(rows)} training images, {n} + {holdout} held out were asked for")
        train_rows.append(pool[torch.randperm(len(pool), generator=generator)[:n]])
        tune_rows.append(rows[len(rows) - holdout :])
    train, tune, test = torch.cat(train_rows), torch.cat(tune_rows), torch.nonzero(is_test)[:, 0]
    pixels = torch.from_numpy(data.images).permute(0, 3, 1, 2)
    train_pixels = pixels[train].float()
    mean = train_pixels.mean((0, 2, 3), keepdim=True)
    scale = train_pixels.std((0, 2, 3), keepdim=True).clamp_min(1e-6)
    images = [(pixels[rows].float() - mean) / scale for rows in (train, tune, test)]
    return LongTail(images[0], labels[train], images[1], labels[tune], images[2], labels[test], counts)


class Classifier(nn.Module):
    """An encoder and a head on its features: ``forward`` gives the logits, ``encoder`` the features below them."""

    def __init__(self, encoder: nn.Module, head: nn.Module):
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.encoder(images))


def conv_encoder(channels: int, widths: Sequence[int] = (16, 16, 32, 32, 64, 64)) -> nn.Sequential:
    """3×3 convolutions with batch norm, every other one with stride 2, averaged to ``(B, widths[-1])``.

    No ReLU after the last: class means can then lie anywhere around the origin, as a simplex needs.
    """
    layers: list[nn.Module] = []
    for i, width in enumerate(widths):
        layers += [nn.Conv2d(channels, width, 3, 2 - i % 2, 1, bias=False), nn.BatchNorm2d(width)]
        if i < len(widths) - 1:
            layers.append(nn.ReLU(inplace=True))
        channels = width
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # a third faster on CPUs
    return net


def mlp_encoder(pixels: int, width: int = 64, features: int = 32) -> nn.Sequential:
    """One hidden layer for images as small as the digits: ``(B, c, h, w)`` with ``c·h·w = pixels`` to ``(B, features)``."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(pixels, width, bias=False), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, features)
    )


def encoder_for(data: LongTail) -> tuple[nn.Sequential, int]:
    """The studies' encoder for a data set and the width of its features; wide enough for a simplex of all classes."""
    _, channels, height, width = data.train_images.shape
    if height * width < 256:
        return mlp_encoder(channels * height * width), 32
    features = 64 if len(data.class_counts) <= 65 else 128
    return conv_encoder(channels, (16, 16, 32, 32, 64, features)), features


Objective = Callable[[Classifier, Tensor, Tensor], Tensor]


def train(
    net: Classifier,
    images: Tensor,
    labels: Tensor,
    objective: Objective,
    *,
    epochs: int,
    seed: int,
    batch: int = 64,
    lr: float = 0.1,
    weight_decay: float = 5e-4,
    shift: int = 4,
    flip: bool = True,
    track: Callable[[range], Iterable[int]] = iter,
    after_step: Callable[[Classifier, Tensor, Tensor], None] | None = None,
    sampler: Iterable[int] | None = None,
) -> list[float]:
    """SGD with Nesterov momentum 0.9, a tenth of the steps warm-up, then a cosine to zero.

    Args:
        net: Trained in place, on the device it is on; left in evaluation mode.
        images: ``(n, channels, height, width)``.
        labels: ``(n,)``.
        objective: ``(net, images, labels) -> loss`` of one batch: cross-entropy, or whatever the study is about.
        epochs: Passes over the rows; a last batch that is not full is left out of each.
        seed: Order and augmentation.
        batch: Rows of a step.
        lr: Peak learning rate.
        weight_decay: On every trained tensor, as neural-collapse theory assumes.
        shift: Images are moved by up to this many pixels each way; 0 leaves them.
        flip: Half of the images are mirrored.
        track: Wraps the range of epochs, for progress.
        after_step: Called with ``(net, images, labels)`` of the batch after its update.
        sampler: Gives the rows of an epoch each time it is iterated, in place of every row once; as many steps either way.

    Returns:
        The mean loss of each epoch.
    """
    device = next(net.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    batch = min(batch, len(labels))
    steps_an_epoch = len(labels) // batch
    total = epochs * steps_an_epoch
    optimizer = torch.optim.SGD(net.parameters(), lr, momentum=0.9, nesterov=True, weight_decay=weight_decay)
    warm = max(1, total // 10)

    def rate(step: int) -> float:
        return (step + 1) / warm if step < warm else 0.5 + 0.5 * math.cos(math.pi * (step - warm) / max(1, total - warm))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    losses = []
    net.train()
    for _ in track(range(epochs)):
        order = torch.randperm(len(labels), generator=generator) if sampler is None else torch.tensor(list(sampler))
        if len(order) < steps_an_epoch * batch:
            raise ValueError(f"sampler must give at least {steps_an_epoch * batch} rows an epoch, it gave {len(order)}")
        order = order[: steps_an_epoch * batch]
        sum_loss = torch.zeros((), device=device)
        for rows in order.split(batch):
            x, y = augment(images[rows], shift, flip, generator).to(device), labels[rows].to(device)
            loss = objective(net, x, y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            sum_loss += loss.detach()
            if after_step is not None:
                after_step(net, x, y)
        losses.append(sum_loss.item() / steps_an_epoch)
    net.eval()
    return losses


def augment(images: Tensor, shift: int, flip: bool, generator: torch.Generator) -> Tensor:
    """Each image mirrored or not, and moved by its own number of pixels; what moves in from outside is zero."""
    n, _, height, width = images.shape
    columns = torch.arange(width).expand(n, width)
    rows = torch.arange(height).expand(n, height)
    if flip:
        mirrored = torch.rand(n, 1, generator=generator) < 0.5
        columns = torch.where(mirrored, width - 1 - columns, columns)
    if shift:
        images = F.pad(images, (shift,) * 4)
        offsets = torch.randint(0, 2 * shift + 1, (2, n, 1), generator=generator)
        columns, rows = columns + offsets[0], rows + offsets[1]
    which = torch.arange(n)[:, None, None]
    # One gather with the channels last, which is also the layout convolutions are fastest in.
    return images.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


@torch.no_grad()
def features_of(net: Classifier, images: Tensor, batch: int = 500) -> Tensor:
    """The encoder's output for every image in evaluation mode, on the CPU: ``(n, features)``."""
    net.eval()
    device = next(net.parameters()).device
    return torch.cat([net.encoder(part.to(device)).cpu() for part in images.split(batch)])


def shot_groups(class_counts: Tensor) -> dict[str, Tensor]:
    """Class indices by training rows: the first, middle and last third, ``many``, ``medium`` and ``few``.

    Example:
        >>> {name: len(group) for name, group in shot_groups(long_tail_counts(900, 100, 10)).items()}
        {'many': 4, 'medium': 3, 'few': 3}
    """
    order = torch.argsort(class_counts, descending=True, stable=True)
    return dict(zip(("many", "medium", "few"), order.tensor_split(3), strict=True))


def balanced_metrics(predicted: Tensor, labels: Tensor, class_counts: Tensor) -> dict[str, float]:
    """Accuracy averaged over classes, in percent: over all of them, and over those with many, medium and few rows.

    Args:
        predicted: ``(n,)``.
        labels: ``(n,)``, with at least one row of each of the three groups; absent classes do not count.
        class_counts: Training rows of each class, ``(K,)``, K ≥ 3.
    """
    if predicted.shape != labels.shape:
        raise ValueError(f"predicted and labels must have one shape, got {tuple(predicted.shape)} and {tuple(labels.shape)}")
    classes = len(class_counts)
    rows = torch.bincount(labels, minlength=classes)
    right = torch.bincount(labels[predicted == labels], minlength=classes)
    recall = 100 * right.double() / rows  # NaN for a class without rows
    metrics = {"balanced": recall.nanmean().item()}
    for name, group in shot_groups(class_counts).items():
        if not rows[group].any():
            raise ValueError(f"labels hold no row of the {len(group)} classes with {name} training rows")
        metrics[name] = recall[group].nanmean().item()
    return metrics


def guessing(labels: Tensor, classes: int) -> dict[str, float]:
    """What guessing every class alike reaches in balanced accuracy: the mean, and the standard error on these rows.

    Args:
        labels: Of the rows that are measured, ``(n,)``; absent classes do not count.
        classes: K, how many are guessed from.

    Example:
        >>> {name: round(value, 2) for name, value in guessing(torch.arange(3).repeat(50), 3).items()}
        {'chance': 33.33, 'chance_error': 3.85}
    """
    rows = torch.bincount(labels)
    p, found = 1 / classes, rows[rows > 0].double()
    return {"chance": 100 * p, "chance_error": 100 * (p * (1 - p) / found).sum().sqrt().item() / len(found)}


def share_above_chance(*arms: str) -> Callable[[Any], float]:
    """A gate's statistic: the best balanced accuracy of these arms, as a share of the way from guessing to perfect.

    The first arm has to be measured, the others count where they are.
    """
    return lambda r: _above_chance(r, arms) / (100 - r[arms[0]].chance)


def errors_above_chance(*arms: str) -> Callable[[Any], float]:
    """A gate's statistic: by how many standard errors of guessing the best of these arms is above it."""
    return lambda r: _above_chance(r, arms) / r[arms[0]].chance_error


def _above_chance(r: Any, arms: Sequence[str]) -> float:
    return max(r[arm].balanced for arm in arms if arm == arms[0] or arm in r) - r[arms[0]].chance
