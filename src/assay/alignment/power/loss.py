"""What a pair costs under POWER: the weighted margin, and the loss made of it."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def power_margin(logp_chosen: Tensor, logp_rejected: Tensor, w_chosen: Tensor, w_rejected: Tensor, beta: float) -> Tensor:
    """How much better the policy's own robust reward finds the chosen answer.

    Rashidinejad and Tian, "Sail into the Headwind", ICLR 2025, arXiv 2412.09544.

    ``m = β · [w⁺ log π(y⁺|x) − w⁻ log π(y⁻|x) + w⁺ − w⁻]``: the reward that solves the inner problem of the weighted-entropy
    objective is ``r(x, y) = β w(y) (1 + log π(y|x)) + λ(x)``, and ``m`` is its difference between the two answers. The offset
    ``w⁺ − w⁻`` moves no weight of the policy by itself, but it is part of ``σ(m)`` and so of every gradient.

    Args:
        logp_chosen: Log-probability of the chosen answer, summed over its tokens.
        logp_rejected: The same of the rejected answer.
        w_chosen: Its weight, > 0 and independent of the policy; ``1 / tokens`` makes ``w · log π`` the mean log-probability.
        w_rejected: The same of the rejected answer.
        beta: > 0.

    Shapes:
        All ``(B,)``, and so the result; half precision is raised to float32 first.

    Raises:
        ValueError: ``beta`` is not positive and finite, or shapes differ.

    Example:
        >>> logps, w = torch.tensor([-20.0]), torch.tensor([0.1])
        >>> power_margin(logps, torch.tensor([-30.0]), w, torch.tensor([0.2]), beta=2.0)
        tensor([7.8000])
    """
    checked_beta(beta)
    same_shape(logp_chosen=logp_chosen, logp_rejected=logp_rejected, w_chosen=w_chosen, w_rejected=w_rejected)
    up, down, w_up, w_down = (at_least_float32(t) for t in (logp_chosen, logp_rejected, w_chosen, w_rejected))
    return beta * (w_up * up - w_down * down + w_up - w_down)


def power_loss(
    logp_chosen: Tensor,
    logp_rejected: Tensor,
    w_chosen: Tensor,
    w_rejected: Tensor,
    beta: float = 2.0,
    eta: float = 0.1,
    labels: Tensor | None = None,
    *,
    logp_baseline: Tensor | None = None,
    w_baseline: Tensor | None = None,
    gate_sft: bool = False,
) -> Tensor:
    """POWER's loss of each pair; with labels, POWER-DL's. Take its mean.

    Rashidinejad and Tian, "Sail into the Headwind", ICLR 2025, arXiv 2412.09544.

    ``L = −[ℓ log σ(m) + (1 − ℓ) log σ(−m)] − η β w(y') log π(y'|x)`` with ``m`` of `power_margin`, ``ℓ = 1`` without labels,
    and ``y'`` an answer of the baseline policy: the chosen answer unless another is given. Its slope in the margin is
    ``σ(m) − ℓ``, so a label that has come to equal ``σ(m)`` makes the preference term silent; the second term goes on.

    Args:
        logp_chosen, logp_rejected, w_chosen, w_rejected, beta: As `power_margin` takes them.
        eta: Weight of the likelihood term, ≥ 0, relative to the preference term.
        labels: Soft labels in [0, 1] that carry no gradient (`DynamicLabels`).
        logp_baseline, w_baseline: Log-probability and weight of a baseline answer, both or neither.
        gate_sft: Multiply the likelihood term by the label as well (an extension).

    Shapes:
        All ``(B,)``, and so the result, float32 or wider.

    Raises:
        ValueError: ``beta`` ≤ 0, ``eta`` < 0, shapes differ, a baseline without its weight.

    Example:
        >>> logps, w = torch.tensor([-20.0]), torch.tensor([0.1])
        >>> power_loss(logps, torch.tensor([-30.0]), w, torch.tensor([0.2]), beta=2.0, eta=0.1)
        tensor([0.4004])
    """
    checked_eta(eta)
    margin = power_margin(logp_chosen, logp_rejected, w_chosen, w_rejected, beta)
    if (logp_baseline is None) != (w_baseline is None):
        raise ValueError("logp_baseline and w_baseline belong together: give both or neither")
    logp, w = (logp_chosen, w_chosen) if logp_baseline is None or w_baseline is None else (logp_baseline, w_baseline)
    same_shape(logp_chosen=logp_chosen, logp_baseline=logp, w_baseline=w)
    likelihood = at_least_float32(w) * at_least_float32(logp)
    if labels is None:
        return -F.logsigmoid(margin) - eta * beta * likelihood
    same_shape(logp_chosen=logp_chosen, labels=labels)
    label = labels.detach().to(margin)
    preference = -(label * F.logsigmoid(margin) + (1 - label) * F.logsigmoid(-margin))
    return preference - eta * beta * likelihood * (label if gate_sft else 1.0)


def checked_beta(beta: float) -> float:
    if not (math.isfinite(beta) and beta > 0):
        raise ValueError(f"beta must be positive and finite, got {beta}")
    return beta


def checked_eta(eta: float) -> float:
    if not (math.isfinite(eta) and eta >= 0):
        raise ValueError(f"eta must be at least 0 and finite, got {eta}")
    return eta


def checked_gamma(gamma: float) -> float:
    if not 0 <= gamma < 1:
        raise ValueError(f"gamma must be in [0, 1), got {gamma}")
    return gamma


def at_least_float32(t: Tensor) -> Tensor:
    """log σ and ``ℓ − σ(m)`` die of bfloat16's rounding at large β."""
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t


def same_shape(**tensors: Tensor) -> None:
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"all must have one shape, got {', '.join(f'{name} {shape}' for name, shape in shapes.items())}")
