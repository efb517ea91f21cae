"""Pairs of answers of which people preferred one. No message of this module quotes a text: some sets are made to offend."""

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .hub import hub_rows, is_hub_id
from .places import DataUnavailable, find, looked_at

HOME = "https://huggingface.co/datasets/Anthropic/hh-rlhf"
PLACES = ("preferences/hh_harmless_base_test.jsonl.gz", "hh-rlhf/harmless-base/test.jsonl.gz")
_ANSWER = "\n\nAssistant:"


class PreferencePair(NamedTuple):
    """A prompt with the answer that was preferred and the one that was not."""

    prompt: str
    chosen: str
    rejected: str

    def __repr__(self) -> str:
        return f"PreferencePair({len(self.prompt)} + {len(self.chosen)} | {len(self.rejected)} characters)"


@dataclass(frozen=True)
class Preferences:
    """Pairs, and how many rows were left out, by reason."""

    pairs: tuple[PreferencePair, ...] = field(repr=False)
    source: str
    dropped: dict[str, int]

    def __len__(self) -> int:
        return len(self.pairs)


def load_preferences(name: str | Path = "preferences") -> Preferences:
    """Preference pairs. Rows without two different, non-empty answers to one prompt are left out and counted.

    Args:
        name: ``"preferences"``: the test split of HH-RLHF harmless-base, 2,307 pairs (its prompts are meant to provoke:
            do not print them); the path of your own ``.jsonl`` or ``.jsonl.gz``, whose rows have ``prompt``, ``chosen`` and
            ``rejected``, or ``chosen`` and ``rejected`` as whole dialogues; or a hub id with such columns.

    Raises:
        ValueError: not JSON lines of that form, or no usable pair among them.
        DataUnavailable: nothing of that name.
    """
    if str(name) == "preferences":
        path = find(*PLACES)
        if path is None:
            raise DataUnavailable("preferences", looked_at(*PLACES), HOME, "the file is not there")
        return pairs_of(parse_lines(path.read_bytes(), path.name), "preferences")
    path = Path(name).expanduser()
    if path.is_file():
        return pairs_of(parse_lines(path.read_bytes(), path.name), str(name))
    if is_hub_id(str(name)):
        return pairs_of(hub_rows(str(name), "train"), str(name))
    raise DataUnavailable(str(name), [path.absolute()], "a .jsonl file, 'preferences' or a hub id 'owner/name'")


def parse_lines(raw: bytes, where: str = "file") -> list[Mapping[str, Any]]:
    """The objects of JSON lines, gzipped or not.

    Raises:
        ValueError: broken compression, not UTF-8, or a line that is no JSON object; the message names the line only.
    """
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, ValueError, zlib.error) as wrong:
            raise ValueError(f"{where} is broken: {type(wrong).__name__}") from None
    rows: list[Mapping[str, Any]] = []
    for number, line in enumerate(raw.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise ValueError(f"{where}, line {number}: not JSON") from None
        if not isinstance(row, dict):
            raise ValueError(f"{where}, line {number}: a JSON object was expected")
        rows.append(row)
    return rows


def pairs_of(rows: Iterable[Mapping[str, Any]], source: str) -> Preferences:
    """Pairs of rows that have ``chosen`` and ``rejected``, and ``prompt`` unless those are whole dialogues.

    Raises:
        ValueError: not one usable pair.
    """
    pairs: list[PreferencePair] = []
    dropped: Counter[str] = Counter()
    for row in rows:
        pair, reason = _pair(row)
        if pair is None:
            dropped[reason] += 1
        else:
            pairs.append(pair)
    if not pairs:
        raise ValueError(f"{source} holds no usable preference pair; left out: {dict(dropped)}")
    return Preferences(tuple(pairs), source, dict(dropped))


def _pair(row: Mapping[str, Any]) -> tuple[PreferencePair | None, str]:
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if not isinstance(chosen, str) or not isinstance(rejected, str):
        return None, "missing answer"
    prompt = row.get("prompt")
    if prompt is None:
        prompt, _, chosen = chosen.rpartition(_ANSWER)
        other, _, rejected = rejected.rpartition(_ANSWER)
        if prompt != other:
            return None, "different prompts"
        prompt += _ANSWER
    if not isinstance(prompt, str):
        return None, "missing prompt"
    if not chosen.strip() or not rejected.strip():
        return None, "empty answer"
    if chosen.strip() == rejected.strip():
        return None, "identical answers"
    return PreferencePair(prompt, chosen, rejected), ""
