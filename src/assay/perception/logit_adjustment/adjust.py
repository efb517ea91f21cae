"""Post-hoc adjustment: rules that turn a trained classifier's logits into ones that treat every class alike."""

from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from .checks import Counts, check_classes, check_values, checked_counts, checked_strength
from .tuning import TunableRule, steps, warn_if_winners_are_negative


class Adjuster(Protocol):
    """Anything that maps raw logits ``(*, K)`` to scores ``(*, K)`` whose argmax is the prediction."""

    def __call__(self, logits: Tensor) -> Tensor: ...


class MultiplicativeLogitAdjustment(TunableRule):
    r"""Multiplies each class's logit by a power of its inverse training share (MLA).

    From *Multiplicative Logit Adjustment Approximates Neural-Collapse-Aware Decision Boundary Adjustment* (Hasegawa &
    Sato, ICLR 2025):

    .. math:: s'_k = s_k \cdot (n_{max} / n_k)^\gamma .

    A common factor changes no argmax, so counts are taken relative to the largest class, whose logit stays as it is.
    It needs raw logits: the winner of a row has to be positive, as with a simplex head and centred features. Unlike
    additive adjustment it changes when a constant is added to a row.

    Args:
        class_counts: Training rows of each class, ``(K,)``, positive.
        gamma: Exponent, ≥ 0. 0 leaves the logits; theory says 0.39 to 0.5; :meth:`tuned` finds it on held-out rows. The
            paper's best are 0.65 (CIFAR-100-LT) and 1.6 (CIFAR-10-LT).
        center: ``None`` as in the paper, or ``"shift"`` to subtract each row's mean logit first (experimental).
        check: Refuse NaN, infinite results, probabilities and log-probabilities (these where 3 rows give them away, in half
            precision 7, in bfloat16 14; fewer rows may be so by chance and pass). One more pass over the result, and on
            a GPU a synchronisation; not done inside ``torch.compile``.

    Shapes:
        - logits ``(*, K)``, output ``(*, K)`` of the same dtype.

    Raises:
        ValueError: counts that are not positive, logits with another number of classes, and what `check` refuses.

    Example:
        >>> adjust = MultiplicativeLogitAdjustment([900, 100, 1], gamma=0.5)
        >>> adjust(torch.tensor([[6.0, 2.5, -1.0]]))
        tensor([[  6.0000,   7.5000, -30.0000]])
    """

    gamma: Tensor
    log_ratio: Tensor

    def __init__(
        self,
        class_counts: Counts,
        gamma: float = 0.5,
        center: Literal["shift"] | None = None,
        *,
        check: bool = True,
    ):
        super().__init__()
        n = checked_counts(class_counts)
        if center not in (None, "shift"):
            raise ValueError(f"center must be None or 'shift', got {center!r}")
        self.center, self.check = center, check
        self.register_buffer("gamma", torch.tensor(checked_strength("gamma", gamma), dtype=torch.float32))
        self.register_buffer("log_ratio", (n / n.max()).log().float())  # ≤ 0

    def forward(self, logits: Tensor) -> Tensor:
        check_classes(logits, len(self.log_ratio))
        centred = logits - logits.mean(-1, keepdim=True) if self.center == "shift" else logits
        adjusted = centred * (-self.gamma * self.log_ratio).exp().to(logits.dtype)
        if self.check:
            check_values(adjusted, logits, raw=True)
        return adjusted

    @classmethod
    def _warn_of(cls, logits: Tensor, options: dict[str, Any]) -> None:
        centred = logits - logits.mean(-1, keepdim=True) if options.get("center") else logits
        warn_if_winners_are_negative(centred, stacklevel=4)

    def extra_repr(self) -> str:
        return f"classes={len(self.log_ratio)}, gamma={self.gamma.item():g}, center={self.center!r}"


