"""Prompts on which a generic continuation competes with the answer, and how a language model decides between the two."""

import csv
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Item(NamedTuple):
    """``prompt``, the ``answer`` and the ``distractor`` that would follow it; their leading blanks count."""

    prompt: str
    answer: str
    distractor: str


class Encoded(NamedTuple):
    """Prompts of one length: ``places (n,)`` in the list, ``ids (n, tokens)``, ``answer (n,)``, ``distractor (n,)``."""

    places: Tensor
    ids: Tensor
    answer: Tensor
    distractor: Tensor


@dataclass(frozen=True)
class Scores:
    """What a model makes of each prompt.

    Attributes:
        p_answer: ``(n,)``, probability of the answer's first token.
        p_distractor: ``(n,)``.
        correct: ``(n,)``, bool: the answer is the most likely of all tokens.
    """

    p_answer: Tensor
    p_distractor: Tensor
    correct: Tensor

    def summary(self, rows: Tensor | None = None) -> dict[str, float]:
        """Means over all prompts, or over those of `rows`: ``p_answer, p_distractor, win_rate, accuracy``."""
        answer, distractor, correct = (
            x if rows is None else x[rows] for x in (self.p_answer, self.p_distractor, self.correct)
        )  # fmt: skip
        return {
            "p_answer": float(answer.mean()),
            "p_distractor": float(distractor.mean()),
            "win_rate": float((answer > distractor).float().mean()),
            "accuracy": float(correct.float().mean()),
        }


class AssociationProbe:
    """Does a language model prefer a generic continuation to the answer?

    Chen, Bruna, Bietti: Distributional Associations vs In-Context Reasoning, ICLR 2025 (arXiv 2406.03068).

    Every prompt is read once; the next token's probabilities of answer and distractor are compared. Prompts of one length
    go through the model together, so that no padding is needed.

    Args:
        prompts: Triples ``(prompt, answer, distractor)``. Write the blank in front of a word where it belongs, usually at
            the beginning of the answer: ``("Madrid is located in", " Spain", " the")``. Of an answer or distractor of
            several tokens the first is scored, with a warning.

    Raises:
        ValueError: no prompts, or something that is not three strings with text in each.

    Example:
        >>> probe = AssociationProbe([("Madrid is located in", " Spain", " the")])
        >>> probe.items[0].answer
        ' Spain'
    """

    def __init__(self, prompts: Iterable[tuple[str, str, str]]):
        self.items: list[Item] = []
        for i, prompt in enumerate(prompts):
            if len(prompt) != 3 or not all(isinstance(part, str) and part for part in prompt):
                raise ValueError(f"prompts[{i}] must be (prompt, answer, distractor), three non-empty strings, got {prompt!r}")
            self.items.append(Item(*prompt))
        if not self.items:
            raise ValueError("prompts must hold at least one (prompt, answer, distractor)")

    @classmethod
    def from_csv(cls, path: str | Path) -> "AssociationProbe":
        """Prompts from a CSV file in UTF-8 with the columns ``prompt, answer, distractor``.

        Raises:
            ValueError: a file that is not such a table.
        """
        try:
            with open(path, newline="", encoding="utf-8-sig") as stream:
                rows = list(csv.DictReader(stream))
        except (UnicodeDecodeError, csv.Error) as wrong:
            raise ValueError(f"{path} is no CSV file in UTF-8: {wrong}") from None
        missing = set(Item._fields) - set(rows[0] if rows else ())
        if missing:
            raise ValueError(f"{path} must have a header and rows with the columns {', '.join(Item._fields)}")
        return cls((row["prompt"] or "", row["answer"] or "", row["distractor"] or "") for row in rows)

    def encode(self, tok: Any) -> list[Encoded]:
        """The prompts as token ids, those of one length together.

        Raises:
            ValueError: answer and distractor begin with the same token; a tokenizer that merges the end of the prompt with
                the beginning of the answer; a prompt without a token.
        """
        by_length: dict[int, list[tuple[int, list[int], int, int]]] = {}
        several: list[str] = []
        for i, item in enumerate(self.items):
            ids = list(tok(item.prompt)["input_ids"])
            if not ids:
                raise ValueError(f"prompts[{i}] has no token: {item.prompt!r}")
            answer, distractor = (_continuation(tok, item.prompt, ids, text, several) for text in item[1:])
            if answer == distractor:
                raise ValueError(f"prompts[{i}]: {item.answer!r} and {item.distractor!r} begin with the same token")
            by_length.setdefault(len(ids), []).append((i, ids, answer, distractor))
        if several:
            shown = ", ".join(repr(text) for text in sorted(set(several))[:5])
            warnings.warn(f"more than one token, the first is scored: {shown}", stacklevel=3)
        columns = (zip(*group, strict=True) for _, group in sorted(by_length.items()))
        return [Encoded(*(torch.tensor(list(column)) for column in group)) for group in columns]

    def scores(self, model: Any, tok: Any) -> Scores:
        """Probabilities of each prompt, in the order given."""
        groups = self.encode(tok)
        return collect(((group, last_logits(model, group.ids)) for group in groups), len(self.items))

    def evaluate(self, model: Any, tok: Any) -> dict[str, float]:
        """``p_answer, p_distractor, win_rate`` (answer above distractor) and ``accuracy`` (answer above every token)."""
        return self.scores(model, tok).summary()


def collect(results: Iterable[tuple[Encoded, Tensor]], n: int) -> Scores:
    """Scores from each group's logits ``(prompts, vocabulary)``.

    Raises:
        FloatingPointError: logits that are not finite.
    """
    answer, distractor, correct = torch.zeros(n), torch.zeros(n), torch.zeros(n, dtype=torch.bool)
    for group, logits in results:
        logits = logits.float().cpu()
        if not logits.isfinite().all():
            raise FloatingPointError("the model's logits are not finite")
        p = logits.softmax(-1)
        answer[group.places] = p.gather(1, group.answer[:, None])[:, 0]
        distractor[group.places] = p.gather(1, group.distractor[:, None])[:, 0]
        correct[group.places] = logits.argmax(-1) == group.answer
    return Scores(answer, distractor, correct)


@torch.no_grad()
def last_logits(model: Any, ids: Tensor) -> Tensor:
    """``(n, vocabulary)``: the next token's logits after each row of ids ``(n, tokens)``, in evaluation mode."""
    with evaluation(model):
        device = next(model.parameters()).device
        return model(input_ids=ids.to(device), use_cache=False).logits[:, -1]


@contextmanager
def evaluation(model: Any) -> Iterator[None]:
    """A model in evaluation mode; afterwards every module is in its own again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _continuation(tok: Any, prompt: str, ids: list[int], text: str, several: list[str]) -> int:
    """The token that `text` begins with where it follows the prompt."""
    joint = list(tok(prompt + text)["input_ids"])
    if joint[: len(ids)] != ids or len(joint) <= len(ids):
        raise ValueError(f"{text!r} does not begin a token of its own after {prompt!r}: move the blank between them")
    if len(joint) > len(ids) + 1:
        several.append(text)
    return joint[len(ids)]
