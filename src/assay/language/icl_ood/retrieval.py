"""Abstract labels: tasks whose answer is a token, given by its random embedding."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .classes import Function

_ROWS = 4096  # predictions compared with the whole vocabulary at once: 4096 × 10,000 float32 is 160 MB


@lru_cache(maxsize=8)
def _embeddings(vocabulary: int, d: int, seed: int) -> Tensor:
    return torch.randn(vocabulary, d, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class _AbstractLabels:
    shift: tuple[int, int] = (50, 450)
    vocabulary: int = 10_000
    seed: int = 0

    def _check(self, spread: int) -> None:
        low, high = self.shift
        if not 0 <= low < high:
            raise ValueError(f"shift must be (low, high) with 0 ≤ low < high, got {self.shift}")
        if spread + high - 2 >= self.vocabulary:
            raise ValueError(
                f"shift: labels reach {spread + high - 2} with a range of {spread} and shifts below {high}, "
                f"the vocabulary ends at {self.vocabulary - 1}"
            )

    def embeddings(self, d: int, device: torch.device | str = "cpu") -> Tensor:
        """The vocabulary, ``(vocabulary, d)``: standard normal, fixed by the seed."""
        return _embeddings(self.vocabulary, d, self.seed).to(device)

    def _draw_shift(self, batch: int, gen: torch.Generator) -> Tensor:
        return torch.randint(*self.shift, (batch, 1), generator=gen, device=gen.device)

    def accuracy(self, predicted: Tensor, labels: Tensor) -> Tensor:
        """Whether the nearest embedding is the label's: ``(..., d)`` twice to a boolean ``(...)``."""
        table = self.embeddings(labels.shape[-1], labels.device)
        rows, targets = (t.reshape(-1, t.shape[-1]).float() for t in (predicted, labels))
        hits = [
            torch.cdist(r, table).argmin(1) == torch.cdist(t, table).argmin(1)
            for r, t in zip(rows.split(_ROWS), targets.split(_ROWS), strict=True)
        ]
        return torch.cat(hits).reshape(labels.shape[:-1])


@dataclass(frozen=True)
class Retrieval(_AbstractLabels):
    r"""Retrieval: the token a becomes the token a + s, and the shift s is the prompt's to tell.

    "Can In-context Learning Really Generalize to Out-of-distribution Tasks?", ICLR 2025, https://arxiv.org/abs/2410.09695.

    .. math:: x = E_a, \quad y = E_{a + s}, \qquad a \sim U\{0..t-1\}, \; s \sim U\{\text{low}..\text{high}-1\}

    Args:
        shift: (low, high) of s, high exclusive.
        vocabulary: Rows of E.
        seed: E's.
        tokens: t ≥ 1, the tokens that are asked for.

    Shapes:
        - sampled function: ``(B, n, d)``, rows of E below t, to ``(B, n, d)``.

    Raises:
        ValueError: `tokens` and `shift` together leave the vocabulary.

    Example:
        >>> task, gen = Retrieval(shift=(1, 2), vocabulary=10), torch.Generator()
        >>> torch.equal(task.sample(1, 7, gen)(task.embeddings(7)[None, :5]), task.embeddings(7)[None, 1:6])
        True
    """

    tokens: int = 5

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens must be at least 1, got {self.tokens}")
        self._check(self.tokens)

    @property
    def name(self) -> str:
        return f"retrieval {self.shift[0]}-{self.shift[1]}"

    def inputs(self, batch: int, n: int, d: int, gen: torch.Generator) -> Tensor:
        return self.embeddings(d, gen.device)[torch.randint(self.tokens, (batch, n), generator=gen, device=gen.device)]

    def sample(self, batch: int, d: int, gen: torch.Generator) -> Function:
        shift, table = self._draw_shift(batch, gen), self.embeddings(d, gen.device)
        return lambda x: table[torch.cdist(x, table[: self.tokens]).argmin(-1) + shift]


@dataclass(frozen=True)
class LinearRetrieval(_AbstractLabels):
    r"""A regression whose result, rounded down, is looked up: linear and retrieval in one.

    .. math:: c_i = \lfloor 0.4\, w^\top x_i^p \rfloor, \qquad y_i = E_{c_i - \min_j c_j + s}

    Args:
        shift: (low, high) of s, high exclusive.
        vocabulary: Rows of E.
        seed: E's.
        power: p; 2 makes quadratic + retrieval.
        scale: The 0.4.
        batch_minimum: The minimum over the whole batch, as the released code takes it: prompts then depend on each
            other. Off: over the prompt.

    Shapes:
        - sampled function: ``(B, n, d)`` to ``(B, n, d)``.

    Raises:
        ValueError: shifts that leave the vocabulary; when called, results that do.

    Example:
        >>> LinearRetrieval().sample(2, 7, torch.Generator())(torch.randn(2, 5, 7)).shape
        torch.Size([2, 5, 7])
    """

    power: int = 1
    scale: float = 0.4
    batch_minimum: bool = False

    def __post_init__(self) -> None:
        if self.power < 1 or not self.scale > 0:
            raise ValueError(f"power must be at least 1 and scale positive, got {self.power} and {self.scale}")
        self._check(1)

    @property
    def name(self) -> str:
        kind = {1: "linear", 2: "quadratic"}.get(self.power, f"power {self.power}")
        return f"{kind}+retrieval {self.shift[0]}-{self.shift[1]}"

    def sample(self, batch: int, d: int, gen: torch.Generator) -> Function:
        shift, table = self._draw_shift(batch, gen), self.embeddings(d, gen.device)
        w = torch.randn(batch, d, 1, generator=gen, device=gen.device)

        def function(x: Tensor) -> Tensor:
            c = torch.floor(self.scale * (x**self.power @ w).squeeze(-1)).long()  # (B, n)
            token = c - (c.min() if self.batch_minimum else c.amin(1, keepdim=True)) + shift
            if int(token.max()) >= self.vocabulary:
                raise ValueError(f"shift: a label reached {int(token.max())}, the vocabulary ends at {self.vocabulary - 1}")
            return table[token]

        return function
