"""Preference pairs: checked, sampled from a policy, or made by people; and what a policy thinks of them.

Rows without two different answers are left out and counted. Nothing here shows a text: people's pairs are made to offend.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from assay.data.preferences import load_preferences
from assay.models.small_lm import Checkpoint, completion_logps, pretrain, sample, small_llama, train_tokenizer

Score = Callable[[Sequence[str]], np.ndarray]


class Pair(NamedTuple):
    """A prompt, the answer labelled better, the other; ``flipped``: the label is wrong (hidden from methods)."""

    prompt: str
    chosen: str
    rejected: str
    flipped: bool = False

    def __repr__(self) -> str:
        return f"Pair({len(self.prompt)} + {len(self.chosen)} | {len(self.rejected)} characters, flipped={self.flipped})"


@dataclass(frozen=True)
class Pairs:
    """Usable pairs, and how many were not, by reason."""

    rows: tuple[Pair, ...] = field(repr=False)
    skipped: dict[str, int]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def flipped(self) -> np.ndarray:
        """``(n,)`` bool."""
        return np.array([row.flipped for row in self.rows], dtype=bool)

    def dataset(self) -> Any:
        """What TRL's trainers take: ``prompt``, ``chosen``, ``rejected``, and ``pair_id`` (its row here)."""
        from datasets import Dataset

        columns = {name: [getattr(row, name) for row in self.rows] for name in ("prompt", "chosen", "rejected")}
        return Dataset.from_dict({**columns, "pair_id": list(range(len(self)))})

    def flip(self, share: float, seed: int) -> "Pairs":
        """A copy in which exactly ``round(share · n)`` pairs, drawn by the seed, have their answers swapped."""
        if not 0 <= share <= 1:
            raise ValueError(f"share must be between 0 and 1, got {share}")
        swap = set(np.random.default_rng(seed).permutation(len(self))[: round(share * len(self))].tolist())
        rows = tuple(Pair(r.prompt, r.rejected, r.chosen, not r.flipped) if i in swap else r for i, r in enumerate(self.rows))
        return Pairs(rows, self.skipped)


def usable_pairs(rows: Sequence[Sequence[Any]]) -> Pairs:
    """Pairs of ``(prompt, chosen, rejected[, flipped])``; those with a missing, empty or identical answer are counted.

    Raises:
        ValueError: not one usable pair.

    Example:
        >>> usable_pairs([("It is", " good.", " bad."), ("It is", " so.", " so."), ("It is", "", " bad."), ("It", None, "is")])
        Pairs(skipped={'identical answers': 1, 'empty answer': 1, 'missing answer': 1})
    """
    kept: list[Pair] = []
    skipped: Counter[str] = Counter()
    for prompt, chosen, rejected, *flipped in rows:
        if not all(isinstance(text, str) for text in (prompt, chosen, rejected)):
            skipped["missing answer"] += 1
        elif not chosen.strip() or not rejected.strip():
            skipped["empty answer"] += 1
        elif chosen.strip() == rejected.strip():
            skipped["identical answers"] += 1
        else:
            kept.append(Pair(prompt, chosen, rejected, *map(bool, flipped)))
    if not kept:
        raise ValueError(f"no usable pair among {len(rows)}; skipped: {dict(skipped)}")
    return Pairs(tuple(kept), dict(skipped))


def sampled_pairs(
    model: Any, tokenizer: Any, prompts: Sequence[str], score: Score, *, seed: int, per_prompt: int | Sequence[int] = 1,
    flips: float = 0.0, bradley_terry: float | None = None, new_tokens: int = 20,
) -> Pairs:  # fmt: skip
    """Two completions of the model each, ordered by a score with noise.

    Args:
        score: Of whole texts, prompt and completion; equal scores are ordered by a coin (and count as not flipped).
        per_prompt: Pairs of a prompt, or of each (`uneven_counts`).
        flips: Share of pairs, each by its own coin, whose order is turned round.
        bradley_terry: Instead of sharp order, the better wins with probability ``σ(bradley_terry · difference)``.
    """
    counts = [per_prompt] * len(prompts) if isinstance(per_prompt, int) else list(per_prompt)
    if len(counts) != len(prompts) or min(counts) < 1:
        raise ValueError(f"per_prompt must give each of {len(prompts)} prompts at least 1, got {len(counts)} numbers")
    asked = [prompt for prompt, count in zip(prompts, counts, strict=True) for _ in range(count)]
    texts = sample(model, tokenizer, asked, per_prompt=2, max_new_tokens=new_tokens, seed=seed).texts
    drawn = list(zip(texts[::2], texts[1::2], strict=True))
    scores = score([prompt + text for prompt, pair in zip(asked, drawn, strict=True) for text in pair]).reshape(-1, 2)
    rng = np.random.default_rng(seed)
    margin = scores[:, 0] - scores[:, 1]
    truth = np.where(margin == 0, rng.random(len(margin)) < 0.5, margin > 0)  # the first is better
    wrong = rng.random(len(margin)) < flips
    if bradley_terry is not None:
        wrong ^= rng.random(len(margin)) > 1 / (1 + np.exp(-bradley_terry * np.abs(margin)))
    first = truth ^ wrong
    rows = [
        (prompt, pair[0] if won else pair[1], pair[1] if won else pair[0], bad)
        for prompt, pair, won, bad in zip(asked, drawn, first.tolist(), (wrong & (margin != 0)).tolist(), strict=True)
    ]
    return usable_pairs(rows)


