"""One gradient step from zero: how strongly feed-forward and attention weights feel the noise token, and how noisily."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .task import NoisyRecall, RecallBatch


class Margin(NamedTuple):
    """``mean`` and ``std`` (over batches, for one rival token) of a logit margin, in units of the learning rate."""

    mean: float
    std: float


def gradient_margins(
    task: NoisyRecall, m: int, *, batches: int = 32, generator: torch.Generator | None = None
) -> dict[str, Margin]:
    r"""Margin of the noise token over another, after one gradient step on ``m`` sequences from zero weights.

    Our derivation, in the setting of the theorem of Chen, Bruna, Bietti, ICLR 2025 (arXiv 2406.03068). At the last trigger
    :math:`q` of a sequence, logits are :math:`W_V \phi + W_F x_q`, :math:`\phi = \frac1T \sum_s x_s` (attention before
    training is uniform), embeddings orthonormal. From :math:`W_V = W_F = 0` a step of size :math:`\eta` gives

    .. math:: \text{ff:} \quad \eta\,(\hat f_\tau - \hat f_k), \qquad
              \text{attn:} \quad \frac{\eta}{m} \sum_i (1[y_i = \tau] - 1[y_i = k]) \langle \phi_i, \phi \rangle

    on a fresh context :math:`\phi`, with :math:`\hat f` the shares of the targets. The first has mean :math:`\eta\alpha`
    whatever the vocabulary; the second about :math:`\eta\alpha \sum_v \pi(v)^2`, which is :math:`\eta\alpha/N` for flat
    frequencies :math:`\pi`. Hence feed-forward weights learn the noise first.

    Args:
        task: Noise and sequences.
        m: Sequences a batch; those in which no trigger occurs twice are left out.
        batches: Repetitions, at least 2, over which the standard deviation is taken.
        generator: Source of randomness, on any device.

    Returns:
        ``{"ff": Margin, "attn": Margin}`` divided by η, averaged over all rivals k and, for ``attn``, over fresh contexts.

    Raises:
        ValueError: m < 1, batches < 2, or a batch in which no trigger occurs twice.

    Example:
        >>> task = NoisyRecall(torch.full((20,), 0.05), torch.full((20, 20), 0.05), seq_len=64)
        >>> found = gradient_margins(task, 64, generator=torch.Generator().manual_seed(0))
        >>> abs(found["ff"].mean - 0.5) < 0.05, found["attn"].mean < 0.1
        (True, True)
    """
    if m < 1:
        raise ValueError(f"m must be at least 1, got {m}")
    if batches < 2:
        raise ValueError(f"batches must be at least 2, got {batches}")
    others = torch.arange(task.vocab) != task.noise_token
    margins: dict[str, list[Tensor]] = {"ff": [], "attn": []}
    for _ in range(batches):
        y, phi = last_recall(task.sample(m, generator), task.vocab)
        _, fresh = last_recall(task.sample(m, generator), task.vocab)
        if not len(y) or not len(fresh):
            raise ValueError(f"a batch of {m} sequences has none in which a trigger occurs twice; raise m or seq_len")
        targets = F.one_hot(y, task.vocab).double().to(phi.device) / len(y)  # (m, N)
        share = targets.sum(0)  # (N,)
        votes = targets.T @ (phi @ fresh.mean(0))  # (N,): averaging over contexts first is the same
        for name, logit in (("ff", share), ("attn", votes)):
            margins[name].append((logit[task.noise_token] - logit).cpu()[others])
    stacked = {name: torch.stack(rows) for name, rows in margins.items()}  # (batches, N - 1)
    return {name: Margin(float(x.mean()), float(x.var(0).mean().sqrt())) for name, x in stacked.items()}


def last_recall(batch: RecallBatch, vocab: int) -> tuple[Tensor, Tensor]:
    """Of every sequence that has a recall position, the last one: next token ``(m,)``, mean one-hot context ``(m, N)``.

    The context runs from the first token to the trigger itself.
    """
    at = torch.arange(batch.inputs.shape[1], device=batch.tokens.device)
    last = torch.where(batch.recall, at, -1).max(1).values  # (B,)
    rows = last >= 0
    last, inputs = last[rows], batch.inputs[rows]
    seen = (at <= last[:, None]).double()
    counts = torch.zeros(len(last), vocab, dtype=torch.double, device=seen.device).scatter_add_(1, inputs, seen)
    return batch.labels[rows].gather(1, last[:, None])[:, 0], counts / (last + 1)[:, None]
