"""The three preference losses, written for a reference that moves: pure functions of summed log-probabilities."""

import torch
from torch import Tensor
from torch.nn import functional as F


def tr_dpo_loss(
    pol_chosen: Tensor,
    pol_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float = 0.05,
    label_smoothing: float = 0.0,
) -> Tensor:
    """DPO's loss of each pair against the reference of the moment.

    "Learn Your Reference Model for Real Good Alignment", ICLR 2025, arXiv 2404.09656.

    ``Δ = (log π(y⁺|x) − log π_ref(y⁺|x)) − (log π(y⁻|x) − log π_ref(y⁻|x))`` and the loss is
    ``−(1−s) log σ(βΔ) − s log σ(−βΔ)``. No gradient flows into the reference.

    Args:
        pol_chosen: Summed log-probabilities of the better answers under the policy.
        pol_rejected: Of the worse ones.
        ref_chosen: Of the better ones under the reference.
        ref_rejected: Of the worse ones under the reference.
        beta: Above 0. How fast the loss saturates in Δ.
        label_smoothing: ``s`` in [0, 0.5], the share of labels taken to be wrong. Default 0.

    Shapes:
        All ``(B,)``; the result ``(B,)``.

    Raises:
        ValueError: beta or label_smoothing out of range, or shapes that differ.

    Example:
        >>> one = torch.tensor([1.0])
        >>> tr_dpo_loss(-one, -3 * one, -2 * one, -2 * one, beta=0.5).item()  # Δ = 2
        0.3132616877555847
    """
    _check_beta(beta)
    if not 0 <= label_smoothing <= 0.5:
        raise ValueError(f"label_smoothing must be in [0, 0.5], got {label_smoothing}")
    delta = beta * _margin(pol_chosen, pol_rejected, ref_chosen, ref_rejected)
    return -(1 - label_smoothing) * F.logsigmoid(delta) - label_smoothing * F.logsigmoid(-delta)


def tr_ipo_loss(
    pol_chosen: Tensor,
    pol_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float = 0.05,
    chosen_len: Tensor | None = None,
    rejected_len: Tensor | None = None,
) -> Tensor:
    """IPO's loss of each pair against the reference of the moment: ``(Δ − 1/(2β))²``.

    arXiv 2404.09656 (the moving reference), 2310.12036 (IPO, whose τ is β here).

    Args:
        pol_chosen: As for `tr_dpo_loss`, like the next three.
        pol_rejected: See there.
        ref_chosen: See there.
        ref_rejected: See there.
        beta: Above 0. The target margin is ``1/(2β)``.
        chosen_len: Tokens of the better answers. With both lengths each log-ratio is divided by its own, which is what
            TRL does; without, the sums are used, as in the paper's objective.
        rejected_len: Tokens of the worse answers.

    Shapes:
        All ``(B,)``; the result ``(B,)``.

    Raises:
        ValueError: beta out of range, shapes that differ, one length without the other, or a length below 1.

    Example:
        >>> one = torch.tensor([1.0])
        >>> tr_ipo_loss(-one, -3 * one, -2 * one, -2 * one, beta=0.5).item()  # Δ = 2, target 1
        1.0
    """
    _check_beta(beta)
    if (chosen_len is None) != (rejected_len is None):
        raise ValueError("chosen_len and rejected_len must be given together")
    if chosen_len is not None and rejected_len is not None:
        _check_shapes(pol_chosen=pol_chosen, chosen_len=chosen_len, rejected_len=rejected_len)
        if not ((chosen_len >= 1) & (rejected_len >= 1)).all():
            raise ValueError("chosen_len and rejected_len must be at least 1: an answer without a token has no loss")
        pol_chosen, ref_chosen = pol_chosen / chosen_len, ref_chosen / chosen_len
        pol_rejected, ref_rejected = pol_rejected / rejected_len, ref_rejected / rejected_len
    return (_margin(pol_chosen, pol_rejected, ref_chosen, ref_rejected) - 1 / (2 * beta)) ** 2


