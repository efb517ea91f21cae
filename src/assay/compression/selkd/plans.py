r"""Transport plans between samples and classes, as log-plans: entropic optimal transport over the constraints SelKD uses.

With logits ``z (B, K)`` and temperature ``ε`` the plan of a constraint set 𝒰 is ``argmin ⟨−z, P⟩ − ε H(P)`` over 𝒰. All
three sets change ``exp(z/ε)`` by a factor for each row, and one of them by a factor for each column.
"""

import math
from typing import Literal

import torch
from torch import Tensor

Solver = Literal["exact", "alternate"]
LEAST = math.exp(-60)  # of a kernel: its products with factors of exp(±25) neither vanish nor overflow in float32


def transport_plan(
    logits: Tensor,
    *,
    rows: Literal["eq", "le"] = "eq",
    col_mass: Tensor | None = None,
    total: float | Tensor | None = None,
    eps: float = 4.0,
    n_iter: int = 20,
) -> Tensor:
    r"""The entropic transport plan between samples and classes, as its logarithm.

    Shi, Shi and Yan, "SelKD: Selective Knowledge Distillation via Optimal Transport Perspective", ICLR 2025.

    .. math:: P = \arg\min_{P \in \mathcal U} \langle -z, P\rangle - \varepsilon H(P), \quad H(P) = -\sum P(\log P - 1)

    - ``rows="eq"``: :math:`P 1 = 1`, whose solution is ``softmax(z/ε)``.
    - ``rows="eq", col_mass=b``: also :math:`P^\top 1 = b`, by Sinkhorn's iteration
      ``g ← log b − LSE_i(z/ε + f)``, ``f ← −LSE_c(z/ε + g)``; it ends on rows, which sum to 1 exactly.
    - ``rows="le", total=m``: :math:`P 1 \le 1`, :math:`1^\top P 1 = m`, in closed form: with ``Z_i = Σ_c exp(z_ic/ε)``,
      ``P_ic = exp(z_ic/ε) min(1/Z_i, λ)``, where λ solves ``Σ_i min(1, λ Z_i) = m``.

    Differentiable in `logits`; through the iterations where there are any.

    Args:
        logits: ``(B, K)``, finite. Half precision is computed in float32.
        rows: Each sample gives all of its mass 1 (``"eq"``) or at most that (``"le"``).
        col_mass: Mass that each class receives, ``(K,)``, ≥ 0 with sum B. A class of mass 0 has a column of −∞.
        total: Mass m in all, in ``[0, B]``; with 0 the plan is zero, its logarithm −∞.
        eps: Regularisation, > 0: the temperature of distillation.
        n_iter: Sinkhorn iterations, ≥ 1; at most, where no gradient is asked for: they end when nothing moves beyond rounding.

    Returns:
        ``log P (B, K)``.

    Raises:
        ValueError: logits that are not ``(B, K)``, empty or not finite; arguments outside their ranges or that do not
            go together.

    Example:
        >>> log_plan = transport_plan(torch.tensor([[2.0, 0.0], [1.0, 0.0]]), col_mass=torch.tensor([1.0, 1.0]), eps=1.0)
        >>> log_plan.exp()                                  # the second class has to take one half of each …
        tensor([[0.6225, 0.3775],
                [0.3775, 0.6225]])
    """
    check_temperature(eps)
    z = checked_logits("logits", logits)
    if rows not in ("eq", "le"):
        raise ValueError(f"rows must be 'eq' or 'le', got {rows!r}")
    if (total is None) != (rows == "eq") or (col_mass is not None and rows == "le"):
        raise ValueError("rows='le' needs total and takes no col_mass; rows='eq' takes no total")
    if n_iter < 1:
        raise ValueError(f"n_iter must be at least 1, got {n_iter}")
    x = z / eps
    if rows == "le":
        m = torch.as_tensor(total, dtype=x.dtype, device=x.device)
        if m.ndim or not 0 <= float(m) <= len(x):
            raise ValueError(f"total must be a number in [0, {len(x)}], the number of rows, got {total}")
        log_z = x.logsumexp(1)
        return x + (log_row_mass(log_z, m) - log_z)[:, None]
    if col_mass is None:
        return x.log_softmax(1)
    b = torch.as_tensor(col_mass).detach().to(x)
    if b.shape != x.shape[1:] or not bool(b.isfinite().all()) or bool((b < 0).any()):
        raise ValueError(f"col_mass must be ({x.shape[1]},), finite and ≥ 0, got {b.tolist()}")
    if abs(float(b.sum()) - len(x)) > 1e-4 * len(x):
        raise ValueError(f"col_mass must sum to the number of rows, {len(x)}, got {float(b.sum()):g}")
    return (x + column_potential(x, b, n_iter)).log_softmax(1)


