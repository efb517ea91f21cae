r"""The paper's propositions as functions to compute with. Distances are δ = i − j: how far back a query looks.

Pair k of a key turns by :math:`-\delta g_k` against the query: :math:`\text{logit}(\delta) = \sum_k q^{(k)\top} R(-\delta g_k)
k^{(k)}`. Pairs are (k, k + d/2). Everything is computed in float64.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_CHUNK = 1 << 22  # numbers held at once


def frequencies(head_dim: int, base: float) -> Tensor:
    r""":math:`g_k = \theta^{-2(k-1)/d}`, ``(head_dim // 2,)`` float64."""
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim must be even and positive, got {head_dim}")
    if not 0 < base < math.inf:
        raise ValueError(f"base must be positive and finite, got {base}")
    return base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)


def as_pairs(x: Tensor) -> Tensor:
    """``(..., head_dim)`` to complex128 ``(..., head_dim // 2)``."""
    if not torch.isfinite(x).all():
        raise ValueError("vectors must be finite")
    first, second = x.double().chunk(2, -1)
    return torch.complex(first, second)


def from_pairs(z: Tensor) -> Tensor:
    return torch.cat([z.real, z.imag], -1)


def rotate(x: Tensor, position: Tensor | float, base: float) -> Tensor:
    r""":math:`R^m x`: every pair of `x` turned by position · frequency.

    Shapes: x ``(..., head_dim)``, position a number or what broadcasts to ``(...)``; output like x, float64.

    Example:
        >>> rotate(torch.tensor([1.0, 0.0]), torch.pi / 2, 10_000.0).round(decimals=6)
        tensor([0., 1.], dtype=torch.float64)
    """
    angle = torch.as_tensor(position, dtype=torch.float64)[..., None] * frequencies(x.shape[-1], base)
    return from_pairs(as_pairs(x) * torch.polar(torch.ones_like(angle), angle))


def logits_by_distance(q: Tensor, k: Tensor, distances: Tensor, base: float) -> Tensor:
    """``q`` against ``k`` seen from each distance: ``(..., head_dim)`` twice and ``(n,)`` to ``(..., n)``, unscaled."""
    product = as_pairs(q).conj() * as_pairs(k)  # (..., pairs)
    angle = distances.double()[:, None] * frequencies(q.shape[-1], base)  # (n, pairs)
    return product.real @ angle.cos().mT + product.imag @ angle.sin().mT


def maximal_distance(q: Tensor, r: int, base: float, *, horizon: int = 8192) -> int:
    r"""RoPE need not decay: where the logit of `q` with the key :math:`R^r q` is largest among distances 0 … horizon.

    .. math:: \text{logit}(\delta) = \sum_k \|q^{(k)}\|^2 \cos((r - \delta)\, g_k)

    It is `r`, and there alone, for any `q` whose pairs are non-zero: :math:`g_1 = 1` is no rational multiple of π.

    Args:
        q: ``(head_dim,)``, finite.
        r: In [0, horizon].
        base: :math:`\theta`.
        horizon: Largest distance looked at.

    Raises:
        ValueError: r out of range; a pair of `q` that is zero.

    Example:
        >>> maximal_distance(torch.ones(64), 1234, 10_000.0)
        1234
    """
    if not 0 <= r <= horizon:
        raise ValueError(f"r must be in [0, {horizon}], got {r}")
    if (as_pairs(q) == 0).any():
        raise ValueError("every pair of q must be non-zero")
    return int(logits_by_distance(q, rotate(q, r, base), torch.arange(horizon + 1), base).argmax())


class Expectation(NamedTuple):
    """Mean over draws and its standard error, one entry a distance."""

    mean: Tensor
    standard_error: Tensor


