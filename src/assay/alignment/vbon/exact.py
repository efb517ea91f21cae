"""The objectives without sampling: a chain small enough to list all its strings, a softmax policy over them, full gradients."""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .bon import bon_log_prob, bon_log_ratio, log_cdf_of
from .reward import kl_coefficient

Objective = Literal["l1", "exact", "jensen", "kl-rl"]


class Strings(NamedTuple):
    """All strings of a reference: ``ref_logp (S,)`` and ``rewards (S,)``, float64."""

    ref_logp: Tensor
    rewards: Tensor


def chain(start: Tensor, transition: Tensor, length: int) -> Tensor:
    """Log-probability of every string of a first-order chain, in lexicographic order: ``(V ** length,)``.

    Args:
        start: ``(V,)`` distribution of the first symbol.
        transition: ``(V, V)``, each row a distribution.
        length: Symbols of a string, ≥ 1.

    Example:
        >>> chain(torch.tensor([0.5, 0.5]), torch.tensor([[0.9, 0.1], [0.2, 0.8]]), 2).exp()
        tensor([0.4500, 0.0500, 0.1000, 0.4000], dtype=torch.float64)
    """
    logp = start.double().log()
    for _ in range(length - 1):
        logp = (logp.reshape(-1, len(start))[:, :, None] + transition.double().log()).flatten()
    return logp


def counted_chain(text: str, symbols: int, smoothing: float = 1.0) -> tuple[Tensor, Tensor]:
    """Start and transition probabilities of a text's commonest characters; the last symbol stands for all others."""
    rank = {c: i for i, c in enumerate(sorted(set(text), key=lambda c: (-text.count(c), c))[: symbols - 1])}
    codes = torch.tensor([rank.get(c, symbols - 1) for c in text])
    pairs = torch.bincount(codes[:-1] * symbols + codes[1:], minlength=symbols**2).double().reshape(symbols, -1) + smoothing
    singles = torch.bincount(codes, minlength=symbols).double() + smoothing
    return singles / singles.sum(), pairs / pairs.sum(1, keepdim=True)


def random_rewards(symbols: int, length: int, seed: int) -> Tensor:
    """``½ · Gaussian of the string + ½ · Σ Gaussian of its characters``: ``(symbols ** length,)``."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.randn(symbols**length, dtype=torch.float64, generator=generator)
    character = torch.randn(symbols, dtype=torch.float64, generator=generator)
    total = character
    for _ in range(length - 1):
        total = (total[:, None] + character).flatten()
    return 0.5 * own + 0.5 * total


def payoff(strings: Strings, objective: Objective, n: int, beta: float) -> tuple[Tensor, float]:
    """The reward of each string and the KL coefficient that an objective adds to it: maximise ``E[payoff] − β·KL``.

    The worst string has ``F = 0``: its ``log F`` is put at half the least mass, so that ``"l1"`` stays finite.
    """
    if objective == "kl-rl":
        return strings.rewards, beta
    log_below, log_tie = log_cdf_of(strings.ref_logp.exp(), strings.rewards)
    floored = log_below.clamp_min(strings.ref_logp.min().item() - math.log(2))
    weight = kl_coefficient(n, objective)
    if objective == "l1":
        return floored, weight
    if objective == "jensen":
        return (n - 1) / (2 * n) * (floored + strings.ref_logp), weight
    return bon_log_ratio(strings.ref_logp, log_below, n, log_tie_mass=torch.maximum(log_tie, strings.ref_logp)) / n, weight


def optimum(strings: Strings, objective: Objective, n: int = 2, beta: float = 1.0) -> Tensor:
    """Where an objective leads: ``log π ∝ log π_ref + payoff/β``, ``(S,)``."""
    reward, weight = payoff(strings, objective, n, beta)
    return (strings.ref_logp + reward / weight).log_softmax(0)


def optimise(
    strings: Strings, objective: Objective, n: int = 2, beta: float = 1.0, *, steps: int = 200, lr: float = 1.0
) -> tuple[Tensor, list[float]]:
    """Gradient ascent on a softmax policy that starts at the reference, with exact gradients.

    The step is the natural gradient, ``logits += lr · (A − E[A])`` with ``A = payoff/β − (log π − log π_ref)``: in plain
    gradient ascent strings of mass 10⁻⁶ would take 10⁶ steps. With lr < 1 the distance to the optimum shrinks by ``1 − lr``.

    Returns:
        Log-probabilities ``(S,)`` and the objective ``E[payoff]/β − KL`` before each step.
    """
    reward, weight = payoff(strings, objective, n, beta)
    logp = strings.ref_logp.log_softmax(0)
    values = []
    for _ in range(steps):
        advantage = reward / weight - (logp - strings.ref_logp)
        values.append((logp.exp() * advantage).sum().item())
        logp = (logp + lr * (advantage - values[-1])).log_softmax(0)
    return logp, values


def kl(logp: Tensor, other: Tensor) -> float:
    """``KL(p ‖ q)`` in nats from log-probabilities ``(S,)``; strings of no mass count nothing."""
    p = logp.exp()
    return torch.where(p > 0, p * (logp - other), 0.0).sum().item()


def win_rate(logp: Tensor, strings: Strings) -> float:
    """P(reward of a string of ``logp`` > that of one of the reference), ties half."""
    log_below, log_tie = log_cdf_of(strings.ref_logp.exp(), strings.rewards)
    return (logp.exp() * (log_below.exp() + 0.5 * log_tie.exp())).sum().item()


def bon_logp(strings: Strings, n: int) -> Tensor:
    """``log π_bon`` of every string; finite where the probability itself is too small for a float."""
    log_below, log_tie = log_cdf_of(strings.ref_logp.exp(), strings.rewards)
    return bon_log_prob(strings.ref_logp, log_below, n, log_tie_mass=torch.maximum(log_tie, strings.ref_logp))


def tilt_at_kl(strings: Strings, target: float) -> tuple[Tensor, float]:
    """The KL-regularised optimum of the raw reward whose KL from the reference is ``target``, and its β (by bisection)."""
    low, high = -12.0, 12.0  # log β: the KL falls as β grows
    for _ in range(200):
        middle = (low + high) / 2
        logp = optimum(strings, "kl-rl", beta=math.exp(middle))
        low, high = (middle, high) if kl(logp, strings.ref_logp) > target else (low, middle)
    return logp, math.exp(middle)


def best_tilt(strings: Strings, target: Tensor) -> tuple[Tensor, float]:
    """The raw-reward optimum nearest to a distribution: least ``KL(π ‖ target)`` over 200 values of β in [0.02, 50]."""
    betas = torch.logspace(math.log10(0.02), math.log10(50), 200).tolist()
    tilts = [optimum(strings, "kl-rl", beta=beta) for beta in betas]
    best = min(range(len(betas)), key=lambda i: kl(tilts[i], target))
    return tilts[best], betas[best]