def column_potential(x: Tensor, b: Tensor, n_iter: int) -> Tensor:
    """The ``g (K,)`` of Sinkhorn's iteration on ``x = z/ε``, −∞ where b is 0."""
    if not (torch.is_grad_enabled() and x.requires_grad) and not torch.compiler.is_compiling():
        kernel = x.softmax(1)
        if float(kernel.amin()) > LEAST:
            return _scaling(kernel, b, n_iter).log()
    log_b = b.log()
    g = torch.where(b > 0, torch.zeros_like(b), log_b)
    for _ in range(n_iter):
        f = -(x + g).logsumexp(1, keepdim=True)
        g = log_b - (x + f).logsumexp(0)
    return g


def _scaling(kernel: Tensor, b: Tensor, n_iter: int) -> Tensor:
    """The same iteration outside the logarithm, five times as fast: ``exp(g)``, for a kernel whose rows sum to 1.

    On a CPU every fifth iteration that moved nothing beyond rounding is the last; elsewhere asking costs more than it saves.
    """
    v, columns = (b > 0).to(kernel.dtype), kernel.T.contiguous()
    row_sums, column_sums = kernel.new_empty(len(kernel)), torch.empty_like(v)  # autocast leaves products with `out` alone
    rounding, asks = 8 * torch.finfo(kernel.dtype).eps, kernel.device.type == "cpu"
    for i in range(1, n_iter + 1):
        torch.mv(kernel, v, out=row_sums).reciprocal_()
        before, v = v, b / torch.mv(columns, row_sums, out=column_sums)
        if asks and i % 5 == 0 and i < n_iter and bool(((v - before).abs_() <= rounding * v).all()):
            break
    return v


def log_row_mass(log_z: Tensor, total: Tensor, solver: Solver = "exact", n_iter: int = 3) -> Tensor:
    """``log r (B,)``: what each sample gives to the selected classes, from ``log Z (B,)``; −∞ for a total of 0.

    ``"exact"``: ``r_i = min(1, λ Z_i)`` with sum m. ``"alternate"``: the loop of the authors' code, which caps rows at 1
    and rescales all to sum m in turn. Where Z is at least 1 in every row it returns m/B for each, whatever the sample.
    """
    m = total.clamp_min(torch.finfo(log_z.dtype).tiny)
    if solver == "alternate":
        log_r = log_z
        for _ in range(n_iter):
            log_r = log_r.clamp(max=0)
            log_r = log_r + m.log() - log_r.logsumexp(0)
    else:
        saturated, count = _saturated(log_z.detach(), m)
        rest = log_z.masked_fill(saturated, -math.inf).logsumexp(0)
        log_r = torch.where(saturated, torch.zeros_like(log_z), (m - count).log() - rest + log_z)
    return torch.where(total > 0, log_r, -math.inf)


@torch.no_grad()
def _saturated(log_z: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that give all of their mass, ``(B,)`` bool, and how many: those of largest Z, found by sorting.

    With the n largest saturated, ``λ_n = (m − n) / Σ_{rest} Z``; n is the least one with ``λ_n Z_(n+1) ≤ 1``. That bound
    holds from there on, so the n for which it does not are counted. With m = B all but the last are, whose λ fits it too.
    """
    B = len(log_z)
    sorted_z, order = log_z.sort(descending=True)
    rest = sorted_z.flip(0).logcumsumexp(0).flip(0)
    n = torch.arange(B, device=log_z.device)
    left = (m - n).clamp_min(0)
    count = ((left > 0) & (left.log() + sorted_z > rest)).sum()
    count = torch.where(m >= B, B - 1, count)
    return torch.empty_like(log_z, dtype=torch.bool).scatter_(0, order, n < count), count


def plan_divergence(log_teacher: Tensor, log_student: Tensor, eps: float) -> Tensor:
    """``(ε²/B) Σ P_t (log P_t − log P_s)`` of two log-plans ``(B, K)``, a scalar; entries where P_t is 0 count nothing.

    Between two plans of ``transport_plan(logits, eps=eps)`` it is the usual distillation loss at temperature ε.
    """
    return finite_divergence(finite(log_teacher.detach()), finite(log_student), eps)


def finite(x: Tensor) -> Tensor:
    """A number in place of −∞: its exponential is 0, and 0 times it is 0."""
    return x.clamp_min(torch.finfo(x.dtype).min / 4)


def finite_divergence(log_teacher: Tensor, log_student: Tensor, eps: float) -> Tensor:
    return eps**2 / len(log_teacher) * ((log_teacher - log_student) * log_teacher.exp()).sum()


def checked_logits(name: str, logits: Tensor) -> Tensor:
    """``(B, K)`` in at least float32.

    Raises:
        ValueError: another shape, nothing in it, or a value that is not finite.
    """
    z = upcast(name, logits)
    bad = int((~z.detach().isfinite()).sum())
    if bad:
        raise ValueError(f"{name} must be finite, {bad} of {z.numel()} values are not")
    return z


def upcast(name: str, logits: Tensor) -> Tensor:
    if not logits.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {logits.dtype}")
    if logits.ndim != 2 or not logits.numel():
        raise ValueError(f"{name} must be (B, classes) and not empty, got shape {tuple(logits.shape)}")
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def check_temperature(eps: float) -> None:
    if not 0 < eps < math.inf:
        raise ValueError(f"eps must be positive and finite, got {eps}")
