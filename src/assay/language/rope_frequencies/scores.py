"""What is read off one layer's queries, keys and attention weights."""

from typing import Any

import torch
from torch import Tensor

SCORES = ("self", "prev", "sink")
SKIPPED = 8  # the first positions have so few keys that any attention looks positional
SHORTEST = 16
_ELEMENTS = 1 << 19  # of |contribution| held at once: about what stays in cache between the passes


def check_ids(model: Any, input_ids: Any) -> None:
    """Raises ValueError unless ids are ``(batch, tokens)`` of this vocabulary and long enough."""
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or input_ids.dtype != torch.int64 or not len(input_ids):
        got = f"{input_ids.dtype} {tuple(input_ids.shape)}" if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise ValueError(f"input_ids must be int64 (batch, tokens), got {got}")
    if input_ids.shape[1] < SHORTEST:
        raise ValueError(f"input_ids must have at least {SHORTEST} tokens, got {input_ids.shape[1]}")
    words = model.get_input_embeddings().weight.shape[0]
    if input_ids.min() < 0 or input_ids.max() >= words:
        raise ValueError(f"input_ids must be in [0, {words}), got {int(input_ids.min())} … {int(input_ids.max())}")


def attention_scores(weights: Tensor) -> Tensor:
    """Mean attention to the token itself, to the one before, and to the first.

    Shapes: ``(batch, heads, tokens, tokens)`` to ``(3, heads)``, float32. The first eight queries are left out.
    """
    read = (weights.diagonal(0, 2, 3), weights.diagonal(-1, 2, 3), weights[..., 0])
    starts = (SKIPPED, SKIPPED - 1, SKIPPED)  # the diagonal below the main one begins with the second query
    return torch.stack([x[..., start:].float().mean((0, 2)) for x, start in zip(read, starts, strict=True)])


def pair_norms(z: Tensor, scale: float, *, skip: int, median: bool) -> Tensor:
    """Typical length of each pair over the tokens: ``(batch, heads, tokens, pairs)`` complex to ``(heads, pairs)``."""
    norms = z[..., skip:, :].abs() / scale  # rotation leaves lengths as they were
    return (norms.median(2).values if median else norms.mean(2)).mean(0)


def contributions(q: Tensor, k: Tensor, weights: Tensor, visible: Tensor | None) -> Tensor:
    r"""How much each pair really adds to the logits: :math:`|\mathrm{Re}(\bar q_i^{(k)} k_j^{(k)})|`, averaged.

    Args:
        q, k: Turned pairs as complex numbers, ``(batch, heads, tokens, pairs)`` and ``(batch, kv_heads, tokens, pairs)``.
        weights: Attention weights ``(batch, heads, tokens, tokens)``.
        visible: What a query may look at, ``(batch | 1, 1, tokens, tokens)``; None: itself and all before it.

    Returns:
        ``(2, heads, pairs)``: the mean over visible pairs of tokens, and weighted by attention, averaged over queries.
    """
    batch, heads, tokens, pairs = q.shape
    groups = heads // k.shape[1]
    if visible is None:
        visible = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=q.device).tril()
    visible = visible[:, 0].expand(batch, tokens, tokens)
    # Re(q̄ k) is a product of two 2-vectors: (heads, pairs, tokens, 2)
    queries = torch.view_as_real(q).transpose(2, 3)
    keys = torch.view_as_real(k).transpose(2, 3).mT  # (batch, kv_heads, pairs, 2, tokens)
    total = q.real.new_zeros(2, heads, pairs)
    share = visible.to(total.dtype) / visible.sum()
    for b in range(batch):
        for h in range(heads):  # pairs × tokens² of one head are already more than a cache holds
            start = 0
            while start < tokens:
                # causal: later queries see more keys, so their blocks have fewer rows
                rows = max(1, min(tokens - start, _ELEMENTS // (pairs * min(tokens, start + 64))))
                stop = start + rows
                size = (queries[b, h, :, start:stop] @ keys[b, h // groups, :, :, :stop]).abs_()  # (pairs, rows, stop)
                weight = torch.stack([share[b, start:stop, :stop], weights[b, h, start:stop, :stop] / (batch * tokens)])
                total[:, h] += weight.flatten(1).to(size.dtype) @ size.flatten(1).mT
                start = stop
    return total
