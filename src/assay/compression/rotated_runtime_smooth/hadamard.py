"""Hadamard matrices of every order that Sylvester, Paley and Kronecker reach, and their fast application."""

import functools
import math

import numpy as np
import torch
from torch import Tensor

# Two small dense factors are faster on BLAS than a butterfly of many passes. Bases are merged up to this order; a base that
# is larger by itself (344 in 11008) stays one factor.
_LARGEST_MERGED = 64


def hadamard_matrix(n: int) -> Tensor:
    r"""A Hadamard matrix: entries ±1 and :math:`HH^\top = nI`.

    Built from Sylvester (powers of two), Paley I (:math:`q + 1`, :math:`q \equiv 3 \bmod 4`) and Paley II
    (:math:`2(q + 1)`, :math:`q \equiv 1 \bmod 4`) over any prime power :math:`q`, and Kronecker products of these.

    Args:
        n: Order, 1, 2 or a multiple of 4.

    Shapes:
        - output: ``(n, n)``, float64.

    Raises:
        ValueError: no construction here reaches `n` (92, 172 need Williamson's; 9 heads can never have one).

    Example:
        >>> H = hadamard_matrix(344)                         # 343 = 7³ is a prime power
        >>> bool((H @ H.T == 344 * torch.eye(344, dtype=H.dtype)).all())
        True
    """
    orders = kronecker_orders(n)
    if orders is None:
        raise ValueError(
            f"no Hadamard matrix of order {n}: Sylvester, Paley I and II and their Kronecker products do not reach it"
        )
    return functools.reduce(torch.kron, [_base(order) for order in orders], torch.ones(1, 1, dtype=torch.float64))


