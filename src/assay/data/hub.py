"""Data sets of the Hugging Face hub, with its absence told plainly."""

import re
from typing import Any

from .places import DataUnavailable


def is_hub_id(name: str) -> bool:
    """Whether a name has the form ``owner/name`` or ``owner/name:config``."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", name) is not None and not name.startswith((".", "/"))


def hub_rows(name: str, split: str | None, *, streaming: bool = False) -> Any:
    """A split of a hub data set (or of a local folder in the hub's layout), as `datasets` gives it; None: a dict of all."""
    try:
        import datasets
    except ModuleNotFoundError as missing:
        raise ImportError(
            f"reading {name!r} from the hub needs datasets: pip install 'assay[hub]'", name=missing.name
        ) from missing
    repository, _, config = name.partition(":")
    try:
        # code from the hub is never run: datasets ≥ 4 knows no loading scripts
        return datasets.load_dataset(repository, config or None, split=split, streaming=streaming)
    except (OSError, datasets.exceptions.DatasetsError) as failure:
        home = f"https://huggingface.co/datasets/{repository}"
        raise DataUnavailable(name, [home], home, first_line(failure)) from failure


def first_line(failure: Exception) -> str:
    """What a library's many-line message begins with."""
    return f"{type(failure).__name__}: {(str(failure).strip().splitlines() or ['no reason given'])[0]}"