def uneven_counts(prompts: int, *, many: int = 8, few: int = 1, share: float = 0.8, seed: int = 0) -> list[int]:
    """Pairs a prompt when a ``share`` of the prompts is well covered and the others are not."""
    counts = np.full(prompts, few)
    counts[np.random.default_rng(seed).permutation(prompts)[: round(share * prompts)]] = many
    return counts.tolist()


class PairLogps(NamedTuple):
    """Summed log-probabilities of both answers of each pair, and their tokens with the end token: ``(n,)``."""

    chosen: Tensor
    rejected: Tensor
    chosen_length: Tensor
    rejected_length: Tensor


@torch.no_grad()
def pair_logps(model: Any, tokenizer: Any, pairs: Pairs) -> PairLogps:
    """Both answers of every pair under a model."""
    prompts = [row.prompt for row in pairs.rows]
    chosen = completion_logps(model, tokenizer, prompts, [row.chosen for row in pairs.rows])
    rejected = completion_logps(model, tokenizer, prompts, [row.rejected for row in pairs.rows])
    return PairLogps(chosen.sums, rejected.sums, chosen.lengths, rejected.lengths)


def implicit_accuracy(policy: PairLogps, reference: PairLogps) -> float:
    """Share of pairs whose chosen answer has gained more than the rejected one since the reference; a tie counts half."""
    margin = (policy.chosen - reference.chosen) - (policy.rejected - reference.rejected)
    return ((margin > 0).double() + 0.5 * (margin == 0).double()).mean().item()


# ---- people's pairs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HarmlessCase:
    """The SFT policy of the dialogues, training pairs and held-out pairs. Nothing of it prints a text."""

    sft: Checkpoint
    train: Pairs
    test: Pairs
    heldout_loss: float
    """Nats a token of the SFT policy on the chosen answers of the held-out pairs."""


def harmless_case(
    source: str = "preferences", *, seed: int, steps: int = 300, heldout: int = 407, prompt_tokens: int = 32,
    reply_tokens: int = 32, limit: int | None = None, track: Any = iter,
) -> HarmlessCase:  # fmt: skip
    """Human pairs cut to the last tokens of the prompt and the first of each answer, and a policy trained on their text.

    Args:
        source: What `load_preferences` takes.
        seed: The split, and all that is random in training.
        heldout: Pairs kept apart.
        limit: Take only so many pairs (for a quick look).
    """
    data = load_preferences(source)
    order = np.random.default_rng(seed).permutation(len(data)).tolist()[:limit]
    if len(order) <= heldout:
        raise ValueError(f"{source} has {len(order)} usable pairs, heldout must be fewer, got {heldout}")
    chosen = [data.pairs[i] for i in order]
    for_training, apart = chosen[heldout:], chosen[:heldout]
    tokenizer = train_tokenizer(text for p in for_training for text in (p.prompt, p.chosen, p.rejected))

    def cut(text: str, part: slice) -> str:
        # a token may end within a letter of several bytes: what is left of that letter goes
        return tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"][part]).strip("\ufffd")

    def cut_pairs(pairs: Sequence[Any]) -> Pairs:
        first, last = slice(reply_tokens), slice(-prompt_tokens, None)
        return usable_pairs([(cut(p.prompt, last), cut(p.chosen, first), cut(p.rejected, first)) for p in pairs])

    train, test = cut_pairs(for_training), cut_pairs(apart)
    policy = small_llama(tokenizer, seed=seed)
    text = [p.prompt + answer for p in train.rows for answer in (p.chosen, p.rejected)]
    pretrain(policy, tokenizer, text, steps=steps, seed=seed, max_length=prompt_tokens + reply_tokens + 2, track=track)
    with torch.no_grad():
        logps = pair_logps(policy, tokenizer, test)
    loss = float(-logps.chosen.sum() / logps.chosen_length.sum())
    return HarmlessCase(Checkpoint.of(policy, tokenizer), train, test, loss)
