"""The study's arms: FeatRecon, its parts taken away one by one, and what else is done about a long tail."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional as F

from .checks import Counts
from .geometry import aligned_simplex
from .losses import BalancedSupConLoss, FeatReconLoss
from .reconstructor import FeatureReconstructor
from .sampling import LongTailSampler

_KEPT = 32  # real features of a class that duplicates are taken from


@dataclass
class Plan:
    """How a network is trained.

    Args:
        objective: ``(net, images, labels) -> loss``.
        after_step: ``(net, images, labels)``, called after each update.
        sampler: Rows of each epoch, if not every row once.
        reconstructor: The statistics, for the arms that have some.
        synthetic: Gives the features added to a batch on average, for the arms that add some.
    """

    objective: Callable[[Any, Tensor, Tensor], Tensor]
    after_step: Callable[[Any, Tensor, Tensor], None] | None = None
    sampler: Iterable[int] | None = None
    reconstructor: FeatureReconstructor | None = None
    synthetic: Callable[[], float] | None = None


def cross_entropy(net: Any, labels: Tensor, class_counts: Tensor, config: Any) -> Plan:
    return Plan(lambda net, x, y: F.cross_entropy(net(x), y))


def additive_loss(net: Any, labels: Tensor, class_counts: Tensor, config: Any) -> Plan:
    """Cross-entropy with the log prior added in training; the other arms' classification term alone."""
    shift = log_prior(class_counts).to(next(net.parameters()).device)
    return Plan(lambda net, x, y: F.cross_entropy(net(x) + shift, y))


def oversampling(net: Any, labels: Tensor, class_counts: Tensor, config: Any) -> Plan:
    """Cross-entropy on images drawn so that all classes come equally often, in an order that follows the replicate's seed."""
    sampler = LongTailSampler(labels, seed=torch.initial_seed() % 2**31)
    return Plan(lambda net, x, y: F.cross_entropy(net(x), y), sampler=sampler)


def feature_reconstruction(
    net: Any,
    labels: Tensor,
    class_counts: Tensor,
    config: Any,
    *,
    kind: type[FeatureReconstructor] = FeatureReconstructor,
    budget: float = 2.0,
    **options: Any,
) -> Plan:
    """FeatRecon; ``budget=0`` is balanced supervised contrast with the class centres, without any synthesis."""
    device = next(net.parameters()).device
    warmup = max(1, round(config.epochs * config.warmup))
    ramp = max(1, config.epochs // 2)  # half of training, for the arm whose centres move
    rec = kind(len(class_counts), config.projection, class_counts, warmup=warmup, ramp=ramp, **options).to(device)
    criterion = FeatReconLoss(rec, class_counts, config.kappa, tau=config.tau, budget=budget).to(device)
    last: dict[str, Tensor] = {}
    added: list[int] = []

    def objective(net: Any, images: Tensor, labels: Tensor) -> Tensor:
        features = net.encoder(images)
        z = net.project(features)
        terms = criterion(net.head(features), z, labels)
        last["z"] = z.detach()
        added.append(int(terms["synthetic"]))
        return terms["loss"]

    def after_step(net: Any, images: Tensor, labels: Tensor) -> None:
        rec.update(last["z"], labels)

    return Plan(objective, after_step, reconstructor=rec, synthetic=lambda: sum(added) / max(1, len(added)))


def simplex_targets(net: Any, labels: Tensor, class_counts: Tensor, config: Any) -> Plan:
    """Contrast with fixed simplex corners in place of centres, as targeted supervised contrast does (Li et al., CVPR 2022).

    Corners are assigned to classes once an epoch, each to the mean nearest to it (Hungarian method).
    """
    device = next(net.parameters()).device
    K, d = len(class_counts), config.projection
    corners = aligned_simplex(torch.randn(K, d, generator=torch.Generator().manual_seed(K)))
    assert corners is not None  # random directions do not coincide
    rec = FeatureReconstructor(K, d, class_counts).to(device)
    contrast = BalancedSupConLoss(config.tau)
    shift = log_prior(class_counts).to(device)
    last: dict[str, Tensor] = {}
    assigned: dict[str, Any] = {"refreshes": 0, "corners": corners.to(device)}

    def objective(net: Any, images: Tensor, labels: Tensor) -> Tensor:
        features = net.encoder(images)
        z = net.project(features)
        last["z"] = z.detach()
        targets = assigned["corners"] if assigned["refreshes"] else None
        return F.cross_entropy(net.head(features) + shift, labels) + config.kappa * contrast(z, labels, centers=targets)

    def after_step(net: Any, images: Tensor, labels: Tensor) -> None:
        rec.update(last["z"], labels)
        if int(rec.refreshes) > assigned["refreshes"]:
            gain = (rec.centers @ corners.T.to(device)).cpu().numpy()
            _, column = linear_sum_assignment(gain, maximize=True)
            assigned.update(refreshes=int(rec.refreshes), corners=corners[torch.from_numpy(column)].to(device))

    return Plan(objective, after_step, reconstructor=rec)


class Duplicates(FeatureReconstructor):
    """Real features of the class in place of synthetic ones: as many, drawn from the last 32 that were seen."""

    def __init__(self, num_classes: int, feature_dim: int, class_counts: Counts, **options: Any):
        super().__init__(num_classes, feature_dim, class_counts, **options)
        self.register_buffer("bank", torch.zeros(num_classes, _KEPT, feature_dim))
        self.register_buffer("banked", torch.zeros(num_classes, dtype=torch.long))

    bank: Tensor
    banked: Tensor

    def update(self, z: Tensor, y: Tensor, **options: Any) -> None:
        super().update(z, y, **options)
        for k in y.unique().tolist():
            mine = z.detach()[y == k][-_KEPT:]
            place = (self.banked[k] + torch.arange(len(mine), device=z.device)) % _KEPT
            self.bank[k, place] = mine
            self.banked[k] += len(mine)

    def sample(self, counts: Any, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        y = torch.repeat_interleave(torch.as_tensor(counts, device=self.bank.device))
        held = self.banked[y].clamp_max(torch.minimum(self.class_counts[y], torch.tensor(_KEPT)))
        # A class of n rows has n different ones: older entries are of the same rows.
        newest = (self.banked[y] - 1 - (torch.rand(len(y), device=y.device, generator=generator) * held).long()) % _KEPT
        return self.bank[y, newest], y


class WrongCenters(FeatureReconstructor):
    """The same caps and as many draws, around the centre of the class's nearest rival: a placebo."""

    def sample(self, counts: Any, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        own = self.targets.clone()
        cosines = (self.centers @ self.centers.T).fill_diagonal_(-torch.inf)
        self.targets.copy_(own[cosines.argmax(1)])
        try:
            return super().sample(counts, generator)
        finally:
            self.targets.copy_(own)


def log_prior(class_counts: Tensor) -> Tensor:
    return (class_counts.double() / class_counts.sum()).log().float()


def projection_head(features: int, hidden: int, out: int) -> nn.Sequential:
    """Two layers from the encoder's features to the contrast's space."""
    return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, out))
