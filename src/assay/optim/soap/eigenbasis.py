r"""SOAP's mathematics on a stack of ``k`` equal tensors: rotate, track, precondition, refresh the basis.

Letters: ``x`` is ``(k, d_1, …, d_r)``; factor :math:`S_a` and basis :math:`Q_a` of axis ``a`` are ``(k, d_a, d_a)``, or
``None`` where the basis is the identity. ``second`` is ``(V,)`` with ``V`` shaped like ``x``, or ``(row, column)``,
``(k, m)`` and ``(k, n)``, when the second moment is kept as rank one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Factors = Sequence[Tensor | None]

_GRAM_BLOCK = 256
"""Below this side, or with less to sum over, one product is as quick as three that use the symmetry (measured on CPU)."""


def rotate(x: Tensor, bases: Factors) -> Tensor:
    r"""Into the eigenbasis: :math:`\hat G = Q_1^\top G\, Q_2`, for any number of axes."""
    for axis, Q in enumerate(bases):
        if Q is not None:
            x = _contract(x, Q, axis)
    return x


def rotate_back(x: Tensor, bases: Factors) -> Tensor:
    r"""Out of the eigenbasis: :math:`N = Q_1 \hat N\, Q_2^\top`."""
    return rotate(x, [None if Q is None else Q.mT for Q in bases])


def advance(
    grad: Tensor,
    exp_avg: Tensor,
    second: tuple[Tensor, ...],
    factors: Factors,
    bases: Factors,
    beta1: float,
    beta2: float,
    shampoo_beta: float,
    eps: float,
) -> Tensor:
    """One step between refreshes. Updates moments and factors in place; returns the direction N, shaped like `grad`.

    No data-dependent branch and no step count: the function compiles to one graph.
    """
    rotated = rotate(grad, bases)
    exp_avg.lerp_(rotated, 1 - beta1)
    root = track(second, rotated, beta2).add_(eps)
    direction = rotate_back(exp_avg / root, bases)
    for axis, S in enumerate(factors):  # after the rotation: a gradient never shapes the basis it is projected on
        if S is not None:
            add_gram(S, unfolded(grad, axis), shampoo_beta)
    return direction


def track(second: tuple[Tensor, ...], rotated: Tensor, beta2: float) -> Tensor:
    r"""Folds a rotated gradient into the second moment and returns :math:`\sqrt{\hat V}` as a new tensor."""
    if len(second) == 1:
        (V,) = second
        V.mul_(beta2).addcmul_(rotated, rotated, value=1 - beta2)
        return V.sqrt()
    row, column = second
    square = rotated.square()
    row.lerp_(square.mean(-1), 1 - beta2)
    column.lerp_(square.mean(-2), 1 - beta2)
    return rank_one(row, column).sqrt_()


def rank_one(row: Tensor, column: Tensor) -> Tensor:
    r"""Adafactor's estimate :math:`\hat V_{ij} = A_i C_j / \mathrm{mean}(A)`, ``(k, m, n)``; 0 where all of A is."""
    share = row / row.mean(-1, keepdim=True).clamp_min(torch.finfo(row.dtype).tiny)
    return share[:, :, None] * column[:, None, :]


def first_basis(S: Tensor) -> Tensor:
    """Eigenvectors of each factor, ``(k, d, d)``, columns in descending order of eigenvalue."""
    try:
        Q = torch.linalg.eigh(S).eigenvectors
    except torch.linalg.LinAlgError:  # float32 LAPACK can fail to converge; float64 has not been seen to
        Q = torch.linalg.eigh(S.double()).eigenvectors.to(S.dtype)
    return Q.flip(-1).contiguous()


def refresh(exp_avg: Tensor, second: tuple[Tensor, ...], factors: Factors, bases: Factors) -> None:
    r"""One power iteration and QR on every axis, in place: :math:`Q \leftarrow \mathrm{QR}(S Q_\pi)`.

    The columns are first sorted (:math:`\pi`) by their Rayleigh quotients, and the second moment follows its columns;
    it is *not* rotated, which is the method's approximation. The first moment is carried across exactly.
    """
    for axis, (S, Q) in enumerate(zip(factors, bases, strict=True)):
        if S is None or Q is None:
            continue
        SQ = torch.bmm(S, Q)
        order = (Q * SQ).sum(-2).argsort(dim=-1, descending=True, stable=True)  # diag(Qᵀ S Q), (k, d)
        permute(second, axis, order)
        new = torch.linalg.qr(SQ.gather(-1, order[:, None, :].expand_as(SQ))).Q  # orthonormal even where S Q has no full rank
        if exp_avg[0].numel() > Q[0].numel():  # out of the old basis and into the new one: whichever takes fewer products
            carried = _contract(exp_avg, torch.bmm(Q.mT, new), axis)
        else:
            carried = _contract(_contract(exp_avg, Q.mT, axis), new, axis)
        exp_avg.copy_(carried)
        Q.copy_(new)


def permute(second: tuple[Tensor, ...], axis: int, order: Tensor) -> None:
    """Reorders axis `axis` of the second moment by ``order (k, d)``, in place."""
    if len(second) == 2:
        second[axis].copy_(second[axis].gather(-1, order))
        return
    (V,) = second
    index = order.reshape(len(order), *(-1 if a == axis else 1 for a in range(V.ndim - 1)))
    V.copy_(V.gather(axis + 1, index.expand_as(V)))


def unfolded(x: Tensor, axis: int) -> Tensor:
    """mat_a(x): each tensor of the stack as ``(d_a, everything else)``; a view for matrices."""
    if x.ndim == 3:
        return x.mT if axis else x
    moved = x.movedim(axis + 1, 1)
    return moved.reshape(*moved.shape[:2], -1)


def add_gram(S: Tensor, A: Tensor, beta: float) -> None:
    r"""``S ← β S + (1-β) A Aᵀ`` in place, ``A (k, d, rest)``; only one of each pair of mirrored blocks is computed."""
    side, rest = A.shape[1:]
    half = side // 2
    if side < _GRAM_BLOCK or rest < side:
        S.baddbmm_(A, A.mT, beta=beta, alpha=1 - beta)
        return
    upper, lower = A[:, :half], A[:, half:]
    add_gram(S[:, :half, :half], upper, beta)
    add_gram(S[:, half:, half:], lower, beta)
    S[:, half:, :half].baddbmm_(lower, upper.mT, beta=beta, alpha=1 - beta)
    S[:, :half, half:].copy_(S[:, half:, :half].mT)


def _contract(x: Tensor, Q: Tensor, axis: int) -> Tensor:
    """Multiplies axis `axis` of every tensor in the stack by ``Qᵀ``."""
    if x.ndim == 3:
        return torch.bmm(x, Q) if axis else torch.bmm(Q.mT, x)
    if axis == x.ndim - 2:  # the last axis needs no transposition and leaves a contiguous result
        return torch.bmm(x.reshape(len(x), -1, x.shape[-1]), Q).view(x.shape)
    moved = x.movedim(axis + 1, 1)
    return torch.bmm(Q.mT, moved.reshape(*moved.shape[:2], -1)).view(moved.shape).movedim(1, axis + 1)