@functools.lru_cache(maxsize=4096)
def kronecker_orders(n: int) -> tuple[int, ...] | None:
    """Orders whose Kronecker product has order `n`, cheapest first choice; None where there is no construction."""
    if n < 1:
        raise ValueError(f"the order of a Hadamard matrix must be at least 1, got {n}")
    if n == 1:
        return ()
    found = []
    for base in (d for d in range(2, n + 1) if n % d == 0 and _constructible(d)):
        rest = kronecker_orders(n // base)
        if rest is not None:
            found.append((base, *rest))
    return min(found, key=lambda orders: (sum(orders), orders), default=None)


@functools.lru_cache(maxsize=256)
def hadamard_factors(
    n: int, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
) -> tuple[Tensor, ...] | None:
    """Orthogonal factors whose Kronecker product is a Hadamard matrix divided by √n; None where there is none."""
    orders = kronecker_orders(n)
    if orders is None:
        return None
    merged: list[list[int]] = []
    for order in sorted(orders, reverse=True):
        home = next((group for group in merged if math.prod(group) * order <= _LARGEST_MERGED), None)
        if home is None:
            merged.append([order])
        else:
            home.append(order)
    with torch.inference_mode(False):  # kept for later calls, which may need gradients
        factors = [functools.reduce(torch.kron, map(_base, group)) / math.sqrt(math.prod(group)) for group in merged]
        return tuple(factor.to(device, dtype) for factor in factors)


def random_base(n: int, generator: torch.Generator) -> Tensor:
    """The odd part of `n` as a random orthogonal matrix: with a Sylvester matrix it stands in where `n` has no Hadamard."""
    odd = n // (n & -n)
    q, r = torch.linalg.qr(torch.randn(odd, odd, dtype=torch.float64, generator=generator))
    return q * r.diagonal().sign()  # makes the distribution uniform (Haar)


def orthogonal_factors(n: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """`hadamard_factors`, or random orthogonal ⊗ Sylvester where no Hadamard matrix of order `n` is constructible."""
    exact = hadamard_factors(n)
    return with_base(random_base(n, generator), n) if exact is None else exact


def with_base(base: Tensor, n: int) -> tuple[Tensor, ...]:
    """Factors of `base` ⊗ Sylvester of total order `n`."""
    rest = n // base.shape[0]
    return (base, *(hadamard_factors(rest, base.dtype, base.device) or ()))


def apply_factors(x: Tensor, factors: tuple[Tensor, ...], inner: int = 1) -> Tensor:
    r"""``x (A_1 ⊗ … ⊗ A_m ⊗ I_inner)`` without forming the product.

    Shapes:
        - x: ``(*, n_1 ⋯ n_m · inner)``; factors ``(n_i, n_i)``; output like `x`.
    """
    shape = x.shape
    right = shape[-1]
    for factor in factors:
        order = factor.shape[0]
        right //= order
        if right == 1:
            x = x.reshape(-1, order) @ factor
        else:
            x = factor.T @ x.reshape(-1, order, right)  # (left, order, right): contracts the middle axis
    if right != inner:
        raise ValueError(
            f"factors of orders {[f.shape[0] for f in factors]} with inner={inner} do not fit {shape[-1]} channels"
        )
    return x.reshape(shape)


def _constructible(n: int) -> bool:
    return n == 2 or _paley_kind(n) != 0


def _paley_kind(n: int) -> int:
    """1 or 2: the Paley construction that gives order `n`; 0: neither."""
    if n % 4 == 0 and n >= 4:
        if (n - 1) % 4 == 3 and _prime_power(n - 1):
            return 1
        if n // 2 > 1 and (n // 2 - 1) % 4 == 1 and _prime_power(n // 2 - 1):
            return 2
    return 0


@functools.lru_cache(maxsize=64)
def _base(n: int) -> Tensor:
    with torch.inference_mode(False), torch.device("cpu"):
        return _new_base(n)


def _new_base(n: int) -> Tensor:
    if n == 2:
        return torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    kind = _paley_kind(n)
    q = n - 1 if kind == 1 else n // 2 - 1
    core = np.ones((q + 1, q + 1), dtype=np.int64)  # bordered Jacobsthal matrix
    core[0, 0] = 0
    core[1:, 1:] = _jacobsthal(q)
    if kind == 1:
        core[1:, 0] = -1  # skew: core + coreᵀ = 0, so core + I is Hadamard
        matrix = core + np.eye(q + 1, dtype=np.int64)
    else:  # symmetric conference matrix
        matrix = np.kron(core, [[1, 1], [1, -1]]) + np.kron(np.eye(q + 1, dtype=np.int64), [[1, -1], [-1, -1]])
    return torch.from_numpy(matrix).double()


def _jacobsthal(q: int) -> np.ndarray:
    """χ(a − b) over the elements of GF(q): 1 for non-zero squares, −1 for the rest, 0 on the diagonal."""
    found = _prime_power(q)
    assert found is not None
    p, k = found
    elements = np.stack(np.unravel_index(np.arange(q), (p,) * k), -1)[:, ::-1]  # (q, k) coefficients, constant term first
    place = p ** np.arange(k)
    square = np.zeros((q, 2 * k - 1), dtype=np.int64)
    for i in range(k):
        square[:, i : i + k] += elements[:, i : i + 1] * elements
    modulus = np.array(_irreducible(p, k))
    for degree in range(2 * k - 2, k - 1, -1):  # reduce by the monic modulus
        square[:, degree - k : degree + 1] -= square[:, degree : degree + 1] * modulus
    character = np.full(q, -1, dtype=np.int64)
    character[np.unique((square[:, :k] % p) @ place)] = 1
    character[0] = 0
    difference = (elements[:, None, :] - elements[None, :, :]) % p  # (q, q, k)
    return character[difference @ place]


@functools.lru_cache(maxsize=64)
def _irreducible(p: int, k: int) -> tuple[int, ...]:
    """Coefficients, constant term first, of a monic irreducible polynomial of degree `k` over GF(p), by trial division."""
    for code in range(p**k):
        candidate = [code // p**i % p for i in range(k)] + [1]
        divisors = ([c // p**i % p for i in range(d)] + [1] for d in range(1, k // 2 + 1) for c in range(p**d))
        if all(any(_remainder(candidate, divisor, p)) for divisor in divisors):
            return tuple(candidate)
    raise AssertionError("every finite field has an irreducible polynomial of every degree")


def _remainder(dividend: list[int], divisor: list[int], p: int) -> list[int]:
    rest, degree = list(dividend), len(divisor) - 1
    for top in range(len(rest) - 1, degree - 1, -1):
        lead = rest[top]
        for i, coefficient in enumerate(divisor):
            rest[top - degree + i] = (rest[top - degree + i] - lead * coefficient) % p
    return rest[:degree]


def _prime_power(n: int) -> tuple[int, int] | None:
    """(p, k) with n = p^k, or None."""
    p = next((d for d in range(2, math.isqrt(max(n, 0)) + 1) if n % d == 0), n)
    k = 0
    rest = n
    while p > 1 and rest % p == 0:
        rest //= p
        k += 1
    return (p, k) if k and rest == 1 else None
