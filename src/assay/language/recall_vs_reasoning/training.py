"""Training on noisy recall, and what a model knows: noise, answer, and where its attention looks."""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .task import NoisyRecall, RecallBatch
from .transformer import RecallTransformer
from .truncate import Target, truncated


def recall_loss(logits: Tensor, batch: RecallBatch) -> Tensor:
    """Mean cross-entropy of the next token at recall positions; first occurrences of a trigger do not count.

    Args:
        logits: ``(B, T, N)``.
        batch: The sequences.

    Raises:
        ValueError: no sequence has a recall position.
    """
    recall = batch.recall
    if not recall.any():
        raise ValueError("batch has no recall position: no trigger occurs twice; take more or longer sequences")
    return F.cross_entropy(logits[recall], batch.labels[recall])


@torch.no_grad()
def recall_metrics(logits: Tensor, batch: RecallBatch) -> dict[str, float]:
    """What a model says at recall positions.

    Args:
        logits: ``(B, T, N)``.
        batch: The sequences; clean ones to test on.

    Returns:
        ``p_noise`` and ``p_answer``, mean probabilities of the noise token and of the sequence's answer, and ``accuracy``,
        how often the answer is the most likely token, all where answer, trigger and noise token differ; ``loss``,
        cross-entropy of the next token at every recall position.
    """
    loss = recall_loss(logits, batch)
    rows = batch.distinct
    if not rows.any():
        raise ValueError("batch has no recall position whose answer is neither the trigger nor the noise token")
    p, answer = logits[rows].softmax(-1), batch.expected[rows]
    return {
        "p_noise": float(p[:, batch.noise_token].mean()),
        "p_answer": float(p.gather(1, answer[:, None]).mean()),
        "accuracy": float((p.argmax(-1) == answer).float().mean()),
        "loss": float(loss),
    }


def evaluate_recall(model: nn.Module, batch: RecallBatch, truncation: Mapping[Target, float] | None = None) -> dict[str, float]:
    """`recall_metrics` of a model, whole or with weights cut to low rank as `truncated` does."""
    with truncated(model, truncation) if truncation else nullcontext(), torch.no_grad():
        return recall_metrics(model(batch.inputs), batch)


@torch.no_grad()
def recall_probes(model: RecallTransformer, batch: RecallBatch) -> dict[str, float]:
    r"""Where attention looks, and what single matrices remember.

    Returns:
        ``previous_token``: how often block 1 attends most to the token before, over tokens that follow a trigger.
        ``finds_answer``: how often block 2, at recall positions, attends most to a token that is the answer.
        ``key_memory``: triggers q for which :math:`W_K` of block 2 matches q to the copy of q that block 1's
        :math:`W_O W_V` wrote, before all other tokens. ``out_memory``: tokens k that the output matrix reads off
        :math:`W_O W_V E_k` of block 2.
    """
    first, second = model.attention_weights(batch.inputs)
    follows = F.pad(batch.occurrence[:, :-1] >= 1, (1, 0))  # (B, T)
    at = torch.arange(batch.inputs.shape[1], device=follows.device).expand_as(follows)
    looked_at = batch.inputs.gather(1, second.argmax(-1))
    embedding = model.embed.weight
    one, two = model.attentions()
    copies = two.key(one.out(one.value(embedding)))
    triggers = batch.triggers.unique()
    matched = (embedding[triggers] @ copies.mT).argmax(-1)
    read = model.unembed(two.out(two.value(embedding))).argmax(-1)
    return {
        "previous_token": _share((first.argmax(-1) == at - 1)[follows]),
        "finds_answer": _share((looked_at == batch.expected)[batch.distinct]),
        "key_memory": _share(matched == triggers),
        "out_memory": _share(read == torch.arange(len(read), device=read.device)),
    }


def train_recall(
    model: nn.Module,
    task: NoisyRecall,
    steps: int,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    batch: int = 512,
    eval_every: int | None = None,
    test: RecallBatch | None = None,
    ablations: Mapping[str, Mapping[Target, float]] | None = None,
    probes: bool = False,
    generator: torch.Generator | None = None,
) -> list[dict[str, Any]]:
    """Trains on fresh noisy sequences and watches the whole model and ablated copies of it on clean ones.

    Chen, Bruna, Bietti: Distributional Associations vs In-Context Reasoning, ICLR 2025 (arXiv 2406.03068).

    The loss is the cross-entropy of the next token at recall positions, noise included. An ablation is applied for the
    measurement alone; training goes on with the whole model.

    Args:
        model: Token ids ``(B, T)`` to logits ``(B, T, N)``. Trained in place.
        task: What to train on.
        steps: At least 1.
        optimizer: None: SGD, learning rate 0.03, momentum 0.9, weight decay 1e-4, on the parameters that want gradients.
        batch: Sequences a step.
        eval_every: Steps between measurements; None: at the end alone. The last step is always measured.
        test: Sequences to measure on; None: 256 clean ones, of the same triggers.
        ablations: Name to weights and fractions, as `truncated` takes them: ``{"drop_F2": {"blocks.1.ff": 0.0}}``.
        probes: Also `recall_probes`; needs a `RecallTransformer`.
        generator: Source of the sequences, on the model's device; None: a new one seeded from torch's global one.

    Returns:
        One dictionary a measurement: ``step``, ``train_loss`` of that step, `recall_metrics` of the model, the same of each
        ablation under ``"<name>/<metric>"``, and the probes.

    Raises:
        ValueError: arguments out of range.
        FloatingPointError: the loss is not finite any more.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> task = NoisyRecall.from_text("a rose is a rose is a rose. " * 9, seq_len=24, noise_token=1)
        >>> model = RecallTransformer(task.vocab, dim=16, max_len=24)
        >>> history = train_recall(model, task, steps=2, batch=16, ablations={"drop_F2": {"blocks.1.ff": 0.0}})
        >>> history[-1]["step"], "drop_F2/p_noise" in history[-1]
        (2, True)
    """
    if steps < 1 or batch < 1:
        raise ValueError(f"steps and batch must be at least 1, got {steps} and {batch}")
    if eval_every is not None and eval_every < 1:
        raise ValueError(f"eval_every must be at least 1 or None, got {eval_every}")
    if probes and not isinstance(model, RecallTransformer):
        raise ValueError(f"probes need a RecallTransformer, got {type(model).__name__}")
    trained = [p for p in model.parameters() if p.requires_grad]
    device = trained[0].device
    if generator is None:
        generator = torch.Generator(device).manual_seed(int(torch.randint(2**31, ())))
    if optimizer is None:
        optimizer = torch.optim.SGD(trained, lr=0.03, momentum=0.9, weight_decay=1e-4)
    if test is None:
        test = task.clean().sample(256, generator)

    history: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        sequences = task.sample(batch, generator)
        loss = recall_loss(model(sequences.inputs), sequences)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == steps or (eval_every and step % eval_every == 0):
            value = loss.item()
            if not math.isfinite(value):
                raise FloatingPointError(f"the loss became {value} by step {step}")
            entry: dict[str, Any] = {"step": step, "train_loss": value, **evaluate_recall(model, test)}
            for name, cut in (ablations or {}).items():
                entry |= {f"{name}/{metric}": x for metric, x in evaluate_recall(model, test, cut).items()}
            if isinstance(model, RecallTransformer) and probes:
                entry |= recall_probes(model, test)
            history.append(entry)
    return history


def _share(hits: Tensor) -> float:
    return float(hits.float().mean()) if hits.numel() else math.nan
