"""Text corpora by name, as one string."""

import hashlib
import os
import sysconfig
from pathlib import Path

from .hub import hub_rows, is_hub_id
from .places import DataUnavailable, find, looked_at

HUB_LIMIT = 50_000_000
_NOT_SOURCE = {
    *("site-packages", "dist-packages", "__pycache__", "lib-dynload", "test", "tests", "idle_test"),
    *("pydoc_data", "encodings"),  # long tables in the form of source
}


def load_text(name: str, *, limit: int | None = None) -> str:
    """A corpus as one string.

    Args:
        name: ``"stdlib"``: the source of the running Python's standard library without its tests, about ten million
            characters. The files are ordered by a hash of their names, so that a beginning of any length is a fair
            sample of the whole. It differs a little between Python versions. ``"pydoc"``: Python's language reference
            as `help` shows it, half a million characters of English. A path: a file in UTF-8, also below
            ``$ASSAY_DATA``. ``"owner/name"`` or ``"owner/name:config"``: a data set of the Hugging Face hub, the
            column ``text`` of its training split.
        limit: Largest number of characters, > 0. None takes all (from the hub: 50 million).

    Raises:
        ValueError: `limit` not positive; a file that is not UTF-8, or empty.
        DataUnavailable: nothing of that name.

    Example:
        >>> text = load_text("stdlib", limit=100_000)
        >>> len(text), "def " in text
        (100000, True)
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    if name == "stdlib":
        return _standard_library(limit)
    if name == "pydoc":
        from pydoc_data.topics import topics

        return "\n\n".join(topics[key] for key in sorted(topics))[:limit]
    path = Path(name).expanduser()
    found = path if path.is_file() else find(name) if name else None
    if found is not None and found.is_file():
        return _read(found, limit)
    if is_hub_id(name):
        return _from_hub(name, limit or HUB_LIMIT)
    raise DataUnavailable(
        name, [path.absolute(), *looked_at(name)], "a file in UTF-8, 'stdlib', 'pydoc' or a hub id 'owner/name'"
    )


def _standard_library(limit: int | None) -> str:
    home = Path(sysconfig.get_path("stdlib"))
    names = []
    for folder, inner, files in os.walk(home):
        here = Path(folder).relative_to(home)
        inner[:] = [name for name in inner if name not in _NOT_SOURCE and not name.startswith("config-")]
        # _sysconfigdata and config-* say how this very Python was built, and with which paths
        names += [here / name for name in files if name.endswith(".py") and not name.startswith("_sysconfigdata")]
    names.sort(key=lambda n: hashlib.sha256(n.as_posix().encode()).digest())
    pieces, size = [], 0
    for name in names:
        try:
            piece = (home / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # the one or two files that declare another encoding
        pieces.append(piece)
        size += len(piece) + 1
        if limit is not None and size >= limit:
            break
    return "\n".join(pieces)[:limit]


def _read(path: Path, limit: int | None) -> str:
    try:
        with open(path, encoding="utf-8") as stream:
            text = stream.read(-1 if limit is None else limit)
    except UnicodeDecodeError as wrong:
        raise ValueError(f"{path} is not UTF-8: {wrong}") from None
    if not text:
        raise ValueError(f"{path} is empty")
    return text


def _from_hub(name: str, limit: int, split: str = "train") -> str:
    pieces, size = [], 0
    for row in hub_rows(name, split, streaming=True):
        if not isinstance(row.get("text"), str):
            raise ValueError(f"data set {name!r} has no column 'text' of strings; it has {', '.join(row)}")
        pieces.append(row["text"])
        size += len(row["text"]) + 1
        if size > limit:
            break
    return "\n".join(pieces)[:limit]
