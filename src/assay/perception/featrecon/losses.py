"""Supervised contrast whose classes count alike, and the whole training loss with synthetic features in it."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import distributed
from .checks import Counts, check_features, check_labels, checked_counts, checked_number
from .precision import WideBuffers, wide
from .reconstructor import FeatureReconstructor


class BalancedSupConLoss(nn.Module):
    r"""Supervised contrastive loss with a class-averaged denominator; synthetic features and centres join the batch.

    The denominator of balanced contrastive learning (Zhu et al., CVPR 2022), as FeatRecon (Yi et al., ICLR 2025) uses it:

    .. math::
        L_i = -\frac{1}{|P(i)|} \sum_{p \in P(i)} \log
        \frac{\exp(z_i \cdot z_p / \tau)}{\sum_k \frac{1}{|B_k|} \sum_{j \in B_k} \exp(z_i \cdot z_j / \tau)},

    with :math:`B_k` the rows of class k (batch, synthetic, centre) without i itself and :math:`P(i) = B_{y_i}`. The mean is
    over the batch's rows that have a positive; synthetic rows and centres are no anchors and take no gradient.

    Args:
        tau: Temperature, > 0.
        balanced: False gives the plain loss (Khosla et al., NeurIPS 2020): every row weighs alike in the denominator.
        gather: Contrast with every process's rows. Each process returns its share of the loss on the whole batch, scaled so
            that their mean, and the gradient that ``DistributedDataParallel`` averages, are those of one process.
        group: The processes; all of them by default.
        check: Whether features and labels are checked at every call.

    Shapes:
        - z ``(B, d)`` unit vectors, y ``(B,)``; extra_z ``(S, d)``, extra_y ``(S,)``; centers ``(K, d)``, one of each class
          in order.

    Raises:
        ValueError: rows that are not unit vectors or not finite, labels that do not fit.

    Example:
        >>> z = F.normalize(torch.eye(4).repeat_interleave(2, 0), dim=1)
        >>> loss = BalancedSupConLoss(tau=1.0)(z, torch.arange(4).repeat_interleave(2))
        >>> round(loss.item(), 4), round(math.log(math.e + 3) - 1, 4)     # all positives at cosine 1, all others at 0
        (0.7437, 0.7437)
    """

    def __init__(self, tau: float = 0.1, *, balanced: bool = True, gather: bool = False, group: Any = None, check: bool = True):
        super().__init__()
        self.tau = checked_number("tau", tau, 0, math.inf, open_ends=True)
        self.balanced, self.gather, self.group, self.check = balanced, gather, group, check

    def forward(
        self,
        z: Tensor,
        y: Tensor,
        extra_z: Tensor | None = None,
        extra_y: Tensor | None = None,
        centers: Tensor | None = None,
        *,
        taus: Tensor | None = None,
    ) -> Tensor:
        """The loss, a scalar. ``taus``: a temperature for each class, ``(K,)``, that takes the place of ``tau``."""
        if (extra_z is None) != (extra_y is None):
            raise ValueError("extra_z and extra_y belong together: pass both or neither")
        if self.check:
            check_features("z", z)
            check_labels("y", y, len(z))
        with torch.autocast(z.device.type, enabled=False):
            anchors, y = wide(z), y.long()
            columns, labels, first, share = anchors, y, 0, 1.0
            if self.gather and distributed.world_size(self.group) > 1:
                sizes = distributed.row_counts(len(z), z.device, self.group)
                columns = distributed.all_rows(anchors, sizes, self.group)
                labels = distributed.all_rows(y, sizes, self.group)
                first, share = sum(sizes[: torch.distributed.get_rank(self.group)]), float(len(sizes))
            batch_labels = labels
            if extra_z is not None and extra_y is not None:
                if self.check:
                    check_features("extra_z", extra_z, z.shape[1])
                    check_labels("extra_y", extra_y, len(extra_z))
                columns, labels = torch.cat([columns, extra_z.detach().to(columns)]), torch.cat([labels, extra_y.long()])
            if centers is not None:
                if self.check:
                    check_features("centers", centers, z.shape[1])
                    check_labels("y", y, len(z), len(centers))
                columns = torch.cat([columns, centers.detach().to(columns)])
                labels = torch.cat([labels, torch.arange(len(centers), device=y.device)])
            if taus is not None and self.check:
                check_labels("y", y, len(z), len(taus))
                if not bool((torch.isfinite(taus) & (taus > 0)).all()):
                    raise ValueError("taus must be finite and positive")
            return self._loss(anchors, y, columns, labels, batch_labels, first, share, taus)

    def _loss(
        self,
        anchors: Tensor,
        owner: Tensor,
        columns: Tensor,
        labels: Tensor,
        batch_labels: Tensor,
        first: int,
        share: float,
        taus: Tensor | None,
    ) -> Tensor:
        classes = torch.bincount(labels)  # |B_k|, each with its anchor still in it
        anchors_in_all = (classes[batch_labels] > 1).sum()
        scaled = anchors / (self.tau if taus is None else taus.to(anchors)[owner][:, None])
        itself = first + torch.arange(len(anchors), device=anchors.device)
        # Σ_p z_i·z_p is z_i times its class's sum, less z_i·z_i: no (B, M) mask of positives is needed.
        class_sum = columns.new_zeros(len(classes), columns.shape[1]).index_add(0, labels, columns)
        positives = classes[owner] - 1
        mean_positive = (scaled * (class_sum[owner] - columns[itself])).sum(1) / positives.clamp_min(1)
        weighed = scaled @ columns.T  # (B, M)
        if self.balanced:
            # log of Σ_k 1/|B_k| Σ exp: the weight goes into the exponent, so that no exp overflows.
            log_size, log_rest = classes.clamp_min(1).to(columns).log(), positives.clamp_min(1).to(columns).log()
            weighed = weighed - torch.where(owner[:, None] == labels, log_rest[:, None], log_size[labels])
        weighed[torch.arange(len(anchors), device=anchors.device), itself] = -math.inf
        log_denominator = torch.logsumexp(weighed, dim=1)
        has = positives > 0
        # Without any other row the logsumexp is −inf; such a row is left out, and its gradient must be 0 and not NaN.
        each = torch.where(has, torch.where(has, log_denominator, 0.0) - mean_positive, 0.0)
        return share * each.sum() / anchors_in_all.clamp_min(1)

    def extra_repr(self) -> str:
        return f"tau={self.tau:g}, balanced={self.balanced}, gather={self.gather}"


class FeatReconLoss(WideBuffers):
    r"""Logit-compensated cross-entropy plus balanced contrast with synthetic features, :math:`L = L_{LC} + \kappa L_{SC}`.

    *Geometry of Long-Tailed Representation Learning* (Yi et al., ICLR 2025). :math:`L_{LC}` is the cross-entropy of
    :math:`s_k + \log \pi_k`; predict with the plain logits. Once the reconstructor is ``ready``, each batch's classes are
    topped up with synthetic features to the largest class of the batch, or as far as ``budget`` goes.

    Args:
        reconstructor: Where synthetic features and centres come from. Call its ``update`` after the optimiser's step.
        class_counts: Training rows of each class, ``(K,)``, positive.
        kappa: Weight of the contrast, ≥ 0.
        tau: Its temperature, > 0.
        budget: Synthetic features of a batch, as a multiple of its rows, ≥ 0; 0 leaves the centres alone in the contrast.
        adjust_temperature: Class temperatures by the width of their caps.
        gather: As in :class:`BalancedSupConLoss`, for both terms; the first process draws for all. The reconstructor's
            ``update`` must gather too.
        group: The processes; all of them by default.
        check: Whether inputs are checked at every call.

    Shapes:
        - logits ``(B, K)``, z ``(B, d)`` unit vectors, y ``(B,)``. Of several views of the rows stack logits and z
          (``torch.cat([view1, view2])``): ``(V·B, …)`` beside y ``(B,)``.

    Returns:
        A dict of scalars: ``loss`` to minimise, ``classification``, ``contrast`` and ``synthetic`` (how many were drawn).

    Raises:
        ValueError: what the parts raise; logits of another shape, or not finite.

    Example:
        >>> counts = torch.tensor([60, 25, 5])
        >>> rec = FeatureReconstructor(3, 8, counts)
        >>> criterion = FeatReconLoss(rec, counts)
        >>> logits, z, y = torch.zeros(9, 3), F.normalize(torch.randn(9, 8), dim=1), torch.arange(9) % 3
        >>> criterion(logits, z, y)["classification"]       # nothing is known: −mean log π
        tensor(1.5256)
    """

    log_prior: Tensor

    def __init__(
        self,
        reconstructor: FeatureReconstructor,
        class_counts: Counts,
        kappa: float = 1.0,
        *,
        tau: float = 0.1,
        budget: float = 2.0,
        adjust_temperature: bool = False,
        gather: bool = False,
        group: Any = None,
        check: bool = True,
    ):
        super().__init__()
        counts = checked_counts(class_counts).double()
        known = reconstructor.num_classes
        if len(counts) != known:
            raise ValueError(
                f"class_counts must hold {known} numbers, as many as the reconstructor has classes, got {len(counts)}"
            )
        self.reconstructor = reconstructor
        self.kappa = checked_number("kappa", kappa, 0, math.inf)
        self.budget = checked_number("budget", budget, 0, math.inf)
        self.adjust_temperature, self.gather, self.group, self.check = adjust_temperature, gather, group, check
        self.contrast = BalancedSupConLoss(tau, gather=gather, group=group, check=check)
        self.register_buffer("log_prior", (counts / counts.sum()).log().to(torch.get_default_dtype()))

    def forward(self, logits: Tensor, z: Tensor, y: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        views = len(z) // max(len(y), 1)
        if len(y) == 0 or views * len(y) != len(z) or logits.shape != (len(z), len(self.log_prior)):
            raise ValueError(
                f"logits must be (V·B, {len(self.log_prior)}) and z (V·B, d) for the B = {len(y)} labels in y, got "
                f"{tuple(logits.shape)} and {tuple(z.shape)}"
            )
        y = y.repeat(views)
        if self.check:
            check_labels("y", y, len(z), len(self.log_prior))
        y = y.long()
        if self.check and not bool(torch.isfinite(logits.detach()).all()):
            raise ValueError("logits must be finite, they hold NaN or infinity")
        rec = self.reconstructor
        logits = wide(logits)
        classification = F.cross_entropy(logits + self.log_prior.to(logits), y)
        sizes = None
        if self.gather and distributed.world_size(self.group) > 1:
            sizes = distributed.row_counts(len(z), z.device, self.group)
            # A mean over processes of means over their rows would weigh the rows of small parts more.
            classification = classification * (len(y) * len(sizes) / sum(sizes))
        seen = torch.nonzero(rec.seen)[:, 0]
        extra_z, extra_y = rec.centers[seen], seen
        synthetic = 0
        if rec.ready and self.budget:
            drawn_z, drawn_y = self._draw(y, sizes, generator)
            synthetic = len(drawn_y)
            extra_z, extra_y = torch.cat([extra_z, drawn_z]), torch.cat([extra_y, drawn_y])
        taus = rec.temperatures(self.contrast.tau) if self.adjust_temperature else None
        contrast = self.contrast(z, y, extra_z, extra_y, taus=taus)
        return {
            "loss": classification + self.kappa * contrast,
            "classification": classification.detach(),
            "contrast": contrast.detach(),
            "synthetic": torch.tensor(synthetic, device=z.device),
        }

    def _draw(self, y: Tensor, sizes: list[int] | None, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        rec = self.reconstructor
        if sizes is not None:
            y = distributed.all_rows(y, sizes, self.group)
        wanted = top_up(y, len(self.log_prior), int(self.budget * len(y)), generator, allowed=rec.seen)
        if sizes is not None:
            wanted = distributed.from_first(wanted, self.group)
        drawn, owner = rec.sample(wanted, generator)
        if sizes is not None:
            drawn = distributed.from_first(drawn.contiguous(), self.group)
        return drawn, owner

    def extra_repr(self) -> str:
        return f"kappa={self.kappa:g}, budget={self.budget:g}, adjust_temperature={self.adjust_temperature}"


def top_up(
    y: Tensor, classes: int, budget: int, generator: torch.Generator | None = None, *, allowed: Tensor | None = None
) -> Tensor:
    """How many features of each class a batch lacks until all have as many as its largest, or until the budget is spent.

    Every class is lifted to one level, the highest that the budget allows; what is left lifts some, drawn at random, by one
    more.

    Args:
        y: The batch's classes, ``(B,)``.
        classes: K.
        budget: The largest sum.
        generator: Of the draw.
        allowed: ``(K,)``, classes that may be topped up; all by default.

    Returns:
        ``(K,)`` int64.

    Example:
        >>> top_up(torch.tensor([0, 0, 0, 0, 1, 1, 2]), 3, budget=99).tolist()
        [0, 2, 3]
        >>> top_up(torch.tensor([0, 0, 0, 0, 1, 1, 2]), 3, budget=3).tolist()
        [0, 1, 2]
    """
    rows = torch.bincount(y, minlength=classes)
    open_to = torch.ones_like(rows, dtype=torch.bool) if allowed is None else allowed
    highest = int(rows.max())
    # The sum of what is lacking grows with the level, so the levels are counted up by sorted rows: no (levels, K) table.
    ordered = rows[open_to].sort().values
    levels = torch.arange(highest + 1, device=y.device)
    below = torch.searchsorted(ordered, levels)
    sums = torch.cat([ordered.new_zeros(1), ordered.cumsum(0)])
    lacking = levels * below - sums[below]
    level = int((lacking <= budget).sum()) - 1
    wanted = torch.where(open_to, (level - rows).clamp_min(0), 0)
    left = budget - int(lacking[level])
    if level < highest and left:
        at_level = torch.nonzero(open_to & (rows <= level))[:, 0]
        order = torch.randperm(len(at_level), generator=generator, device=y.device if generator is None else generator.device)
        wanted[at_level[order.to(y.device)[:left]]] += 1
    return wanted
