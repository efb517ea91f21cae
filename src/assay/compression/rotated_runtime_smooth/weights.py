"""Weights on the 4-bit grid: per-row clip search, round to nearest, GPTQ."""

import torch
from torch import Tensor

CLIP_GRID, CLIP_STEPS, CLIP_NORM = 100, 80, 2.4  # the released search: p = 1 − i/100 for i < 80, error to the power 2.4
_CHUNK = 1 << 17  # elements: what stays in cache between the passes


@torch.no_grad()
def clip_scale(weight: Tensor, *, bits: int = 4, search: bool = True) -> Tensor:
    r"""Scale of every row: :math:`p \max_j |W_{nj}| / q_{\max}` with the `p` of smallest error.

    .. math:: p^* = \arg\min_{p \in \{1, 0.99, \dots, 0.21\}} \sum_j |W_{nj} - \hat W_{nj}(p)|^{2.4}

    Args:
        weight: ``(N, K)``.
        bits: 2 to 8.
        search: False: p = 1.

    Shapes:
        - output: ``(N, 1)``, float32 (float64 for float64 weights).

    Raises:
        ValueError: weights not finite.

    Example:
        >>> clip_scale(torch.tensor([[7.0, -1.0, 2.0, 3.0]]), search=False)
        tensor([[1.]])
    """
    if not torch.isfinite(weight).all():
        raise ValueError(f"weights must be finite, {(~torch.isfinite(weight)).sum()} values are not")
    weight = weight if weight.dtype == torch.float64 else weight.float()
    q_max = 2 ** (bits - 1) - 1
    full = weight.abs().amax(1, keepdim=True).clamp_min(1e-5) / q_max  # (N, 1)
    if not search:
        return full
    rows = max(1, _CHUNK // weight.shape[1])
    return torch.cat([_search(w, f, q_max) for w, f in zip(weight.split(rows), full.split(rows), strict=True)])


def _search(weight: Tensor, full: Tensor, q_max: int) -> Tensor:
    found = full.clone()
    rows = torch.arange(len(weight), device=weight.device)  # those still searching
    best, best_error = full.clone(), torch.full_like(full, torch.inf)
    for i in range(CLIP_STEPS):
        scale = full * (1 - i / CLIP_GRID)
        rounded = (weight / scale).round_().clamp_(-q_max - 1, q_max).mul_(scale)
        error = _cost(rounded.sub_(weight).abs_())
        better = error < best_error
        best_error, best = torch.where(better, error, best_error), torch.where(better, scale, best)
        if i % 4 == 3 and i > CLIP_STEPS // 3:
            # A smaller p cannot win once what it clips off alone costs more than the best so far.
            open_ = (_cost((weight.abs() - (q_max + 1) * scale).clamp_min_(0)) <= best_error)[:, 0]
            if not open_.all():
                found[rows] = best
                rows, weight, full, best, best_error = (t[open_] for t in (rows, weight, full, best, best_error))
            if not len(rows):
                break
    found[rows] = best
    return found


def _cost(error: Tensor) -> Tensor:
    """Row sums of error^2.4, in logarithms: exp and log are vectorised where pow is not, and log 0 = −inf gives 0."""
    return error.log_().mul_(CLIP_NORM).exp_().sum(1, keepdim=True)


def round_weight(weight: Tensor, scale: Tensor, *, bits: int = 4) -> Tensor:
    """Round to nearest: ``(N, K)`` and ``(N, 1)`` → int8 ``(N, K)`` in [−2^(bits−1), 2^(bits−1) − 1]."""
    q_max = 2 ** (bits - 1) - 1
    return (weight / scale.to(weight.dtype)).round_().clamp_(-q_max - 1, q_max).to(torch.int8)


@torch.no_grad()
def gptq_round(
    weight: Tensor, hessian: Tensor, scale: Tensor, *, bits: int = 4, block: int = 128, damping: float = 0.01
) -> Tensor:
    r"""GPTQ: rounds column after column and moves each column's error into the columns not yet rounded.

    Minimises :math:`\mathrm{tr}\,(W - \hat W) H (W - \hat W)^\top` greedily, with
    :math:`H = \sum_t x_t x_t^\top` of the layer's inputs. Equal to round to nearest where H is diagonal.

    Args:
        weight: ``(N, K)``.
        hessian: ``(K, K)``, symmetric, positive semi-definite, any positive multiple of H.
        scale: ``(N, 1)``.
        block: Columns whose errors are passed on at once.
        damping: Added to the diagonal, as a share of its mean; > 0.

    Shapes:
        - output: int8 ``(N, K)``.

    Raises:
        ValueError: `hessian` of another shape or not finite.

    Example:
        >>> W, H = torch.tensor([[0.4, 0.4]]), torch.tensor([[1.0, 0.99], [0.99, 1.0]])
        >>> gptq_round(W, H, torch.ones(1, 1))                # rounding 0.4 down pushes its twin up
        tensor([[0, 1]], dtype=torch.int8)
    """
    columns = weight.shape[1]
    if hessian.shape != (columns, columns) or not torch.isfinite(hessian).all():
        raise ValueError(f"hessian must be finite and of shape {(columns, columns)}, got {tuple(hessian.shape)}")
    W, H = weight.double().clone(), hessian.double().clone()
    dead = H.diagonal() == 0
    H.diagonal()[dead] = 1.0  # a channel that never fires: its weight costs nothing
    W[:, dead] = 0.0
    H.diagonal().add_(damping * H.diagonal().mean())
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(H)), upper=True)  # H⁻¹ = factorᵀ factor
    scale = scale.double()
    q_max = 2 ** (bits - 1) - 1
    q = torch.zeros_like(W)
    for start in range(0, columns, block):
        stop = min(start + block, columns)
        inner = factor[start:stop, start:stop]
        errors = torch.zeros(W.shape[0], stop - start, dtype=W.dtype, device=W.device)
        for j in range(stop - start):  # each column needs the errors of those before it
            column = W[:, start + j]
            q[:, start + j] = (column / scale[:, 0]).round().clamp(-q_max - 1, q_max)
            errors[:, j] = (column - q[:, start + j] * scale[:, 0]) / inner[j, j]
            W[:, start + j : stop] -= errors[:, j : j + 1] * inner[j : j + 1, j:]
        W[:, stop:] -= errors @ factor[start:stop, stop:]
    return q.to(torch.int8)