class AdditiveLogitAdjustment(TunableRule):
    r"""Subtracts each class's scaled log prior from its logit (ALA).

    From *Long-tail learning via logit adjustment* (Menon et al., ICLR 2021):

    .. math:: s'_k = s_k - \tau \log \pi_k, \quad \pi_k = n_k / \textstyle\sum_j n_j .

    With :math:`\tau = 1` and a classifier that knows its probabilities this minimises the balanced error. Works on log
    probabilities too. On scores that are no log-odds (margins, cosines) a unit of score means nothing, and neither does
    :math:`\tau = 1`: take :meth:`tuned`. Scores alone do not show what they are; only probabilities are recognised. Not for a
    model that was trained with :class:`LogitAdjustedLoss`: that one is adjusted already.

    Args:
        class_counts: Training rows of each class, ``(K,)``, positive.
        tau: Factor, ≥ 0. 0 leaves the logits.
        check: Refuse NaN and infinite results, and warn of probabilities, as :class:`MultiplicativeLogitAdjustment` does.

    Shapes:
        - logits ``(*, K)``, output ``(*, K)`` of the same dtype.

    Raises:
        ValueError: counts that are not positive, logits with another number of classes, and what `check` refuses.

    Warns:
        UserWarning: these are probabilities; the prior's logarithm belongs to their logarithm.

    Example:
        >>> AdditiveLogitAdjustment([90, 9, 1])(torch.tensor([[3.0, 2.0, 0.0]])).argmax(-1)
        tensor([2])
    """

    grid: ClassVar[tuple[float, ...]] = steps(3.0)
    tau: Tensor
    log_prior: Tensor

    def __init__(self, class_counts: Counts, tau: float = 1.0, *, check: bool = True):
        super().__init__()
        n = checked_counts(class_counts)
        self.check = check
        self.register_buffer("tau", torch.tensor(checked_strength("tau", tau), dtype=torch.float32))
        self.register_buffer("log_prior", (n / n.sum()).log().float())

    def forward(self, logits: Tensor) -> Tensor:
        check_classes(logits, len(self.log_prior))
        adjusted = logits - (self.tau * self.log_prior).to(logits.dtype)
        if self.check:
            check_values(adjusted, logits, raw=False)
        return adjusted

    def extra_repr(self) -> str:
        return f"classes={len(self.log_prior)}, tau={self.tau.item():g}"


class AdjustedClassifier(nn.Module):
    """A classifier whose logits are adjusted in evaluation mode and left alone in training mode.

    Args:
        model: Any module that returns logits ``(*, K)``.
        adjuster: :class:`MultiplicativeLogitAdjustment` or another of this family.
        drop_bias: Name of the head inside ``model``, as in ``model.get_submodule``; its bias is subtracted before the
            adjustment. For the multiplicative rule and the 1-vs-1 adjuster, whose theory knows no bias. The additive rule
            takes away just the prior that a bias carries: without the bias it would do so twice.

    Raises:
        ValueError: ``drop_bias`` names no module with a bias, or goes with an additive adjuster.

    Example:
        >>> model = AdjustedClassifier(nn.Linear(4, 3), MultiplicativeLogitAdjustment([9, 3, 1]))
        >>> model.eval()(torch.zeros(2, 4)).shape
        torch.Size([2, 3])
    """

    def __init__(self, model: nn.Module, adjuster: nn.Module, *, drop_bias: str | None = None):
        super().__init__()
        self.model, self.adjuster, self.drop_bias = model, adjuster, drop_bias
        self._dropped_bias()
        if drop_bias is not None and isinstance(adjuster, AdditiveLogitAdjustment):
            raise ValueError("drop_bias does not go with AdditiveLogitAdjustment: it corrects for the prior in the bias itself")

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        logits = self.model(*args, **kwargs)
        if self.training:
            return logits
        bias = self._dropped_bias()
        return self.adjuster(logits if bias is None else logits - bias)

    def _dropped_bias(self) -> Tensor | None:
        if self.drop_bias is None:
            return None
        try:
            bias = getattr(self.model.get_submodule(self.drop_bias), "bias", None)
        except AttributeError:
            bias = None
        if not isinstance(bias, Tensor):
            raise ValueError(f"drop_bias must name a module of the model that has a bias, got {self.drop_bias!r}")
        return bias
