"""Review sentences with a label: positive or not."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .places import DataUnavailable, find, looked_at

HOME = "https://archive.ics.uci.edu/dataset/331/sentiment+labelled+sentences"
FILES = ("imdb_labelled.txt", "amazon_cells_labelled.txt", "yelp_labelled.txt")
FOLDERS = ("reviews", "sentiment labelled sentences")


@dataclass(frozen=True)
class Reviews:
    """Sentences and their labels: ``labels (n,)`` int64, 1 for positive. ``dropped`` counts what was left out, by reason."""

    sentences: tuple[str, ...] = field(repr=False)
    labels: np.ndarray = field(repr=False)
    source: str
    dropped: dict[str, int]

    def __len__(self) -> int:
        return len(self.sentences)


def load_reviews(name: str | Path = "reviews") -> Reviews:
    """Labelled sentences, every one once.

    Args:
        name: ``"reviews"``: the Sentiment Labelled Sentences of UCI, 3,000 of them from films, phones and restaurants; or
            the path of your own file with a line ``sentence<TAB>0 or 1`` each.

    Raises:
        ValueError: a line that is not of that form (its number is named), a file without both labels.
        DataUnavailable: no such file.
    """
    if str(name) == "reviews":
        paths = [find(*(f"{folder}/{file}" for folder in FOLDERS)) for file in FILES]
    else:
        paths = [Path(name).expanduser()]
    present = [path for path in paths if path is not None and path.is_file()]
    if len(present) < len(paths):
        places = looked_at(*(f"{FOLDERS[0]}/{file}" for file in FILES)) if str(name) == "reviews" else paths
        raise DataUnavailable(str(name), [str(place) for place in places], HOME, "the files are not there")
    sentences: list[str] = []
    labels: list[int] = []
    for path in present:
        more, theirs = parse_reviews(path.read_bytes(), path.name)
        sentences += more
        labels += theirs
    return _once(sentences, labels, str(name))


def parse_reviews(raw: bytes, where: str = "file") -> tuple[list[str], list[int]]:
    """Sentences and labels of one file.

    Raises:
        ValueError: not UTF-8, or a line that is not ``sentence<TAB>0 or 1``; the message names the line, never its text.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as wrong:
        raise ValueError(f"{where} is not UTF-8: {wrong}") from None
    sentences, labels = [], []
    # only "\n" ends a line: the films' file holds U+0085, which str.splitlines would break at
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        sentence, tab, label = line.rpartition("\t")
        if not tab or label.strip() not in ("0", "1"):
            raise ValueError(f"{where}, line {number}: not 'sentence<TAB>0 or 1'")
        sentences.append(" ".join(sentence.split()))
        labels.append(int(label))
    return sentences, labels


def _once(sentences: Sequence[str], labels: Sequence[int], source: str) -> Reviews:
    """Without empty sentences, and with each only the first time: a twin in another split would be a leak."""
    first: dict[str, int] = {}
    empty = 0
    for sentence, label in zip(sentences, labels, strict=True):
        if not sentence:
            empty += 1
        else:
            first.setdefault(sentence, label)
    if len(set(first.values())) < 2:
        raise ValueError(f"{source} holds {len(first)} sentences and not both labels 0 and 1")
    dropped = {"empty": empty, "repeated": len(sentences) - empty - len(first)}
    return Reviews(tuple(first), np.array(list(first.values()), dtype=np.int64), source, dropped)
