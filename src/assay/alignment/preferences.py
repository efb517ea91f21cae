"""What every alignment study needs: a small policy, a proxy to optimise, a gold scorer to judge by, and metrics.

A language model of review sentences; prompts are the first words of sentences it has not seen. The proxy, which a method
may optimise or label by, is a TF-IDF classifier; the gold scorer is a classifier on sentence embeddings that shares neither
labels nor features with it; VADER is a second one. See also ``preference_pairs`` and ``preference_training``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.data.reviews import load_reviews
from assay.models.sentences import embed_sentences
from assay.models.small_lm import (
    Checkpoint,
    Samples,
    completion_logps,
    pretrain,
    sample,
    small_llama,
    token_kl,
    train_tokenizer,
)

COMPARE = ("proxy_win", "gold_win", "kl", "distinct2", "length")
"""The metrics that all alignment studies have, by the names `evaluate` gives them."""

Score = Callable[[Sequence[str]], np.ndarray]


# ---- scorers -----------------------------------------------------------------------------------------------------------


class Proxy:
    """TF-IDF of words and pairs of words, and logistic regression: its logit, float64 ``(n,)``, more is more positive."""

    def __init__(self, sentences: Sequence[str], labels: np.ndarray):
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline

        words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"(?u)\b\w+(?:'\w+)?\b")
        self.classifier = make_pipeline(words, LogisticRegression(C=10.0, max_iter=1000)).fit(list(sentences), labels)

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        return self.classifier.decision_function(list(texts)).astype(np.float64)


class Gold:
    """Embeddings of all-MiniLM-L6-v2 and logistic regression: its logit. The encoder is loaded when first used."""

    def __init__(self, sentences: Sequence[str], labels: np.ndarray):
        from sklearn.linear_model import LogisticRegression

        self.classifier = LogisticRegression(C=10.0, max_iter=1000).fit(embed_sentences(sentences), labels)

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        return self.classifier.decision_function(embed_sentences(texts)).astype(np.float64)


def vader(texts: Sequence[str]) -> np.ndarray:
    """VADER's compound score, a lexicon's and rules' view of sentiment in [−1, 1]."""
    analyser = _vader()
    return np.array([analyser.polarity_scores(text)["compound"] for text in texts], dtype=np.float64)


def _vader() -> Any:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ModuleNotFoundError as missing:
        raise ImportError("VADER needs the package vaderSentiment: pip install 'assay[alignment]'", name=missing.name) from None
    return SentimentIntensityAnalyzer()


