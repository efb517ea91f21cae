"""The reference run: a desk result kept in the method's folder and shown on its page."""

import json
from pathlib import Path
from typing import Any


def save(folder: Path, result: dict[str, Any], figures: dict[str, bytes]) -> None:
    """Writes ``result.json`` and the study's figures beside the method and fills its page's tables from them."""
    from .report import fill_readme

    fill_readme(folder / "README.md", result)  # refuses a page without markers before anything is written
    (folder / "result.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for old in folder.glob("result*.svg"):
        old.unlink()
    own = [name for name in figures if not _of_a_trial(name, result)]
    for name in own:
        target = "result.svg" if name == f"{result['study']}.svg" else f"result-{name}"
        (folder / target).write_bytes(figures[name])
    fill_readme(folder / "README.md", result)


def _of_a_trial(name: str, result: dict[str, Any]) -> bool:
    from .result import file_stem

    stems = (f"{file_stem(arm)}-{file_stem(replicate)}-" for arm in result["arms"] for replicate in result["replicates"])
    return any(name.startswith(stem) for stem in stems)