def gaussian_expectation(
    distances: Sequence[int], head_dim: int, base: float, *, draws: int = 100_000, generator: torch.Generator | None = None
) -> Expectation:
    """RoPE does not decay on random vectors: the mean logit of independent standard normal q and k, which is 0 at any distance.

    The usual picture of a decay is that of equal entries: ``logits_by_distance(ones, ones, ...)``.

    Example:
        >>> found = gaussian_expectation([0, 100], 8, 10_000.0, draws=1000, generator=torch.Generator().manual_seed(0))
        >>> bool((found.mean.abs() < 4 * found.standard_error).all())
        True
    """
    if draws < 2:
        raise ValueError(f"draws must be at least 2, got {draws}")
    at = torch.as_tensor(distances)
    parts = []
    for start in range(0, draws, max(1, _CHUNK // head_dim)):
        rows = min(draws - start, max(1, _CHUNK // head_dim))
        q, k = torch.randn(2, rows, head_dim, generator=generator, dtype=torch.float64)
        parts.append(logits_by_distance(q, k, at, base))
    values = torch.cat(parts)
    return Expectation(values.mean(0), values.std(0) / math.sqrt(draws))


def diagonal_gap(band: int, N: int, base: float, head_dim: int) -> float:
    r"""How much a logit falls, at least, once a head of the `band` highest frequencies looks elsewhere within N tokens.

    .. math:: \text{gap}(N) = \min_{1 \le |\delta| \le N} \sum_{k \le \text{band}} (1 - \cos(\delta g_k))

    With the highest frequency alone it is tiny from N = 44 on, since 44 ≈ 7 · 2π.

    Args:
        band: Frequencies used, 1 to head_dim / 2, each with a pair of length 1.
        N: Largest distance, ≥ 1.

    Example:
        >>> round(diagonal_gap(1, 43, 10_000.0, 256), 3), round(diagonal_gap(1, 44, 10_000.0, 256), 6)
        (0.009, 0.000157)
    """
    if not 1 <= band <= head_dim // 2:
        raise ValueError(f"band must be in [1, {head_dim // 2}], got {band}")
    if N < 1:
        raise ValueError(f"N must be at least 1, got {N}")
    delta = torch.arange(1, N + 1, dtype=torch.float64)[:, None]
    # 1 − cos x = 2 sin²(x/2), without the cancellation
    return float((2 * (delta * frequencies(head_dim, base)[:band] / 2).sin() ** 2).sum(1).min())


def target_weight(band: int, N: int, base: float, head_dim: int, *, back: int, epsilon: float) -> float:
    r"""RoPE can be positional: the least weight on the token `back` steps before, of a head built to look there.

    Every token has the query :math:`c\psi` and the key :math:`c R^{\text{back}} \psi`, where ψ has length 1 in the `band`
    highest pairs and 0 elsewhere, and :math:`c^2 = \sqrt d\, \log\!\big((N-1)(1-\epsilon)/\epsilon\big) / \text{gap}(N)`.
    The weight is then at least :math:`1 - \epsilon`, whatever the tokens are.

    Args:
        back: 0 for the token itself, 1 for the one before.
        epsilon: In (0, 1).

    Returns:
        The least weight over the queries ``back … N − 1`` of a causal attention over N tokens.

    Example:
        >>> target_weight(8, 64, 10_000.0, 64, back=1, epsilon=0.01) >= 0.99
        True
    """
    if not 0 < epsilon < 1:
        raise ValueError(f"epsilon must be in (0, 1), got {epsilon}")
    if not 0 <= back < N:
        raise ValueError(f"back must be in [0, {N}), got {back}")
    gap = diagonal_gap(band, N, base, head_dim)
    squared = math.sqrt(head_dim) * max(math.log((N - 1) * (1 - epsilon) / epsilon), 0.0) / gap if N > 1 else 0.0
    psi = torch.zeros(head_dim // 2, dtype=torch.float64)
    psi[:band] = 1.0
    q = from_pairs(torch.complex(psi, torch.zeros_like(psi))).expand(N, -1)
    weights = causal_attention(q, squared * rotate(q, back, base), base)
    return float(weights.diagonal(-back)[: N - back].min())


def causal_attention(q: Tensor, k: Tensor, base: float | None) -> Tensor:
    """Attention weights of one head: ``(tokens, head_dim)`` twice to ``(tokens, tokens)``. Without a base, no positions.

    Without positions equal tokens get equal logits, so that a constant sequence is attended to uniformly: no head can be
    positional for every input.

    Example:
        >>> causal_attention(torch.ones(3, 4), torch.ones(3, 4), None)[2]
        tensor([0.3333, 0.3333, 0.3333], dtype=torch.float64)
    """
    at = torch.arange(len(q))
    if base is not None:
        q, k = rotate(q, at, base), rotate(k, at, base)
    logits = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    return logits.masked_fill(at[:, None] < at, -torch.inf).softmax(1)


def semantic_horizon(base: float, head_dim: int, pair: int | None = None) -> float:
    r"""Tokens after which a pair that matches content turns against itself: :math:`\pi / (2 g_k)`.

    Args:
        base, head_dim: Of the encoding.
        pair: 0 for the highest frequency; by default the lowest, :math:`\frac\pi2\, \theta^{1 - 2/d}`. A larger
            base only moves it.

    Example:
        >>> round(semantic_horizon(10_000.0, 256)), round(semantic_horizon(100_000.0, 64))
        (14617, 109615)
    """
    g = frequencies(head_dim, base)
    if pair is not None and not 0 <= pair < len(g):
        raise ValueError(f"pair must be in [0, {len(g)}), got {pair}")
    return math.pi / (2 * float(g[-1 if pair is None else pair]))
