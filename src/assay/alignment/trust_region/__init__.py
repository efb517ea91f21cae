"""Trust Region alignment: DPO, IPO and KTO whose reference follows the policy. TRL is imported when a trainer is used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .losses import mismatched_kl, tr_dpo_loss, tr_ipo_loss, tr_kto_loss
from .updater import ReferenceUpdater

if TYPE_CHECKING:
    from .callback import TrustRegionCallback
    from .dpo import TRDPOConfig, TRDPOTrainer
    from .kto import TRKTOConfig, TRKTOTrainer

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

_LATER = {
    "TrustRegionCallback": "callback", "TRDPOConfig": "dpo", "TRDPOTrainer": "dpo", "TRKTOConfig": "kto", "TRKTOTrainer": "kto",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f".{_LATER[name]}", __name__), name)
    except ModuleNotFoundError as missing:
        raise ImportError(
            f"{name} needs the package {missing.name!r}: pip install 'assay[alignment]'", name=missing.name
        ) from missing
