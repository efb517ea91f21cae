"""A model of linear attention that learns regression in context: small, quick to train, and without a long plateau."""

import math

import torch
from torch import Tensor, nn

from .transformer import check_model_input

INITIAL_SCALE = 0.1  # of A and V, over √(d + 1): three layers multiply moments of moments, and a wider start overflows


class LinearAttentionICL(nn.Module):
    r"""Layers of linear attention, without softmax or MLP, on tokens (x, y).

    After von Oswald et al., 2023, https://arxiv.org/abs/2212.07677; one layer can hold one step of gradient descent.
    The k examples are tokens e = (x, y); the query is (x, 0). Every token moves by

    .. math:: e \leftarrow e + \sum_h V_h \Big(\tfrac1k \sum_{j \le k} e_j e_j^\top\Big) A_h\, e

    and the prediction is what stands in the query's y. The examples see each other in any order, so that each length of
    context is a pass of its own; all of them are one batch of n² tokens a prompt. Short contexts have wild moments, on
    which training diverges: `min_context` leaves them out.

    Args:
        d: Dimensions of x, ≥ 1.
        n_layer: ≥ 1.
        n_head: ≥ 1.
        min_context: Places that have seen fewer examples predict 0, ≥ 0.

    Shapes:
        - xs: ``(B, n, d)``; ys: ``(B, n)``, whose last column is never looked at.
        - output: ``(B, n)``; 0 where fewer than `min_context` examples, or none, stand before.

    Raises:
        ValueError: sizes below 1, a negative `min_context`; another d; labels that are vectors.

    Example:
        >>> LinearAttentionICL(2)(torch.randn(4, 10, 2), torch.randn(4, 10)).shape
        torch.Size([4, 10])
    """

    def __init__(self, d: int, n_layer: int = 3, n_head: int = 2, *, min_context: int = 0):
        super().__init__()
        for name, size in {"d": d, "n_layer": n_layer, "n_head": n_head}.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if min_context < 0:
            raise ValueError(f"min_context must be at least 0, got {min_context}")
        self.d, self.min_context = d, min_context
        scale = INITIAL_SCALE / math.sqrt(d + 1)
        self.A = nn.Parameter(scale * torch.randn(n_layer, n_head, d + 1, d + 1))
        self.V = nn.Parameter(scale * torch.randn(n_layer, n_head, d + 1, d + 1))

    def forward(self, xs: Tensor, ys: Tensor) -> Tensor:
        check_model_input(self, xs, ys)
        if ys.ndim == 3:
            raise ValueError(f"ys must be {tuple(xs.shape[:2])}: labels are numbers here, got {tuple(ys.shape)}")
        n = xs.shape[1]
        e = torch.cat((xs, ys[..., None].to(xs.dtype)), -1)  # (B, n, d + 1)
        q = torch.cat((xs, torch.zeros_like(xs[..., :1])), -1)
        first = min(self.min_context, n)
        place = torch.arange(n, device=xs.device)
        k = place[first:]
        share = (place < k[:, None]).to(xs.dtype) / k.clamp_min(1)[:, None]  # (contexts, n): the mean over the first k
        # Each context's last token is its query, which no mean counts.
        tokens = torch.cat((e[:, None].expand(-1, len(k), -1, -1), q[:, first:, None]), 2)  # (B, contexts, n + 1, d + 1)
        for A, V in zip(self.A, self.V, strict=True):
            examples = tokens[:, :, :-1]
            moments = (examples * share[..., None]).mT @ examples  # (B, contexts, d + 1, d + 1)
            move = (V @ moments[:, :, None] @ A).sum(2)  # over heads
            tokens = tokens + tokens @ move.mT
        return nn.functional.pad(tokens[:, :, -1, -1], (first, 0))
