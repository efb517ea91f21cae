"""What the study does to a model besides auditing it: it is built, trained, and reads."""

import copy
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedConfig


def fresh(model_config: PreTrainedConfig, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # every arm starts from the same weights
        return AutoModelForCausalLM.from_config(copy.deepcopy(model_config), dtype=torch.float32)


def train(model: Any, batches: Tensor, lr: float, log: Any) -> None:
    steps = len(batches)
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.1)
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1.0, (i + 1) / warm) * (0.55 + 0.45 * math.cos(math.pi * i / steps))
    )
    model.train()
    for step, ids in enumerate(log.track(batches, "training")):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0 or step == steps - 1:
            log.metric("loss", loss.item(), step)
    model.eval()


@torch.no_grad()
def perplexities(model: Any, text: Tensor, short: int, log: Any) -> dict[str, float]:
    """Of the first `short` tokens, which is what a window of that length gives, and of the last, far from the start."""
    losses = []
    head = model.get_output_embeddings()
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    for ids in log.track(text.to(log.device).split(4), "reading"):
        hidden = model.base_model(input_ids=ids, use_cache=False)[0]
        parts = []
        for rows in (slice(0, short - 1), slice(ids.shape[1] - 1 - short, ids.shape[1] - 1)):
            pieces = zip(hidden[:, rows].split(128, 1), ids[:, 1:][:, rows].split(128, 1), strict=True)
            nll = []
            for states, wanted in pieces:
                logits = head(states).float()
                logits = cap * (logits / cap).tanh() if cap else logits
                nll.append(F.cross_entropy(logits.transpose(1, 2), wanted, reduction="none"))
            parts.append(torch.cat(nll, 1).mean(1))
        losses.append(torch.stack(parts))
    short, long = torch.cat(losses, 1).mean(1).exp().tolist()
    return {"ppl": short, "ppl_long": long}
