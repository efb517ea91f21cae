"""Trust Region alignment: DPO, IPO and KTO whose reference follows the policy."""

from .callback import TrustRegionCallback
from .dpo import TRDPOConfig, TRDPOTrainer
from .kto import TRKTOConfig, TRKTOTrainer
from .losses import mismatched_kl, tr_dpo_loss, tr_ipo_loss, tr_kto_loss
from .updater import ReferenceUpdater

__all__ = [
    "ReferenceUpdater",
    "TRDPOConfig",
    "TRDPOTrainer",
    "TRKTOConfig",
    "TRKTOTrainer",
    "TrustRegionCallback",
    "mismatched_kl",
    "tr_dpo_loss",
    "tr_ipo_loss",
    "tr_kto_loss",
]
