"""The loss: labels, and the distance of the student's transport plan from the teacher's."""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .labels import check_integers, checked_selected, column_of, to_columns
from .plans import Solver, check_temperature, column_potential, finite, finite_divergence, log_row_mass, plan_divergence, upcast

Mode = Literal["closed", "open"]
Marginal = Literal["labels", "uniform", "teacher"]
FLOOR = 1e-6  # of the mass that a sample keeps back
ALTERNATE_ITERS = {"student": 3, "teacher": 8}  # as the authors' code has them


class SelKDLoss(nn.Module):
    r"""Distils some of a teacher's classes into a student by matching transport plans between a batch and those classes.

    Shi, Shi and Yan, "SelKD: Selective Knowledge Distillation via Optimal Transport Perspective", ICLR 2025.

    With :math:`P^t, P^s` the entropic plans of teacher and student over one constraint set (see `transport_plan`),

    .. math:: L = \gamma\,\mathrm{CE}(z^s, y) + \alpha \frac{\varepsilon^2}{B} \Big[ \sum_{ic} P^t_{ic} \log
        \frac{P^t_{ic}}{P^s_{ic}} + \sum_i (1 - r^t_i) \log \frac{1 - r^t_i}{1 - r^s_i} \Big].

    - ``"closed"``: every sample is of a selected class. Rows sum to 1, so the last sum is empty; column c sums to
      ``b_c``, the samples of class c in the batch. Without columns' sums this is ordinary distillation.
    - ``"open"``: the student has a last logit for "not selected". Sample i gives the mass ``r_i ≤ 1``, its row's sum, to the
      selected classes; all masses add up to m, the samples of selected classes in the batch. Plans start from each
      model's log-probabilities over all of its own outputs, at temperature ε.

    Args:
        selected: The K teacher class ids that the student keeps, in the order of its columns.
        mode: ``"closed"`` or ``"open"``.
        eps: Regularisation, > 0: the temperature.
        alpha: Weight of the plan, ≥ 0.
        gamma: Weight of the labels, ≥ 0.
        student_iters: Sinkhorn iterations for the student's plan (closed), ≥ 1.
        teacher_iters: The same for the teacher's.
        solver: Open: ``"exact"``, or ``"alternate"``: the authors' projections in turn, 3 and 8 rounds.
        normalise_teacher: Open: False takes the teacher's raw selected logits, which do not compare between samples.
        marginal: Where b or m comes from: ``"labels"``; ``"uniform"``: b = B/K (closed); ``"teacher"``: the teacher's
            probabilities at temperature 1, which needs no labels.
        unroll: Closed: differentiate through the student's iterations. By default its class potentials are constants,
            which is the same gradient once both plans have their columns' sums, and a fraction of the time.

    Shapes:
        - student_logits ``(B, K)`` closed, ``(B, K + 1)`` open; teacher_logits ``(B, C)``, detached; labels ``(B,)`` integers,
          *teacher* class ids (open: −1 for a sample of no class of the teacher); the result a scalar.
        - labels may be None unless ``marginal="labels"``: then there is no cross-entropy.

    Attributes:
        last_terms: The last call's ``ce``, ``plan`` and ``slack`` as numbers, before their weights.

    Raises:
        ValueError: arguments outside their ranges; logits of another shape or not finite; a label that is no class id, or,
            closed, is not selected.

    The plans know the labels through b and m. In training that is what labels are for; a validation *loss* computed with
    this class is not free of them.

    Example:
        >>> criterion = SelKDLoss(selected=[3, 8, 14], mode="open")
        >>> student_logits, teacher_logits = torch.randn(4, 4, requires_grad=True), torch.randn(4, 20)
        >>> criterion(student_logits, teacher_logits, torch.tensor([3, 14, 0, 7])).backward()
        >>> sorted(criterion.last_terms)
        ['ce', 'plan', 'slack']
    """

    index: Tensor
    table: Tensor

    def __init__(
        self,
        selected: Sequence[int],
        *,
        mode: Mode = "closed",
        eps: float = 4.0,
        alpha: float = 1.0,
        gamma: float = 1.0,
        student_iters: int = 5,
        teacher_iters: int = 20,
        solver: Solver = "exact",
        normalise_teacher: bool = True,
        marginal: Marginal = "labels",
        unroll: bool = False,
    ):
        super().__init__()
        self.selected = checked_selected(selected)
        for name, choice, kind in (("mode", mode, Mode), ("solver", solver, Solver), ("marginal", marginal, Marginal)):
            if choice not in get_args(kind):
                raise ValueError(f"{name} must be one of {', '.join(map(repr, get_args(kind)))}, got {choice!r}")
        if mode == "open" and marginal == "uniform":
            raise ValueError("marginal='uniform' is for the closed mode: an open batch has no number m that it could be")
        check_temperature(eps)
        for name, weight in (("alpha", alpha), ("gamma", gamma)):
            if not 0 <= weight < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, got {weight}")
        for name, count in (("student_iters", student_iters), ("teacher_iters", teacher_iters)):
            if count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        self.mode, self.eps, self.alpha, self.gamma = mode, float(eps), float(alpha), float(gamma)
        self.student_iters, self.teacher_iters = student_iters, teacher_iters
        self.solver, self.normalise_teacher, self.marginal, self.unroll = solver, normalise_teacher, marginal, unroll
        self.register_buffer("index", torch.tensor(self.selected), persistent=False)
        self.register_buffer("table", column_of(self.selected), persistent=False)
        self._terms: dict[str, Tensor | None] = {}

    @property
    def last_terms(self) -> dict[str, float]:
        return {name: 0.0 if term is None else float(term) for name, term in self._terms.items()}

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, labels: Tensor | None = None) -> Tensor:
        z_s, z_t = upcast("student_logits", student_logits), upcast("teacher_logits", teacher_logits.detach())
        if z_s.dtype != z_t.dtype:  # one of them double
            z_s, z_t = z_s.double(), z_t.double()
        self._check_shapes(z_s, z_t, labels)
        targets = None if labels is None else to_columns(labels, self.table)
        self._check_values(z_s, z_t, labels, targets)
        with torch.no_grad():
            b = self._marginal(z_t, targets)
        ce = z_s.new_zeros(()) if targets is None else F.cross_entropy(z_s, targets)
        if self.mode == "closed":
            plan, slack = self._closed(z_s, z_t, b), None
        else:
            plan, slack = self._open(z_s, z_t, b.sum())
        self._terms = {"ce": ce.detach(), "plan": plan.detach(), "slack": None if slack is None else slack.detach()}
        return torch.add(self.gamma * ce, plan if slack is None else plan + slack, alpha=self.alpha)

    def _marginal(self, z_t: Tensor, targets: Tensor | None) -> Tensor:
        """Mass for each selected class, ``(K,)``."""
        K = len(self.selected)
        if self.marginal == "uniform":
            return z_t.new_full((K,), len(z_t) / K)
        if self.marginal == "labels" and targets is not None:
            return z_t.new_zeros(K + 1).index_add_(0, targets, z_t.new_ones(len(z_t)))[:K]
        over = z_t.index_select(1, self.index.to(z_t.device)) if self.mode == "closed" else z_t
        probabilities = over.softmax(1)
        return (probabilities if self.mode == "closed" else probabilities[:, self.index.to(z_t.device)]).sum(0)

    def _closed(self, z_s: Tensor, z_t: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            x_t = z_t.index_select(1, self.index.to(z_t.device)) / self.eps
            log_teacher = (x_t + finite(column_potential(x_t, b, self.teacher_iters))).log_softmax(1)
        x_s = z_s / self.eps
        g = column_potential(x_s if self.unroll else x_s.detach(), b, self.student_iters)
        return finite_divergence(log_teacher, (x_s + finite(g)).log_softmax(1), self.eps)

    def _open(self, z_s: Tensor, z_t: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        x_t = z_t / self.eps
        if self.normalise_teacher:
            x_t = x_t.log_softmax(1)
        x_s = (z_s / self.eps).log_softmax(1)[:, :-1]  # the logit of "not selected" acts through the others' scale
        with torch.no_grad():
            log_teacher, log_r_t = self._partial(x_t.index_select(1, self.index.to(z_t.device)), m, "teacher")
        log_student, log_r_s = self._partial(x_s, m, "student")
        kept_t, kept_s = (-log_r.expm1() for log_r in (log_r_t, log_r_s))  # 1 − r
        gap = kept_t.clamp_min(FLOOR).log() - kept_s.clamp_min(FLOOR).log()
        slack = self.eps**2 / len(z_s) * (kept_t.clamp_min(0) * gap).sum()
        return plan_divergence(log_teacher, log_student, self.eps), slack

    def _partial(self, x: Tensor, m: Tensor, whose: str) -> tuple[Tensor, Tensor]:
        log_z = x.logsumexp(1)
        log_r = log_row_mass(log_z, m, self.solver, ALTERNATE_ITERS[whose])
        return x + (log_r - log_z)[:, None], log_r

    def _check_shapes(self, z_s: Tensor, z_t: Tensor, labels: Tensor | None) -> None:
        width = len(self.selected) + (self.mode == "open")
        if z_s.shape[1] != width:
            raise ValueError(
                f"student_logits must be (B, {width}) for {len(self.selected)} selected classes, {self.mode}, "
                f"got shape {tuple(z_s.shape)}"
            )
        if len(z_t) != len(z_s) or z_t.shape[1] <= max(self.selected):
            raise ValueError(
                f"teacher_logits must be ({len(z_s)}, C) with C above the largest selected class, {max(self.selected)}, "
                f"got shape {tuple(z_t.shape)}"
            )
        if labels is None:
            if self.marginal == "labels":
                raise ValueError("labels may be left out with marginal='teacher' or 'uniform' alone")
            return
        if labels.shape != z_s.shape[:1]:
            raise ValueError(f"labels must be ({len(z_s)},), a teacher class id for each row, got shape {tuple(labels.shape)}")
        check_integers("labels", labels)

    def _check_values(self, z_s: Tensor, z_t: Tensor, labels: Tensor | None, targets: Tensor | None) -> None:
        """Everything that has to be read from the device, in one reading. NaN and infinities pass into a sum."""
        if torch.compiler.is_compiling():  # a compiled graph does not branch on values
            return
        C, K = z_t.shape[1], len(self.selected)
        seen = [z_s.detach().sum(), z_t.sum()]
        if labels is not None and targets is not None:
            seen += [*labels.aminmax(), (targets == K).sum()]
        # one at a time where reading is free
        on_cpu = all(value.device.type == "cpu" for value in seen)
        values = [v.item() for v in seen] if on_cpu else torch.stack([v.to(z_s.device).double() for v in seen]).tolist()
        student, teacher, *of_labels = values
        for name, total, z in (("student_logits", student, z_s), ("teacher_logits", teacher, z_t)):
            if not math.isfinite(total) and (bad := int((~z.isfinite()).sum())):
                raise ValueError(f"{name} must be finite, {bad} of {z.numel()} values are not")
        if of_labels:
            low, high, outside = map(int, of_labels)
            least = 0 if self.mode == "closed" else -1
            if low < least or high >= C:
                raise ValueError(f"labels must be teacher class ids in [{least}, {C}), got {low}..{high}")
            if outside and self.mode == "closed":
                raise ValueError(f"labels must be among selected in closed mode, {outside} of {len(z_s)} are not")

    def extra_repr(self) -> str:
        return (
            f"selected={list(self.selected)}, mode={self.mode!r}, eps={self.eps:g}, alpha={self.alpha:g}, gamma={self.gamma:g}"
        )
