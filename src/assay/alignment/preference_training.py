"""How the alignment studies run TRL's trainers: on the processor at hand, in float32, without a word."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from assay.models.language import quiet


def trainer_settings(folder: str | Path, *, steps: int, batch: int, lr: float, seed: int, **more: Any) -> dict[str, Any]:
    """Keyword arguments for any TRL config: float32, nothing saved, reported or printed, plain backpropagation."""
    return {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": batch,
        "learning_rate": lr,
        "seed": seed,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "steps",
        "logging_steps": 10,
        "disable_tqdm": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "use_cpu": not torch.cuda.is_available(),
        **more,
    }


@contextmanager
def silence() -> Iterator[None]:
    """Without progress bars and log lines of transformers, TRL and datasets, which would tear a live table."""
    import datasets
    from transformers.trainer_callback import PrinterCallback

    def mute(self: Any, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None: ...

    printed = PrinterCallback.on_log
    PrinterCallback.on_log = mute  # type: ignore[method-assign]
    bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    loggers = {name: logging.getLogger(name).level for name in ("transformers", "trl", "accelerate", "datasets")}
    for name in loggers:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with quiet():
            yield
    finally:
        PrinterCallback.on_log = printed  # type: ignore[method-assign]
        for name, level in loggers.items():
            logging.getLogger(name).setLevel(level)
        if bars:
            datasets.enable_progress_bars()
