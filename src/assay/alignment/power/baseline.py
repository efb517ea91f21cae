"""Answers of the policy before training, drawn once: the baseline of ``baseline="initial"``."""

from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset

from .pairs import BASELINE_IDS


@torch.no_grad()
def with_drawn_baseline(
    dataset: Dataset, model: Any, tokenizer: Any, *, tokens: int, seed: int, batch: int, draw: bool,
    share: Callable[[list[Any]], Any],
) -> Dataset:  # fmt: skip
    """The data set with an answer of ``model`` to each prompt, at temperature 1, cut after its end token.

    Args:
        dataset: Prepared by TRL: it has ``prompt_ids``. Equal prompts get the same answer.
        tokens: Most new tokens.
        draw: Whether this process draws; ``share`` hands the first process's answers to the others, in place.
    """
    prompts = [tuple(ids) for ids in dataset["prompt_ids"]]
    asked = sorted(set(prompts), key=lambda ids: (len(ids), ids))  # like lengths together: less padding
    answers: list[Any] = [_drawn(model, tokenizer, asked, tokens, seed, max(1, batch)) if draw else None]
    share(answers)
    of_prompt = dict(zip(asked, answers[0], strict=True))
    return dataset.add_column(BASELINE_IDS, [of_prompt[ids] for ids in prompts])


def _drawn(
    model: Any, tokenizer: Any, prompts: list[tuple[int, ...]], tokens: int, seed: int, batch: int
) -> list[list[int]]:  # fmt: skip
    device = next(model.parameters()).device
    modes = [(module, module.training) for module in model.modules()]
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    answers: list[list[int]] = []
    model.eval()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for start in range(0, len(prompts), batch):
            rows = prompts[start : start + batch]
            width = max(map(len, rows))
            ids = torch.tensor([[pad] * (width - len(r)) + list(r) for r in rows], device=device)
            mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows], device=device)
            out = model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                pad_token_id=pad, eos_token_id=eos,
            )  # fmt: skip
            for new in out[:, width:].tolist():
                answers.append(new[: new.index(eos) + 1] if eos in new else new)
    for module, training in modes:
        module.training = training
    return answers