def tr_kto_loss(
    pol: Tensor,
    ref: Tensor,
    labels: Tensor,
    kl: Tensor | float,
    beta: float = 0.05,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """KTO's loss of each unpaired answer against the reference of the moment.

    arXiv 2404.09656 (the moving reference), 2402.01306 (KTO). With ``r = log π(y|x) − log π_ref(y|x)`` and the reference
    point ``z = max(0, kl)``, both from the same reference: ``λ_D (1 − σ(β(r − z)))`` for desirable answers and
    ``λ_U (1 − σ(β(z − r)))`` for the others. No gradient flows into the reference or into z.

    Args:
        pol: Summed log-probabilities under the policy.
        ref: Under the reference.
        labels: True (or 1) where the answer is desirable, False (or 0) elsewhere.
        kl: Mean log-ratio of the batch's mismatched pairs, see `mismatched_kl`; a number or ``()``.
        beta: Above 0.
        desirable_weight: ``λ_D`` ≥ 0, default 1.
        undesirable_weight: ``λ_U`` ≥ 0, default 1.

    Shapes:
        pol, ref and labels ``(B,)``; the result ``(B,)``.

    Raises:
        ValueError: beta or a weight out of range, labels other than 0 and 1, more than one kl, or shapes that differ.

    Example:
        >>> zero = torch.zeros(2)
        >>> tr_kto_loss(zero, zero, torch.tensor([True, False]), kl=0.0, undesirable_weight=3.0)
        tensor([0.5000, 1.5000])
    """
    _check_beta(beta)
    _check_shapes(pol=pol, ref=ref, labels=labels)
    if not all(0 <= weight < float("inf") for weight in (desirable_weight, undesirable_weight)):
        raise ValueError(
            "desirable_weight and undesirable_weight must be at least 0 and finite, "
            f"got {desirable_weight} and {undesirable_weight}"
        )
    if labels.dtype != torch.bool and not ((labels == 0) | (labels == 1)).all():
        raise ValueError("labels must be True or False, or 1 or 0; others, as -1, would all count as desirable")
    log_ratio = pol - ref.detach()
    z = torch.as_tensor(kl, dtype=log_ratio.dtype, device=log_ratio.device).detach().clamp(min=0)
    if z.numel() != 1:
        raise ValueError(f"kl must be one number for the whole batch, got {tuple(z.shape)}")
    desirable = desirable_weight * (1 - torch.sigmoid(beta * (log_ratio - z)))
    undesirable = undesirable_weight * (1 - torch.sigmoid(beta * (z - log_ratio)))
    return torch.where(labels.bool(), desirable, undesirable)


def mismatched_kl(pol: Tensor, ref: Tensor) -> Tensor:
    """KTO's estimate of the KL to the reference: the mean log-ratio of answers to other prompts, at least 0; a ``()``.

    Args:
        pol: Summed log-probabilities of each prompt's answer to another prompt, under the policy: ``(B,)``.
        ref: Under the reference: ``(B,)``.

    Raises:
        ValueError: fewer than two rows: with one there is no other prompt, and the estimate would be the reward itself.

    Example:
        >>> mismatched_kl(torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -2.0]))
        tensor(0.5000)
    """
    _check_shapes(pol=pol, ref=ref)
    if len(pol) < 2:
        raise ValueError(
            "a KTO batch must hold at least 2 answers: with one there is no mismatched pair to estimate the KL from"
        )
    return (pol - ref).detach().mean().clamp(min=0)


def _margin(pol_chosen: Tensor, pol_rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> Tensor:
    _check_shapes(pol_chosen=pol_chosen, pol_rejected=pol_rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    return (pol_chosen - ref_chosen.detach()) - (pol_rejected - ref_rejected.detach())


def _check_beta(beta: float) -> None:
    if not 0 < beta < float("inf"):
        raise ValueError(f"beta must be a positive number, got {beta}")


def _check_shapes(**tensors: Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise ValueError(f"one number a row is needed, (B,) each; got {shapes}")
