"""Noisy in-context recall: sequences in which the next token is either an answer shown earlier or a frequent noise token."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RecallBatch:
    """Sequences and what is known about them. ``B`` sequences, ``T`` positions, ``K`` triggers.

    Attributes:
        tokens: ``(B, T+1)``, int64.
        occurrence: ``(B, T)``: 0 where the token is no trigger, else how often this trigger has occurred so far.
        answer: ``(B, K)``: the answer of each trigger.
        triggers: ``(B, K)``.
        noise_token: The token that stands in for an answer with probability `alpha`.
    """

    tokens: Tensor
    occurrence: Tensor
    answer: Tensor
    triggers: Tensor
    noise_token: int

    @property
    def inputs(self) -> Tensor:
        """``(B, T)``."""
        return self.tokens[:, :-1]

    @property
    def labels(self) -> Tensor:
        """``(B, T)``: the next token, noise included."""
        return self.tokens[:, 1:]

    @property
    def recall(self) -> Tensor:
        """``(B, T)``, bool: a trigger that has occurred before. Only here can the answer be known."""
        return self.occurrence >= 2

    @property
    def expected(self) -> Tensor:
        """``(B, T)``: the answer of the trigger at this position, -1 where there is none."""
        here = self.inputs.unsqueeze(-1) == self.triggers.unsqueeze(1)  # (B, T, K)
        answer = (here * self.answer.unsqueeze(1)).sum(-1)
        return torch.where(here.any(-1), answer, -1)

    @property
    def distinct(self) -> Tensor:
        """``(B, T)``, bool: recall positions whose answer is neither the noise token nor the trigger itself.

        Where the answer is the noise token, its two probabilities are one and the same number.
        """
        expected = self.expected
        return self.recall & (expected != self.noise_token) & (expected != self.inputs)

    def to(self, device: torch.device | str) -> "RecallBatch":
        tokens, occurrence, answer, triggers = (
            x.to(device) for x in (self.tokens, self.occurrence, self.answer, self.triggers)
        )
        return RecallBatch(tokens, occurrence, answer, triggers, self.noise_token)


def occurrences(tokens: Tensor, triggers: Tensor) -> Tensor:
    """How often each position's token has occurred so far, counting triggers only: ``(B, T)`` from ``(B, T)``, ``(B, K)``.

    Example:
        >>> occurrences(torch.tensor([[4, 1, 4, 2, 4]]), torch.tensor([[4]]))
        tensor([[1, 0, 2, 0, 3]])
    """
    here = tokens.unsqueeze(-1) == triggers.unsqueeze(1)  # (B, T, K)
    return (here.cumsum(1) * here).sum(-1)


class NoisyRecall:
    r"""Bigram text in which every trigger is followed by its sequence's own answer, or by a noise token.

    Chen, Bruna, Bietti: Distributional Associations vs In-Context Reasoning, ICLR 2025 (arXiv 2406.03068).

    For each trigger :math:`q` of a sequence an answer :math:`\bar y_q` is drawn uniformly from the vocabulary. Then

    .. math:: z_1 \sim \pi_u, \qquad z_{t+1} \sim \pi_b(\cdot \mid z_t) \text{ if } z_t \notin Q, \text{ else }
              z_{t+1} = \tau \text{ with probability } \alpha, \; \bar y_{z_t} \text{ otherwise.}

    A model that only counts what follows a trigger predicts :math:`\tau`; one that looks at the context finds the answer.
    All sequences of a batch are drawn in lock-step, one step a position.

    Args:
        unigram: ``(N,)``, probabilities of the first token.
        bigram: ``(N, N)``, row i: probabilities of what follows token i.
        n_triggers: K, 1 to N - 1. The most frequent tokens, the noise token left out.
        noise_token: τ, an id.
        alpha: Probability of noise, in [0, 1). 0 makes clean test sequences.
        seq_len: T, at least 2.
        fixed_triggers: The same triggers in every sequence; False draws them for each one from `unigram`.

    Raises:
        ValueError: probabilities that are not finite, negative, or do not sum to 1; wrong shapes; τ among the triggers;
            arguments out of range.

    Example:
        >>> task = NoisyRecall.from_text("the cat sat on the mat, and that was that! " * 20, seq_len=40)
        >>> batch = task.sample(8, torch.Generator().manual_seed(0))
        >>> batch.tokens.shape, batch.occurrence.shape, task.decode(batch.triggers[0])
        (torch.Size([8, 41]), torch.Size([8, 40]), ' ')
    """

    def __init__(
        self,
        unigram: Tensor,
        bigram: Tensor,
        n_triggers: int = 1,
        noise_token: int = 2,
        alpha: float = 0.5,
        seq_len: int = 256,
        fixed_triggers: bool = True,
    ):
        self.unigram = _probabilities("unigram", unigram, 1)
        self.bigram = _probabilities("bigram", bigram, 2)
        n = len(self.unigram)
        if self.bigram.shape != (n, n):
            raise ValueError(f"bigram must be ({n}, {n}) like unigram's {n} tokens, got {tuple(self.bigram.shape)}")
        if not 0 <= noise_token < n:
            raise ValueError(f"noise_token must be an id in [0, {n}), got {noise_token}")
        if not 1 <= n_triggers < n:
            raise ValueError(f"n_triggers must be in [1, {n - 1}], got {n_triggers}")
        if not 0 <= alpha < 1:
            raise ValueError(f"alpha must be in [0, 1), got {alpha}")
        if seq_len < 2:
            raise ValueError(f"seq_len must be at least 2, got {seq_len}")
        self.n_triggers, self.noise_token, self.alpha, self.seq_len = n_triggers, noise_token, float(alpha), seq_len
        self.fixed_triggers = fixed_triggers
        self.characters = ""
        """The vocabulary, where the task was made `from_text`."""
        self.triggers = self.unigram.argsort(descending=True, stable=True)[:n_triggers]
        """``(K,)``: the triggers of every sequence, where they are fixed."""
        if fixed_triggers and noise_token in self.triggers:
            raise ValueError(f"noise_token {noise_token} is one of the {n_triggers} most frequent tokens, the triggers")
        if not fixed_triggers and int((self.unigram > 0).sum()) <= n_triggers:
            raise ValueError(f"n_triggers must be below the number of tokens of positive unigram, got {n_triggers}")

    @classmethod
    def from_text(
        cls,
        text: str,
        *,
        floor: float = 1e-6,
        n_triggers: int = 1,
        noise_token: int = 2,
        alpha: float = 0.5,
        seq_len: int = 256,
        fixed_triggers: bool = True,
    ) -> "NoisyRecall":
        """Character statistics of a text; ids are the places of the sorted characters.

        Args:
            text: At least two different characters.
            floor: Added to each bigram's share before rows are normalised, > 0, so that no row is empty.
            n_triggers, noise_token, alpha, seq_len, fixed_triggers: As of the class.
        """
        if not math.isfinite(floor) or floor <= 0:
            raise ValueError(f"floor must be finite and positive, got {floor}")
        characters = "".join(sorted(set(text)))
        n = len(characters)
        if n < 2:
            raise ValueError(f"text must hold at least two different characters, got {n}")
        place = {character: i for i, character in enumerate(characters)}
        ids = torch.tensor([place[character] for character in text])
        unigram = torch.bincount(ids, minlength=n).double()
        counts = torch.bincount(ids[:-1] * n + ids[1:], minlength=n * n).double().reshape(n, n)
        bigram = counts / counts.sum(1, keepdim=True).clamp(min=1) + floor
        unigram = unigram / unigram.sum()
        bigram = bigram / bigram.sum(1, keepdim=True)
        task = cls(unigram, bigram, n_triggers, noise_token, alpha, seq_len, fixed_triggers)
        task.characters = characters
        return task

    @property
    def vocab(self) -> int:
        """N."""
        return len(self.unigram)

    def clean(self) -> "NoisyRecall":
        """The same task, the same triggers, without noise: what models are tested on."""
        return self.with_alpha(0.0)

    def with_alpha(self, alpha: float) -> "NoisyRecall":
        """The same task and triggers with another probability of noise."""
        task = NoisyRecall(
            self.unigram, self.bigram, self.n_triggers, self.noise_token, alpha, self.seq_len, self.fixed_triggers
        )
        task.characters = self.characters
        return task

    def decode(self, tokens: Tensor) -> str:
        """Token ids ``(T,)`` as text.

        Raises:
            ValueError: the task was not made from a text.
        """
        if not self.characters:
            raise ValueError("decode needs a task made by NoisyRecall.from_text")
        return "".join(self.characters[i] for i in tokens.tolist())

    def sample(self, batch: int, generator: torch.Generator | None = None) -> RecallBatch:
        """Draws sequences, on the device of the generator (the CPU without one).

        Args:
            batch: B, at least 1.
            generator: The source of randomness; None takes torch's global one.
        """
        if batch < 1:
            raise ValueError(f"batch must be at least 1, got {batch}")
        device = generator.device if generator is not None else torch.device("cpu")
        n, k, steps = self.vocab, self.n_triggers, self.seq_len
        if self.fixed_triggers:
            triggers = self.triggers.to(device).expand(batch, k)
        else:
            weight = self.unigram.clone()
            weight[self.noise_token] = 0  # a trigger that is followed by itself as noise would ask nothing
            triggers = torch.multinomial(weight.to(device).expand(batch, n), k, generator=generator)
        answer = torch.randint(n, (batch, k), generator=generator, device=device)
        reply = torch.full((batch, n), -1, device=device).scatter_(1, triggers, answer)  # (B, N): -1: no trigger

        # One search for all sequences: row i of the cumulative bigrams is shifted by i, so that z + u falls into row z.
        rows = self.bigram.to(device).cumsum(1)
        rows = rows / rows[:, -1:]
        flat = (rows + torch.arange(n, device=device).unsqueeze(1)).flatten()
        uniform = torch.rand(steps, batch, generator=generator, device=device, dtype=torch.double).clamp(max=1 - 1e-12)
        noisy = torch.rand(steps, batch, generator=generator, device=device) < self.alpha
        tokens = torch.empty(steps + 1, batch, dtype=torch.long, device=device)
        z = torch.multinomial(self.unigram.to(device), batch, replacement=True, generator=generator)
        tokens[0] = z
        for t in range(steps):
            drawn = torch.searchsorted(flat, z + uniform[t], right=True) - z * n
            told = reply.gather(1, z.unsqueeze(1)).squeeze(1)
            follow = torch.where(noisy[t], self.noise_token, told)
            z = torch.where(told >= 0, follow, drawn.clamp(0, n - 1))
            tokens[t + 1] = z
        tokens = tokens.T.contiguous()
        return RecallBatch(tokens, occurrences(tokens[:, :-1], triggers), answer, triggers, self.noise_token)


def _probabilities(name: str, values: Tensor, ndim: int) -> Tensor:
    values = torch.as_tensor(values).double()
    if values.ndim != ndim or values.numel() == 0:
        raise ValueError(f"{name} must have {ndim} dimension{'s' * (ndim > 1)} and be no empty one, got {tuple(values.shape)}")
    if not values.isfinite().all() or (values < 0).any():
        raise ValueError(f"{name} must hold finite probabilities, none negative")
    worst = (values.sum(-1) - 1).abs().max().item()
    if worst > 1e-6:
        raise ValueError(f"{name}: {'each row' if ndim > 1 else 'it'} must sum to 1, off by {worst:.3g}")
    return values
