"""A small pre-norm transformer over bytes: the network that the study trains."""

from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each on a normalised input. Projections are separate matrices."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_ffn = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width)
        batch, time, width = x.shape
        h = self.norm_attention(x)
        q, k, v = (
            m(h).view(batch, time, self.heads, -1).transpose(1, 2) for m in (self.query, self.key, self.value)
        )  # (batch, heads, time, d_head)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm_ffn(x))))


class ByteLM(nn.Module):
    """Logits of the next symbol; ``ids (batch, time)`` → ``(batch, time, vocabulary)``.

    Raises:
        ValueError: `heads` does not divide `width`.

    Example:
        >>> import torch
        >>> ByteLM(vocabulary=10, width=8, layers=1, heads=2, context=4)(torch.zeros(3, 4, dtype=torch.long)).shape
        torch.Size([3, 4, 10])
    """

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, context: int):
        super().__init__()
        if width % heads:
            raise ValueError(f"heads must divide width, got {heads} heads and width {width}")
        self.symbols, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.06)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.symbols(ids) + self.positions.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def next_byte_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross-entropy in nats of every byte after the first; ``windows (batch, context + 1)``."""
    windows = windows.long()
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
