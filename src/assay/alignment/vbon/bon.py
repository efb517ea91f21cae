"""The distribution of the best of N samples: its log-probability in O(1), stable for any N, ties included."""

import torch
from torch import Tensor

_FLOOR = -700.0  # e⁻⁷⁰⁰ is the last power of e, about, that is a normal float


def bon_log_ratio(ref_logp: Tensor, log_cdf: Tensor, n: int, *, log_tie_mass: Tensor | None = None) -> Tensor:
    """``log π_bon(y) − log π_ref(y)``: how much likelier a string is as the best of N samples than as one sample.

    Amini, Vieira, Ash and Cotterell, Variational Best-of-N Alignment, ICLR 2025 (arXiv 2407.06057).

    With ``F = P[r(y') < r(y)]`` under the reference and ``T = P[r(y') = r(y)]``, ties among the N broken evenly::

        π_bon(y) = π_ref(y) / T · ((F + T)ᴺ − Fᴺ)

    Args:
        ref_logp: ``log π_ref(y | x)``, of the whole answer given its prompt, any shape.
        log_cdf: ``log F``, ≤ 0; ``-inf`` for the worst string.
        n: N ≥ 1.
        log_tie_mass: ``log T``; by default ``ref_logp``: no other string has that reward, as the paper assumes. An estimated F
            and T may add up to a little over one: the result is then used as it comes.

    Returns:
        The broadcast shape, in the inputs' floating type, computed in float64.

    Raises:
        ValueError: n is no whole number ≥ 1, F outside [0, 1], ``ref_logp`` above 0, T below π_ref, whole numbers for floats.

    Example:
        >>> import torch
        >>> bon_log_ratio(torch.tensor(-9.0), torch.tensor(-0.5), n=4)  # log 4 + 3 · (−0.5), and a little
        tensor(-0.1134)
    """
    n = checked_n(n)
    _check_log_probability("log_cdf", log_cdf, "F must lie in [0, 1]")
    _check_log_probability("ref_logp", ref_logp, "a log-probability is at most 0")
    b = (ref_logp if log_tie_mass is None else log_tie_mass).double()
    if log_tie_mass is not None:
        _check_log_probability("log_tie_mass", log_tie_mass, "T must lie in [0, 1]")
        if (log_tie_mass.double() < ref_logp.double() - 1e-6).any():
            raise ValueError("log_tie_mass must be at least ref_logp: a string ties with itself")
    worst = torch.isneginf(log_cdf)
    a = torch.where(worst, 0.0, log_cdf.double())
    # ((F+T)ᴺ − Fᴺ)/T = (F+T)ᴺ (1 − e⁻ᵘ)/T with u = N log(1 + T/F) and d = log T − log F: the two powers are never subtracted.
    # Where T/F leaves the floats, u = N T/F to the last digit: it is taken at d = −700, and log T drops out.
    d = b - a
    u = n * torch.logaddexp(d.new_zeros(()), d.clamp_min(_FLOOR))  # softplus to full precision, unlike torch's own
    ratio = n * torch.logaddexp(a, b) + (-u).expm1().neg().log() - torch.where(d < _FLOOR, a + _FLOOR, b)
    ratio = torch.where(worst, (n - 1) * b, ratio)
    return ratio.to(torch.promote_types(ref_logp.dtype, log_cdf.dtype))


def bon_log_prob(ref_logp: Tensor, log_cdf: Tensor, n: int, *, log_tie_mass: Tensor | None = None) -> Tensor:
    """``log π_bon(y)``. Arguments, shapes and errors are those of `bon_log_ratio`."""
    dtype = torch.promote_types(ref_logp.dtype, log_cdf.dtype)
    return (ref_logp.double() + bon_log_ratio(ref_logp.double(), log_cdf, n, log_tie_mass=log_tie_mass)).to(dtype)


def bon_distribution(ref_probs: Tensor, rewards: Tensor, n: int) -> Tensor:
    """The exact distribution of the best of N samples from an enumerable reference; ties are broken evenly.

    Args:
        ref_probs: ``(..., S)``, each row a distribution over the S strings.
        rewards: ``(..., S)``, broadcast against it. Equal rewards are ties.
        n: N ≥ 1; 1 gives ``ref_probs`` back.

    Returns:
        ``(..., S)`` float64.

    Raises:
        ValueError: negative probabilities, rows that do not sum to one, NaN rewards, n < 1.

    Example:
        >>> import torch
        >>> bon_distribution(torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.0, 1.0, 1.0]), n=2)
        tensor([0.2500, 0.3750, 0.3750], dtype=torch.float64)
    """
    n = checked_n(n)
    p, r = torch.broadcast_tensors(ref_probs.double(), rewards.double())
    if not bool((p >= 0).all()) or not torch.allclose(p.sum(-1), torch.ones_like(p[..., 0]), atol=1e-5):
        raise ValueError("ref_probs must be non-negative and sum to one along the last axis")
    log_below, log_tie = log_cdf_of(p, r)
    ratio = bon_log_ratio(p.log(), log_below, n, log_tie_mass=torch.maximum(log_tie, p.log()))
    return torch.where(p > 0, p * ratio.exp(), 0.0)


def log_cdf_of(ref_probs: Tensor, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """``log F`` and ``log T`` of every string of an enumerable reference: ``(..., S)`` each, float64."""
    if torch.isnan(rewards).any():
        raise ValueError("rewards must not be NaN")
    p, r = torch.broadcast_tensors(ref_probs.double(), rewards.double())
    ranked, order = r.contiguous().sort(-1)
    mass = torch.nn.functional.pad(p.gather(-1, order).cumsum(-1), (1, 0))
    mass = mass / mass[..., -1:]  # rounding must not carry F over 1
    first, past = (torch.searchsorted(ranked, r.contiguous(), right=right) for right in (False, True))
    below, upto = mass.gather(-1, first), mass.gather(-1, past)
    # T as the sum over its ties alone: a difference of cumulated masses would lose a tiny π_ref(y)
    group = _first_of_ties(ranked)
    ties = torch.zeros_like(p).scatter_add_(-1, group, p.gather(-1, order))
    tie = ties.gather(-1, first)
    return torch.where(upto > 0, below, 0.0).clamp_max(1.0).log(), tie.clamp_max(1.0).log()


def _first_of_ties(ranked: Tensor) -> Tensor:
    """For each place of a sorted row, the first place with the same value."""
    return torch.searchsorted(ranked, ranked)


def checked_n(n: int, least: int = 1) -> int:
    if isinstance(n, bool) or not isinstance(n, int) or n < least:
        raise ValueError(f"n must be a whole number of at least {least}, got {n!r}")
    return n


def _check_log_probability(name: str, value: Tensor, rule: str) -> None:
    if not value.is_floating_point():
        raise ValueError(f"{name} must be of a floating type, got {value.dtype}")
    largest = value.max().item() if value.numel() else 0.0
    if not largest <= 1e-6:  # NaN is not, either
        raise ValueError(f"{name} must be at most 0 and not NaN ({rule}), got a largest value of {largest:g}")
