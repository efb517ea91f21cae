"""POWER and POWER-DL: weighted-entropy robust preference learning, and labels that follow the policy."""

from .bandit import BanditFit, POWERBandit
from .config import POWERConfig
from .labels import DynamicLabels, update_labels
from .loss import power_loss, power_margin
from .trainer import POWERTrainer

__all__ = [
    "BanditFit",
    "DynamicLabels",
    "POWERBandit",
    "POWERConfig",
    "POWERTrainer",
    "power_loss",
    "power_margin",
    "update_labels",
]
