"""Many completions of each prompt from a Hugging Face model, for tables of rewards and for best-of-N itself."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .bon import checked_n

RewardFunction = Callable[..., Sequence[float | None]]
"""As TRL calls it: ``reward_fn(prompts=[...], completions=[...]) -> a number each``."""


def best_of_n(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    reward_fn: RewardFunction,
    n: int,
    *,
    batch_size: int = 64,
    seed: int = 0,
    **gen: Any,
) -> list[str]:
    """The best of n completions of each prompt: what vBoN is trained to match, at n times the price.

    Args:
        model: A Hugging Face causal language model.
        tokenizer: Its tokenizer.
        prompts: Texts.
        reward_fn: ``(prompts=[...], completions=[...]) -> rewards``.
        n: Completions a prompt, ≥ 1. The first of the best is taken.
        batch_size: Completions generated at a time.
        seed: Of the draws.
        gen: Anything ``model.generate`` takes; ``max_new_tokens=20`` unless given. Sampling is at temperature 1, uncut.

    Raises:
        ValueError: no prompts, n < 1, rewards that are NaN or of another number.

    Example:
        >>> best_of_n(model, tokenizer, ["Once"], lambda prompts, completions: map(len, completions), n=8)  # doctest: +SKIP
    """
    checked_n(n)
    chosen: dict[int, str] = {}
    for which, completions in sampled(model, tokenizer, prompts, n, batch_size=batch_size, seed=seed, **gen):
        asked = [prompts[i] for i in which for _ in range(n)]
        rewards = checked_rewards(reward_fn(prompts=asked, completions=completions), len(asked)).reshape(-1, n)
        for row, (i, best) in enumerate(zip(which, rewards.argmax(1).tolist(), strict=True)):
            chosen[i] = completions[row * n + best]
    return [chosen[i] for i in range(len(prompts))]


def sampled(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    per_prompt: int,
    *,
    batch_size: int = 64,
    seed: int = 0,
    share: tuple[int, int] = (0, 1),
    **gen: Any,
) -> Iterator[tuple[list[int], list[str]]]:
    """Groups of prompts (their places) and their completions, ``per_prompt`` each, in order.

    ``share`` = (k, of): only every ``of``-th group beginning with the k-th, so that several processes divide the work. A
    group's draws depend on the seed and the group alone: what comes out is the same however many share the work.
    """
    if not prompts:
        raise ValueError("prompts must hold at least one text")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if pad is None:
        raise ValueError("the tokenizer has neither a padding nor an end token: set tokenizer.pad_token")
    at_once = max(1, batch_size // per_prompt)
    device = next(model.parameters()).device
    settings = {**plain_sampling(), "pad_token_id": pad, **gen}
    with evaluating(model):
        for group, start in enumerate(range(0, len(prompts), at_once)):
            if group % share[1] != share[0]:
                continue
            which = list(range(start, min(start + at_once, len(prompts))))
            rows = tokenizer([prompts[i] for i in which])["input_ids"]
            width = max(map(len, rows))
            if width == 0:
                raise ValueError("a prompt without tokens: the tokenizer must put a first token before an empty text")
            ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device)
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
            texts: list[list[str]] = [[] for _ in which]
            devices = [device] if device.type == "cuda" else []
            with torch.random.fork_rng(devices=devices), torch.no_grad():
                torch.manual_seed(seed * 1_000_003 + group)
                for first in range(0, per_prompt, max(1, batch_size // len(which))):
                    count = min(per_prompt - first, max(1, batch_size // len(which)))
                    out = model.generate(input_ids=ids, attention_mask=mask, num_return_sequences=count, **settings)
                    decoded = tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
                    for k in range(len(which)):
                        texts[k] += decoded[k * count : (k + 1) * count]
            yield which, [text for row in texts for text in row]


def plain_sampling() -> dict[str, Any]:
    """The reference's own distribution: nothing tempered, nothing cut off, whatever its generation configuration says."""
    uncut = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    return {"do_sample": True, "temperature": 1.0, **uncut, "max_new_tokens": 20}


def checked_rewards(rewards: Any, expected: int) -> torch.Tensor:
    """Rewards as float64 ``(n,)``: in float32, distinct rewards may become ties.

    Raises:
        ValueError: another number of them, more than one each, a missing or NaN one.
    """
    values = rewards if isinstance(rewards, torch.Tensor) else list(rewards)
    if len(values) != expected:
        raise ValueError(f"reward_fn returned {len(values)} rewards for {expected} completions")
    if isinstance(values, torch.Tensor):
        if values.ndim != 1:
            raise ValueError(f"reward_fn returned rewards of shape {tuple(values.shape)}: one number a completion is expected")
        tensor = values.detach().cpu().double()
    elif any(value is None for value in values):
        raise ValueError("reward_fn returned None: best-of-N needs a reward for every completion")
    else:
        tensor = torch.tensor([float(value) for value in values], dtype=torch.float64)
    if tensor.isnan().any():
        raise ValueError(f"reward_fn returned NaN for {int(tensor.isnan().sum())} of {expected} completions")
    return tensor


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode for the length of a block; then each module's own again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
