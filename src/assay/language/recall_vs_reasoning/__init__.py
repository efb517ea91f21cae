"""Distributional associations against in-context reasoning: which weights prefer the frequent token, and how to cut it out."""

from .competing import city_prompts, name_prompts
from .margins import Margin, gradient_margins
from .prompts import AssociationProbe, Item, Scores
from .scan import Cut, best_cut, laser_scan, scan_cuts
from .spectrum import Spectrum
from .task import NoisyRecall, RecallBatch
from .training import evaluate_recall, recall_loss, recall_metrics, recall_probes, train_recall
from .transformer import RecallTransformer
from .truncate import Truncation, project_out, truncate_, truncated

__all__ = [
    "AssociationProbe",
    "Cut",
    "Item",
    "Margin",
    "NoisyRecall",
    "RecallBatch",
    "RecallTransformer",
    "Scores",
    "Spectrum",
    "Truncation",
    "best_cut",
    "city_prompts",
    "evaluate_recall",
    "gradient_margins",
    "laser_scan",
    "name_prompts",
    "project_out",
    "recall_loss",
    "recall_metrics",
    "recall_probes",
    "scan_cuts",
    "train_recall",
    "truncate_",
    "truncated",
]
