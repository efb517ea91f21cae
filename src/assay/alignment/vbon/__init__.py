"""vBoN: the distribution of the best of N samples, exactly, and a trainer that brings one sample to it."""

from .bon import bon_distribution, bon_log_prob, bon_log_ratio
from .cdf import RewardCDF
from .reward import VBoNReward
from .sampling import best_of_n
from .trainer import VBoNConfig, VBoNTrainer

__all__ = [
    "RewardCDF",
    "VBoNConfig",
    "VBoNReward",
    "VBoNTrainer",
    "best_of_n",
    "bon_distribution",
    "bon_log_prob",
    "bon_log_ratio",
]