# ---- cases -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """Completions of the SFT policy for every prompt, and their scores: what a policy's win rate is measured against.

    Shapes: proxy ``(prompts, per prompt)``; gold and vader ``(prompts, fewer)``, of the first completions.
    """

    texts: tuple[tuple[str, ...], ...] = field(repr=False)
    proxy: np.ndarray = field(repr=False)
    gold: np.ndarray | None = field(repr=False)
    vader: np.ndarray | None = field(repr=False)


@dataclass(frozen=True)
class ReviewCase:
    """The SFT policy, prompts to answer, the proxy, the gold scorer, and what the SFT policy answers."""

    sft: Checkpoint
    prompts: tuple[str, ...] = field(repr=False)
    proxy: Score
    gold: Score | None
    reference: Reference
    heldout_loss: float
    """Nats a token of the SFT policy on sentences it was not trained on."""
    proxy_accuracy: float
    gold_accuracy: float
    """Of both scorers, on labelled sentences of which neither has seen the label."""
    dropped: dict[str, int]


def review_case(
    source: str = "reviews", *, seed: int, steps: int = 300, prompts: int = 100, prompt_words: int = 3, labels: int = 700,
    table: int = 300, gold_table: int = 5, new_tokens: int = 20, track: Any = iter,
) -> ReviewCase:  # fmt: skip
    """Splits the sentences, trains the tokenizer, the policy and the scorers, and draws the reference completions.

    Args:
        source: What `load_reviews` takes.
        seed: Which sentences go where, and all that is random in training.
        steps: Pre-training steps of 32 sentences.
        prompts: How many; the first ``prompt_words`` words of sentences that nothing else sees, all different.
        labels: Labelled sentences for the proxy, and as many others for the gold scorer.
        table: Completions of the SFT policy a prompt, all scored by the proxy; the first ``gold_table`` by gold and VADER.

    Raises:
        ValueError: fewer sentences than the splits need.
    """
    data = load_reviews(source)
    order = np.random.default_rng(seed).permutation(len(data)).tolist()
    used: dict[str, int] = {}
    for row in order:
        words = data.sentences[row].split()
        if len(words) > prompt_words and len(used) < prompts:
            used.setdefault(" ".join(words[:prompt_words]), row)
    taken = set(used.values())
    rest = [row for row in order if row not in taken]
    if len(used) < prompts or len(rest) < 2 * labels + 32:
        raise ValueError(f"{source} has {len(data)} sentences: too few for {prompts} prompts and 2 × {labels} labels")
    held, for_proxy, for_gold, for_lm = list(used.values()), rest[:labels], rest[labels : 2 * labels], rest[2 * labels :]

    def rows(which: list[int]) -> tuple[list[str], np.ndarray]:
        return [data.sentences[i] for i in which], data.labels[which]

    proxy = Proxy(*rows(for_proxy))
    gold = Gold(*rows(for_gold)) if gold_table else None
    texts, _ = rows(for_lm)
    tokenizer = train_tokenizer(texts)
    policy = small_llama(tokenizer, seed=seed)
    pretrain(policy, tokenizer, texts, steps=steps, seed=seed, track=track)
    unseen, their_labels = rows(held)
    with torch.no_grad():
        logps = completion_logps(policy, tokenizer, [""] * len(unseen), unseen)
    keys = tuple(used)
    return ReviewCase(
        sft=Checkpoint.of(policy, tokenizer),
        prompts=keys,
        proxy=proxy,
        gold=gold,
        reference=reference_of(policy, tokenizer, keys, proxy, gold, table, gold_table, new_tokens, seed),
        heldout_loss=float(-logps.sums.sum() / logps.lengths.sum()),
        proxy_accuracy=float(((proxy(unseen) > 0) == (their_labels == 1)).mean()),
        gold_accuracy=float(((gold(unseen) > 0) == (their_labels == 1)).mean()) if gold else float("nan"),
        dropped=data.dropped,
    )


def reference_of(
    model: Any, tokenizer: Any, prompts: Sequence[str], proxy: Score, gold: Score | None, table: int, gold_table: int,
    new_tokens: int, seed: int,
) -> Reference:  # fmt: skip
    """Draws and scores the completions that policies are compared with."""
    drawn = sample(model, tokenizer, prompts, per_prompt=table, max_new_tokens=new_tokens, seed=seed)
    full = grouped([p + text for p, text in zip(np.repeat(prompts, table), drawn.texts, strict=True)], table)
    few = [text for row in full for text in row[:gold_table]]
    shape = (len(prompts), -1)
    return Reference(
        texts=tuple(tuple(row) for row in grouped(drawn.texts, table)),
        proxy=proxy([text for row in full for text in row]).reshape(shape),
        gold=gold(few).reshape(shape) if gold and gold_table else None,
        vader=vader(few).reshape(shape) if gold and gold_table else None,
    )


def grouped(items: Sequence[Any], size: int) -> list[list[Any]]:
    """Consecutive groups of ``size``.

    Example:
        >>> grouped("abcdef", 3)
        [['a', 'b', 'c'], ['d', 'e', 'f']]
    """
    return [list(items[i : i + size]) for i in range(0, len(items), size)]


# ---- judging a policy --------------------------------------------------------------------------------------------------


def win_rate(scores: np.ndarray, reference: np.ndarray) -> float:
    """P(score > reference of the same prompt), ties half, over all pairs: ``(P, k)`` against ``(P, m)``.

    Example:
        >>> win_rate(np.array([[1.0, 3.0]]), np.array([[0.0, 1.0, 2.0]]))
        0.75
    """
    if len(scores) != len(reference):
        raise ValueError(f"scores and reference must have the same prompts, got {len(scores)} and {len(reference)}")
    ours, theirs = scores[:, :, None], reference[:, None, :]
    return float(((ours > theirs) + 0.5 * (ours == theirs)).mean())


def distinct2(ids: Tensor, mask: Tensor) -> float:
    """Different pairs of neighbouring tokens over all such pairs: ``(n, tokens)`` each. Depends on n: compare equal n."""
    pairs = torch.stack([ids[:, :-1], ids[:, 1:]], -1)[mask[:, 1:].bool()]
    return len(pairs.unique(dim=0)) / max(1, len(pairs))


def evaluate(
    policy: Any, case: ReviewCase, *, seed: int, per_prompt: int = 25, gold_per_prompt: int = 5, kl_per_prompt: int = 10,
    new_tokens: int = 20,
) -> dict[str, float]:  # fmt: skip
    """Draws completions of the case's prompts from a policy and judges them.

    Returns:
        ``proxy_win``, ``gold_win``, ``vader_win``: P(better than one completion of the SFT policy); ``proxy_mean``,
        ``gold_mean``, ``vader_mean``: mean scores; ``kl``, ``kl_k1``, ``kl_k3``: KL(policy ‖ SFT) in nats a completion, ``kl``
        with exact next-token distributions; ``distinct2``, ``length`` (tokens, end token included).
    """
    if not 1 <= max(gold_per_prompt, kl_per_prompt) <= per_prompt:
        raise ValueError(f"gold_per_prompt and kl_per_prompt must be at most per_prompt = {per_prompt}")
    sft, tokenizer = case.sft.load()
    sft.to(next(policy.parameters()).device)
    drawn = sample(policy, tokenizer, case.prompts, per_prompt=per_prompt, max_new_tokens=new_tokens, seed=seed)
    asked = np.repeat(case.prompts, per_prompt)
    full = grouped([prompt + text for prompt, text in zip(asked, drawn.texts, strict=True)], per_prompt)
    metrics = judged(full, case, gold_per_prompt)
    rows = torch.arange(len(drawn.texts)).reshape(-1, per_prompt)[:, :kl_per_prompt].flatten()
    kl = token_kl(policy, sft, Samples([], *(tensor[rows] for tensor in drawn[1:])))
    return {
        **metrics,
        "kl": kl.exact.mean().item(),
        "kl_k1": kl.k1.mean().item(),
        "kl_k3": kl.k3.mean().item(),
        "distinct2": distinct2(drawn.ids, drawn.mask),
        "length": drawn.lengths.double().mean().item(),
    }


def judged(full: Sequence[Sequence[str]], case: ReviewCase, gold_per_prompt: int) -> dict[str, float]:
    """Win rates and mean scores of whole texts, grouped by prompt."""
    scores = case.proxy([text for row in full for text in row]).reshape(len(full), -1)
    metrics = {"proxy_win": win_rate(scores, case.reference.proxy), "proxy_mean": float(scores.mean())}
    few = [text for row in full for text in row[:gold_per_prompt]]
    for name, judge, theirs in (("gold", case.gold, case.reference.gold), ("vader", vader, case.reference.vader)):
        if judge is not None and theirs is not None:
            scores = judge(few).reshape(len(full), -1)
            metrics |= {f"{name}_win": win_rate(scores, theirs), f"{name}_mean": float(scores.mean())}
    return metrics
