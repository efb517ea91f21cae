"""The two-layer transformer of the paper: one head, no norms, random embeddings that stay fixed."""

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FeedForwardKind = Literal["mlp", "linear"] | None


class Attention(nn.Module):
    """One causal head whose queries are the stream itself: ``out(Σ_s a_ts value(h_s))``, scores ``h_tᵀ key(h_s) / √d``."""

    def __init__(self, dim: int):
        super().__init__()
        self.key, self.value, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(3))

    def weights(self, h: Tensor) -> Tensor:
        """``(B, T, T)``: attention from each position (rows) to those up to it."""
        scores = h @ self.key(h).mT / h.shape[-1] ** 0.5
        future = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool, device=h.device).triu(1)
        return scores.masked_fill(future, -torch.inf).softmax(-1)

    def forward(self, h: Tensor) -> Tensor:
        return self.out(F.scaled_dot_product_attention(h, self.key(h), self.value(h), is_causal=True))


class FeedForward(nn.Module):
    """``down(ReLU(up(h)))``, four times as wide in the middle."""

    def __init__(self, dim: int):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return self.down(self.up(h).relu())


class Block(nn.Module):
    """``h ← h + attention(h)``, then ``h ← h + ff(h)``. With ``residual = False`` attention's output replaces the stream."""

    def __init__(self, dim: int, kind: FeedForwardKind):
        super().__init__()
        self.residual = True
        self.attention = Attention(dim)
        self.ff = FeedForward(dim) if kind == "mlp" else nn.Linear(dim, dim, bias=False) if kind == "linear" else None

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.attention(h) if self.residual else self.attention(h)
        return h if self.ff is None else h + self.ff(h)


class RecallTransformer(nn.Module):
    r"""Two blocks of attention and feed-forward, as bare as possible, so that one can ask which of them stores what.

    Chen, Bruna, Bietti: Distributional Associations vs In-Context Reasoning, ICLR 2025 (arXiv 2406.03068).

    .. math:: h_t = E_{z_t} + P_t, \quad h_t \leftarrow h_t + W_O \sum_{s \le t} a_{ts} W_V h_s, \quad
              a_{t\cdot} = \mathrm{softmax}_s(h_t^\top W_K h_s / \sqrt d), \quad
              h_t \leftarrow h_t + W_2 \,\mathrm{ReLU}(W_1 h_t)

    twice, then logits by a fixed random matrix. Embeddings have entries from N(0, 1); every trained matrix starts as
    `torch.nn.Linear` does. The matrices are ``blocks.{0,1}.attention.{key,value,out}`` and ``blocks.{0,1}.ff.{up,down}``
    (a linear one: ``blocks.{0,1}.ff``): names that `truncated` takes.

    Args:
        vocab: N, at least 2.
        dim: d, at least 1.
        max_len: Longest sequence.
        ffn: Feed-forward of each block: ``"mlp"``, ``"linear"`` (one matrix) or ``None``.
        freeze_embeddings: Token embeddings and output matrix are not trained. Positions never are.

    Shapes: ``(B, T)`` int64 to ``(B, T, N)``, T ≤ `max_len`.

    Raises:
        ValueError: arguments out of range; sequences longer than `max_len`.

    Example:
        >>> model = RecallTransformer(vocab=30, dim=16, max_len=12, ffn=("mlp", None))
        >>> model(torch.zeros(2, 12, dtype=torch.long)).shape
        torch.Size([2, 12, 30])
    """

    def __init__(
        self,
        vocab: int,
        dim: int = 256,
        max_len: int = 256,
        ffn: Sequence[FeedForwardKind] = ("mlp", "mlp"),
        freeze_embeddings: bool = True,
    ):
        super().__init__()
        for name, value, least in (("vocab", vocab, 2), ("dim", dim, 1), ("max_len", max_len, 1)):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if len(ffn) != 2 or any(kind not in ("mlp", "linear", None) for kind in ffn):
            raise ValueError(f"ffn must be two of 'mlp', 'linear' and None, got {ffn!r}")
        self.max_len = max_len
        self.embed = nn.Embedding(vocab, dim)
        self.register_buffer("position", torch.randn(max_len, dim))
        self.blocks = nn.ModuleList(Block(dim, kind) for kind in ffn)
        self.unembed = nn.Linear(dim, vocab, bias=False)
        self.embed.requires_grad_(not freeze_embeddings)
        self.unembed.requires_grad_(not freeze_embeddings)

    def embedded(self, tokens: Tensor) -> Tensor:
        """``(B, T, d)``: the stream before the first block."""
        if tokens.ndim != 2 or tokens.shape[1] > self.max_len:
            raise ValueError(f"tokens must be (batch, at most {self.max_len}), got {tuple(tokens.shape)}")
        return self.embed(tokens) + self.get_buffer("position")[: tokens.shape[1]]

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedded(tokens)
        for block in self.blocks:
            h = block(h)
        return self.unembed(h)

    def attention_weights(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """``(B, T, T)`` of either block."""
        h = self.embedded(tokens)
        first, second = self.attentions()
        return first.weights(h), second.weights(self.blocks[0](h))

    def attentions(self) -> tuple[Attention, Attention]:
        """The attention of either block."""
        first, second = (cast(Block, block).attention for block in self.blocks)
        return first, second
