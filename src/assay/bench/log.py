"""What a trial is given to report through: its seed, its device, progress, curves, figures and files."""

import io
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

Progress = Callable[[str, float, str], None]  # (what, share done in [0, 1] or NaN, latest metric)


class Log:
    """The notebook of one ``prepare`` or one trial.

    Attributes:
        seed: The replicate's seed; Python, NumPy and torch are already seeded with it.
        replicate: The replicate's name.
        arm: The arm's name; empty in ``prepare``.
        scale: ``smoke``, ``desk`` or ``paper``.
        device: The ``torch.device`` to use.
    """

    def __init__(
        self,
        *,
        seed: int,
        replicate: str,
        scale: str,
        device: str,
        arm: str = "",
        progress: Progress | None = None,
    ):
        self.seed = seed
        self.replicate = replicate
        self.arm = arm
        self.scale = scale
        self._device = device
        self._progress = progress
        self._latest = ""
        self._last_report = 0.0
        self.curves: dict[str, tuple[list[float], list[float]]] = {}
        self.files: dict[str, bytes] = {}
        self.notes: list[str] = []

    @property
    def device(self) -> Any:
        import torch

        return torch.device(self._device)

    def track(self, items: Iterable[T], label: str = "") -> Iterator[T]:
        """Yields the items and shows how far it has come."""
        total = len(items) if isinstance(items, Sized) else math.nan
        for i, item in enumerate(items):
            self._report(label, i / total if total else math.nan)
            yield item
        self._report(label, 1.0)

    def metric(self, name: str, value: float, step: float | None = None) -> None:
        """Adds a point to a curve.

        Raises:
            FloatingPointError: the value is not finite: the trial has diverged and ends here.
        """
        value = float(value)
        if not math.isfinite(value):
            raise FloatingPointError(f"{name} became {value} at step {step}")
        steps, values = self.curves.setdefault(name, ([], []))
        steps.append(float(len(steps) if step is None else step))
        values.append(value)
        self._latest = f"{name} {value:.4g}"

    def figure(self, name: str, figure: Any) -> None:
        """Keeps a Matplotlib figure as SVG."""
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
        self.files[f"{name}.svg"] = buffer.getvalue()

    def artifact(self, name: str, content: bytes | str | Path) -> None:
        """Keeps a file with the record. ``content``: bytes, text, or the path of a file to copy."""
        if Path(name).name != name:
            raise ValueError(f"name must be a plain file name, got {name!r}")
        if isinstance(content, Path):
            content = content.read_bytes()
        self.files[name] = content.encode() if isinstance(content, str) else content

    def note(self, text: str) -> None:
        """A sentence for the record: something a reader of the numbers should know."""
        self.notes.append(text)

    def _report(self, label: str, share: float) -> None:
        now = time.monotonic()
        if self._progress and (now - self._last_report > 0.1 or share == 1.0):
            self._last_report = now
            self._progress(label, share, self._latest)


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and torch (every device)."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the global generator is what libraries fall back on
    torch.manual_seed(seed)
