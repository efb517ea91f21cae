"""The methods that the study compares: a loss, and what its reference does."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from .losses import tr_dpo_loss, tr_ipo_loss


class Method(NamedTuple):
    """What an arm returns.

    ``loss(pol_chosen, pol_rejected, ref_chosen, ref_rejected, beta, chosen_len, rejected_len)`` gives a number a pair, from
    summed log-probabilities ``(B,)``. ``reference``: ``"fixed"``, ``"soft"``, ``"hard"``; on text also ``"trl"`` (TRL's own
    ``sync_ref_model``) and ``"bema"`` (TRL's experimental one). ``unpaired``: KTO, whose loss is its trainer's.
    """

    loss: Callable[..., Tensor]
    reference: str = "fixed"
    unpaired: bool = False


def dpo_loss(pol_chosen, pol_rejected, ref_chosen, ref_rejected, beta, chosen_len, rejected_len):
    return tr_dpo_loss(pol_chosen, pol_rejected, ref_chosen, ref_rejected, beta)


def ipo_loss(pol_chosen, pol_rejected, ref_chosen, ref_rejected, beta, chosen_len, rejected_len):
    """Divided by lengths, as in TRL."""
    return tr_ipo_loss(pol_chosen, pol_rejected, ref_chosen, ref_rejected, beta, chosen_len, rejected_len)


def simpo_loss(pol_chosen, pol_rejected, ref_chosen, ref_rejected, beta, chosen_len, rejected_len):
    """No reference: ``−log σ(b (mean log π(y⁺) − mean log π(y⁻)) − b/2)`` with SimPO's own scale, ``b = 20 β``.

    SimPO's b (2 to 10) multiplies averages over tokens; the factor puts a grid made for sums into that range.
    """
    scale = 20 * beta
    return -F.logsigmoid(scale * (pol_chosen / chosen_len - pol_rejected / rejected_len) - scale / 2)


def fixed_dpo(config):
    return Method(dpo_loss)


def fixed_ipo(config):
    return Method(ipo_loss)


def simpo(config):
    return Method(simpo_loss)


def soft_dpo(config):
    return Method(dpo_loss, "soft")


def hard_dpo(config):
    return Method(dpo_loss, "hard")


def soft_ipo(config):
    return Method(ipo_loss, "soft")


def trl_sync(config):
    """TRL's own ``sync_ref_model``, run beside ours for three updates."""
    return Method(dpo_loss, "trl")


def bema(config):
    """TRL's experimental reference, a bias-corrected moving average. Text only: ``--arm bema=…arms:bema``."""
    return Method(dpo_loss, "bema")


def fixed_kto(config):
    """Text only: ``--arm kto=…arms:fixed_kto``."""
    return Method(dpo_loss, "fixed", unpaired=True)


def soft_kto(config):
    """Text only: ``--arm tr-kto=…arms:soft_kto``."""
    return Method(dpo_loss, "soft", unpaired=True)
