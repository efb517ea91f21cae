"""The bench: what a study is, and how one is run, kept and judged."""

from .claims import Claim, Finding, Outcome, Replicate, Verdict, above, at_least, at_most, below, between, steps_to
from .config import Config, UsageError
from .log import Log
from .study import MissingExtra, NotApplicable, Study, Tune, require

__all__ = [
    "Claim",
    "Config",
    "Finding",
    "Log",
    "MissingExtra",
    "NotApplicable",
    "Outcome",
    "Replicate",
    "Study",
    "Tune",
    "UsageError",
    "Verdict",
    "above",
    "at_least",
    "at_most",
    "below",
    "between",
    "require",
    "steps_to",
]
