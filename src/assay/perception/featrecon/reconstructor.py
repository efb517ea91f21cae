"""Class statistics on the unit sphere, and synthetic features drawn from them."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from . import distributed
from .checks import Counts, check_features, check_labels, checked_counts, checked_integer, checked_number, head_mask
from .geometry import aligned_simplex, angle_between, mean_cosine, points_at, simplex_angle, simplex_gap, truncated_normal
from .precision import WideBuffers
from .ring import fill, remember, ring_quantile

_RING = 256  # angles of a class that its quantile is taken from


class FeatureReconstructor(WideBuffers):
    r"""Draws unit features for classes that have few, from caps whose radii keep the classes separable.

    *Geometry of Long-Tailed Representation Learning: Rebalancing Features for Skewed Distributions* (Yi et al., ICLR 2025).
    Class k has a centre :math:`\mu_k`, and its features angles :math:`\varphi` to it, of mean :math:`\bar a_k` and standard
    deviation :math:`s_k`. Those of tail classes are mixed with the mean of the ``q`` head classes with the closest centres,

    .. math:: \bar a_k \leftarrow \gamma_k \bar a_k + (1 - \gamma_k)\, \bar a_H, \quad \gamma_k = n_k / (n_k + m_0),

    :math:`s_k` alike. The cap's radius is the α-quantile :math:`r_k` of the angles (of heads: as seen; of tails: of the mixed
    normal law), at most half the angle of a simplex, :math:`\psi/2 = \tfrac12 \arccos(-1/(K-1))`: caps around the corners of
    a simplex are then disjoint and linearly separable. A synthetic feature lies at
    :math:`\theta \sim N(\bar a_k, s_k)` cut to :math:`[0, r_k]`, in a uniform direction :math:`\nu`:
    :math:`\hat z = \cos\theta\, \tilde\mu_k + \sin\theta\, \nu`, where
    :math:`\tilde\mu_k = (1-\eta)\mu_k + \eta T_k` (normalised) leans towards the nearest simplex T.

    Statistics are running sums of real features; caps are drawn anew (``refresh``) every time as many rows as the training
    set has were seen. All state is in buffers, which stay in single precision or better when a model around is cast to less.

    Args:
        num_classes: K ≥ 2.
        feature_dim: d ≥ 2.
        class_counts: Training rows of each class, ``(K,)``, positive.
        alpha: Quantile of the angles that a cap reaches to, in (0, 1).
        head_classes: Their indices, how many of the largest classes, or ``"auto"``: those above the average count.
        q: Head classes that a tail class borrows from, ≥ 1.
        shrinkage: :math:`m_0 \ge 0`; 0 leaves tail statistics alone. A class of one row takes the heads' entirely.
        eta: How far centres move to the simplex, in [0, 1]; above 0 needs d ≥ K − 1.
        momentum: Of the running sums of a class, at each batch that holds it, in [0, 1).
        warmup: Refreshes (epochs) before features may be drawn, ≥ 1.
        ramp: Refreshes over which ``eta`` rises from 0 to its value.
        bound: Whether radii are limited to ψ/2.
        refresh_every: Rows between refreshes; by default as many as ``class_counts`` sum to.
        check: Whether features and labels are checked at every call (on a GPU each check waits for the device).

    Attributes:
        centers: ``(K, d)``, unit; zero for a class not seen yet.
        radii: ``(K,)`` angles. ``spread``: the same before the limit ψ/2.
        seen: ``(K,)``, which classes have a centre.
        ready: Whether the warm-up is over.

    Shapes:
        - ``update``: z ``(B, d)`` unit vectors, y ``(B,)``.
        - ``sample``: counts ``(K,)`` to z ``(S, d)``, y ``(S,)``, S their sum, classes in order.

    Raises:
        ValueError: a class count below one, ``alpha`` outside (0, 1), features that are not unit vectors or not finite,
            labels outside [0, K), a draw for a class that was never seen.

    Example:
        >>> z = F.normalize(torch.randn(90, 8), dim=1)
        >>> y = torch.tensor([0] * 60 + [1] * 25 + [2] * 5)
        >>> rec = FeatureReconstructor(3, 8, torch.bincount(y)).fit(z, y)
        >>> new_z, new_y = rec.sample(60)                   # every class topped up to 60 rows
        >>> torch.bincount(new_y).tolist(), bool((new_z.norm(dim=1) - 1).abs().max() < 1e-6)
        ([0, 35, 55], True)
    """

    def __init__(
        self,
        num_classes: int,
        feature_dim: int,
        class_counts: Counts,
        alpha: float = 0.99,
        head_classes: Literal["auto"] | int | Sequence[int] = "auto",
        q: int = 3,
        shrinkage: float = 20.0,
        eta: float = 0.0,
        momentum: float = 0.9,
        *,
        warmup: int = 1,
        ramp: int = 0,
        bound: bool = True,
        refresh_every: int | None = None,
        check: bool = True,
    ):
        super().__init__()
        counts = checked_counts(class_counts, num_classes)
        self.alpha = checked_number("alpha", alpha, 0, 1, open_ends=True)
        self.shrinkage = checked_number("shrinkage", shrinkage, 0, math.inf)
        self.eta = checked_number("eta", eta, 0, 1)
        self.momentum = checked_number("momentum", momentum, 0, 1)
        if self.momentum == 1:
            raise ValueError("momentum must lie below 1, which would never forget")
        num_classes = checked_integer("num_classes", num_classes, 2)
        feature_dim = checked_integer("feature_dim", feature_dim, 2)  # one dimension has no directions to draw from
        if self.eta and feature_dim < num_classes - 1:
            raise ValueError(
                f"eta > 0 moves centres to a simplex, and one of {num_classes} classes needs feature_dim ≥ {num_classes - 1}, "
                f"got {feature_dim}"
            )
        for name, value, least in (("q", q, 1), ("warmup", warmup, 1), ("ramp", ramp, 0), ("refresh_every", refresh_every, 1)):
            if value is not None:
                checked_integer(name, value, least)
        self.num_classes, self.feature_dim, self.q = num_classes, feature_dim, q
        self.warmup, self.ramp, self.bound, self.check = warmup, ramp, bound, check
        self.refresh_every = int(counts.sum()) if refresh_every is None else refresh_every
        K, d = num_classes, feature_dim
        is_head = head_mask(head_classes, counts)
        gamma = counts / (counts + self.shrinkage)
        gamma[counts == 1] = 0  # one row has no spread of its own
        gamma[is_head] = 1
        self.register_buffer("class_counts", counts)
        self.register_buffer("is_head", is_head)
        self.register_buffer("gamma", gamma.float())
        # A class keeps about an epoch of angles: more would be of features that the encoder has moved on from.
        self.register_buffer("ring_size", counts.clamp(8, _RING))
        self.register_buffer("ring", torch.zeros(K, int(counts.clamp(8, _RING).max())))
        self.register_buffer("ring_rows", torch.zeros(K, dtype=torch.long))
        for name, shape in (("sum_z", (K, d)), ("sum_angle", (K,)), ("sum_square", (K,)), ("weight", (K,))):
            self.register_buffer(name, torch.zeros(shape))
        for name, shape in (("centers", (K, d)), ("targets", (K, d)), ("mean_angle", (K,)), ("std_angle", (K,))):
            self.register_buffer(name, torch.zeros(shape))
        self.register_buffer("radii", torch.zeros(K))
        self.register_buffer("spread", torch.zeros(K))
        self.register_buffer("seen", torch.zeros(K, dtype=torch.bool))
        self.register_buffer("rows", torch.zeros((), dtype=torch.long))
        self.register_buffer("refreshes", torch.zeros((), dtype=torch.long))

    class_counts: Tensor
    is_head: Tensor
    gamma: Tensor
    ring_size: Tensor
    ring: Tensor
    ring_rows: Tensor
    sum_z: Tensor
    sum_angle: Tensor
    sum_square: Tensor
    weight: Tensor
    centers: Tensor
    targets: Tensor
    mean_angle: Tensor
    std_angle: Tensor
    radii: Tensor
    spread: Tensor
    seen: Tensor
    rows: Tensor
    refreshes: Tensor

    @property
    def ready(self) -> bool:
        return int(self.refreshes) >= self.warmup

    @property
    def half_simplex(self) -> float:
        """ψ/2, the largest radius of separable caps; 90° for two classes, where it limits nothing."""
        return simplex_angle(self.num_classes) / 2

    @torch.no_grad()
    def update(self, z: Tensor, y: Tensor, *, gather: bool = False, group: Any = None) -> None:
        """Takes a batch of real features into the statistics; call it after the optimiser's step.

        Args:
            z: Unit features ``(B, d)``, no synthetic ones among them; of several views take one.
            y: ``(B,)``.
            gather: Take every process's rows, so that all processes keep the same statistics; the loss needs it to be
                as here, or processes would wait for each other.
            group: The processes; all of them by default.
        """
        if self.check:
            check_features("z", z, self.feature_dim)
            check_labels("y", y, len(z), self.num_classes)
        z, y = z.detach().float(), y.long()
        if gather and distributed.world_size(group) > 1:
            sizes = distributed.row_counts(len(z), z.device, group)
            z, y = (distributed.all_rows(x, sizes, group) for x in (z, y))
        K = self.num_classes
        rows = torch.bincount(y, minlength=K)
        keep = torch.where(rows > 0, self.momentum, 1.0)
        self.weight.mul_(keep).add_(rows)
        self.sum_z.mul_(keep[:, None]).index_add_(0, y, z.to(self.sum_z.dtype))
        angle = angle_between(z, F.normalize(self.sum_z.float(), dim=1)[y]).to(self.ring.dtype)
        self.sum_angle.mul_(keep).index_add_(0, y, angle)
        self.sum_square.mul_(keep).index_add_(0, y, angle.square())
        remember(self.ring, self.ring_rows, self.ring_size, angle, y, rows)
        self.rows += len(y)
        if int(self.rows) >= self.refresh_every:
            self.rows -= self.refresh_every
            self.refresh()

    @torch.no_grad()
    def fit(self, z: Tensor, y: Tensor) -> "FeatureReconstructor":
        """Statistics of a whole data set at once, in place of running ones; for encoders that do not change any more."""
        check_features("z", z, self.feature_dim)
        check_labels("y", y, len(z), self.num_classes)
        if len(z) == 0:
            raise ValueError("z must hold at least one row")
        z, y = z.detach().float(), y.long()
        rows = torch.bincount(y, minlength=self.num_classes)
        self.weight.copy_(rows)
        self.sum_z.zero_().index_add_(0, y, z.to(self.sum_z.dtype))
        angle = angle_between(z, F.normalize(self.sum_z.float(), dim=1)[y]).to(self.ring.dtype)
        self.sum_angle.zero_().index_add_(0, y, angle)
        self.sum_square.zero_().index_add_(0, y, angle.square())
        fill(self.ring, self.ring_rows, self.ring_size, angle, y, rows)
        self.refreshes.fill_(max(self.warmup + self.ramp, int(self.refreshes) + 1) - 1)
        return self.refresh()

    @torch.no_grad()
    def refresh(self) -> "FeatureReconstructor":
        """Draws centres and radii anew from the running sums; ``update`` calls it once an epoch."""
        length = torch.linalg.vector_norm(self.sum_z.float(), dim=1)
        has_mean = length > 1e-6 * self.weight.float().clamp_min(1e-30)  # opposite features cancel: the old centre stays
        fresh = has_mean & (self.weight > 0)
        self.centers.copy_(torch.where(fresh[:, None], F.normalize(self.sum_z.float(), dim=1), self.centers.float()))
        self.seen |= fresh
        weight = self.weight.float().clamp_min(1e-30)
        mean = self.sum_angle.float() / weight
        std = (self.sum_square.float() / weight - mean.square()).clamp_min(0).sqrt()
        quantile = ring_quantile(self.ring, self.ring_rows, self.ring_size, self.alpha)
        heads = torch.nonzero(self.is_head & self.seen)[:, 0]
        if len(heads):
            cosines = self.centers.float() @ self.centers[heads].float().T
            near = heads[cosines.topk(min(self.q, len(heads)), dim=1).indices]  # (K, q)
            gamma = self.gamma
            mean = gamma * mean + (1 - gamma) * mean[near].mean(1)
            std = gamma * std + (1 - gamma) * std[near].mean(1)
            fitted = (mean + std * _normal_quantile(self.alpha)).clamp(0, math.pi)
            quantile = torch.where(self.is_head | (gamma == 1), quantile, fitted)
        self.mean_angle.copy_(mean)
        self.std_angle.copy_(std)
        self.spread.copy_(quantile)
        self.radii.copy_(quantile.clamp_max(self.half_simplex) if self.bound else quantile)
        self.refreshes += 1
        self.targets.copy_(self._reconstructed())
        return self

    def _reconstructed(self) -> Tensor:
        over = int(self.refreshes) - self.warmup + 1
        eta = self.eta * (min(1.0, max(0, over) / self.ramp) if self.ramp else 1.0)
        centers = self.centers.float()
        if not eta or not bool(self.seen.all()):
            return centers
        simplex = aligned_simplex(centers)
        if simplex is None:  # collapsed: which simplex is nearest is not decided
            return centers
        return F.normalize((1 - eta) * centers + eta * simplex, dim=1)

    @torch.no_grad()
    def sample(self, counts: Counts | int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Draws synthetic features; they are constants to the encoder.

        Args:
            counts: How many of each class, ``(K,)``; or one number that every class's training rows are topped up to.
            generator: Of the draws; torch's own by default.

        Returns:
            z ``(S, d)`` and y ``(S,)``.
        """
        if isinstance(counts, (int, np.integer)):
            wanted = (checked_integer("counts", counts, 0) - self.class_counts).clamp_min(0)
        else:
            wanted = checked_counts(counts, self.num_classes, least=0, name="counts").to(self.centers.device)
        missing = (wanted > 0) & ~self.seen
        if bool(missing.any()):
            raise ValueError(f"class {int(missing.nonzero()[0])} has no centre yet: update with its features first")
        y = torch.repeat_interleave(wanted)
        theta = truncated_normal(self.mean_angle[y], self.std_angle[y], self.radii[y], generator)
        return points_at(self.targets[y], theta, generator), y

    def temperatures(self, tau: float) -> Tensor:
        r"""Class temperatures :math:`\tau \cdot \mathrm{clip}(r_k / (\psi/2), 0.5, 1.5)`, ``(K,)``, r before its limit ψ/2.

        Classes that spread wider contrast more softly. (With the limited radii the ratio would never exceed 1.)
        """
        factor = (self.spread / self.half_simplex).clamp(0.5, 1.5)
        return tau * torch.where(self.seen, factor, 1.0)

    def separability(self) -> dict[str, float]:
        """Whether the classes are apart: look here when you suspect that tail centres collapse.

        Returns:
            ``simplex_gap`` (root mean square distance of the centres' cosines from a simplex's), ``tail_cosine`` (mean over
            pairs of tail centres; NaN below two of them), ``smallest_gap`` (least angle between two caps, negative where
            they overlap) and ``overlapping_pairs`` (share of pairs).

        Raises:
            RuntimeError: a class was not seen yet.
        """
        if not bool(self.seen.all()):
            raise RuntimeError(f"class {int((~self.seen).nonzero()[0])} has no centre yet: update with its features first")
        centers, K = self.centers.double(), self.num_classes
        i, j = torch.triu_indices(K, K, 1, device=centers.device)
        gaps = angle_between(centers[i], centers[j]) - self.radii.double()[i] - self.radii.double()[j]
        tails = centers[~self.is_head]
        return {
            "simplex_gap": simplex_gap(centers),
            "tail_cosine": mean_cosine(tails) if len(tails) > 1 else math.nan,
            "smallest_gap": gaps.min().item(),
            "overlapping_pairs": (gaps < 0).double().mean().item(),
        }

    def extra_repr(self) -> str:
        settings = f"alpha={self.alpha:g}, q={self.q}, shrinkage={self.shrinkage:g}, eta={self.eta:g}"
        return f"{self.num_classes}, {self.feature_dim}, {settings}"


def _normal_quantile(p: float) -> float:
    return float(torch.special.ndtri(torch.tensor(p, dtype=torch.float64)))
