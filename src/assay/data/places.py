"""Where files are looked for, and what is said when they are not there."""

import os
from collections.abc import Sequence
from pathlib import Path


class DataUnavailable(FileNotFoundError):
    """A named data set or model is neither installed, nor on disk, nor could it be downloaded.

    The message names the set, every place that was looked at, its usual home, and the setting that points elsewhere.
    """

    def __init__(self, name: str, looked: Sequence[str | Path], home: str, why: str = "", setting: str = "ASSAY_DATA"):
        super().__init__(name, tuple(looked), home, why, setting)  # the arguments, so that it pickles
        self.name, self.looked, self.home, self.why, self.setting = name, tuple(looked), home, why, setting

    def __str__(self) -> str:
        places = "".join(f"\n  looked at  {place}" for place in self.looked)
        value = os.environ.get(self.setting)
        return (
            f"{self.name!r} is not available{f': {self.why}' if self.why else ''}{places}"
            f"\n  usual home {self.home}"
            f"\n  to use your own copy, set {self.setting} to the folder that holds it "
            f"({f'now {value}' if value else 'not set'})"
        )


def cache_home() -> Path:
    """The folder that downloads go to: ``$XDG_CACHE_HOME/assay``, usually ``~/.cache/assay``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "assay"


def roots() -> list[Path]:
    """The folders that are searched, in order: ``$ASSAY_DATA`` if it is set, then the cache."""
    own = os.environ.get("ASSAY_DATA")
    return [Path(own).expanduser(), cache_home()] if own else [cache_home()]


def find(*relative: str) -> Path | None:
    """The first of the relative paths that exists; an earlier path wins over an earlier root."""
    return next((root / path for path in relative for root in roots() if (root / path).exists()), None)


def looked_at(*relative: str) -> list[Path]:
    """Every place that `find` tries, for a message."""
    return [root / path for path in relative for root in roots()]


def offline() -> bool:
    """True when ``HF_HUB_OFFLINE`` is set: then nothing is downloaded from anywhere."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
