"""A language small enough to be enumerated: every quantity of preference optimisation is exact, none is sampled.

Sequences of ``length`` tokens from a vocabulary of ``vocabulary``; a hidden reward of token pairs and triples; a recurrent
policy; pairs labelled by a noisy Bradley-Terry judge. Runs that differ in β alone train side by side, as one batch of
independent networks.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .updater import ReferenceUpdater

PairLoss = Callable[..., Tensor]


class Tree(NamedTuple):
    """A language, its hidden reward, and preference pairs in it.

    Shapes: sequences ``(N, length)``, reward ``(N,)`` with mean 0 and deviation 1 under the initial policy, pairs ``(P, 2)``
    of sequence indices, the preferred first; seen ``(N,)`` bool: in a pair.
    """

    sequences: Tensor
    reward: Tensor
    pairs: Tensor
    seen: Tensor
    policy: "GRUs"
    sft_logps: Tensor
    """Of every sequence under the initial policy: ``(N,)``."""


class GRUs(nn.Module):
    """``copies`` independent recurrent networks, run together on the same sequences.

    Each is a GRU over tokens with its own embedding and output layer. Weights have ``copies`` as their first axis.
    """

    def __init__(self, copies: int, vocabulary: int, hidden: int):
        super().__init__()

        def weight(*shape: int, fan: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(copies, *shape) / math.sqrt(fan))

        self.embed = weight(vocabulary + 1, hidden, fan=hidden)  # the last is the start token
        self.input = weight(hidden, 3 * hidden, fan=hidden)
        self.recur = weight(hidden, 3 * hidden, fan=hidden)
        self.bias = nn.Parameter(torch.zeros(copies, 1, 3 * hidden))
        self.out = weight(hidden, vocabulary, fan=hidden)

    def forward(self, sequences: Tensor) -> Tensor:
        """Log-probabilities of whole sequences: ``(n, length)`` to ``(copies, n)``."""
        copies, hidden, start = self.embed.shape[0], self.embed.shape[2], self.embed.shape[1] - 1
        tokens = F.pad(sequences[:, :-1], (1, 0), value=start)  # what each prediction has just read
        drive = self.embed[:, tokens.flatten()] @ self.input + self.bias
        drive = drive.view(copies, *tokens.shape, 3 * hidden)
        state, states = drive.new_zeros(copies, len(tokens), hidden), []
        for t in range(tokens.shape[1]):
            now, echo = drive[:, :, t], state @ self.recur
            reset, update = (now + echo)[..., : 2 * hidden].sigmoid().chunk(2, -1)
            new = torch.tanh(now[..., 2 * hidden :] + reset * echo[..., 2 * hidden :])
            state = torch.lerp(new, state, update)
            states.append(state)
        logits = torch.stack(states, 2).flatten(1, 2) @ self.out
        logps = logits.log_softmax(-1).gather(2, sequences.reshape(1, -1, 1).expand(copies, -1, 1))
        return logps.view(copies, *sequences.shape).sum(2)

    def repeated(self, copies: int) -> "GRUs":
        """The first network, ``copies`` times."""
        twin = copy.deepcopy(self)
        for p in twin.parameters():
            p.data = p.data[:1].repeat(copies, *[1] * (p.dim() - 1))
        return twin


def grow(
    *, seed: int, vocabulary: int, length: int, hidden: int, sft_sequences: int, sft_steps: int, pairs: int, sharpness: float
) -> Tree:
    """A language and its data, all from one seed: reward, a policy fitted to a few sequences, noisy pairs drawn from it."""
    generator = torch.Generator().manual_seed(seed)
    grid = torch.cartesian_prod(*[torch.arange(vocabulary)] * length).reshape(-1, length)
    two = torch.randn(length - 1, vocabulary, vocabulary, generator=generator)
    three = torch.randn(length - 2, vocabulary, vocabulary, vocabulary, generator=generator)
    place = torch.arange(length)
    reward = two[place[:-1], grid[:, :-1], grid[:, 1:]].sum(1)
    reward = reward + three[place[:-2], grid[:, :-2], grid[:, 1:-1], grid[:, 2:]].sum(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = GRUs(1, vocabulary, hidden)
    shown = grid[torch.randperm(len(grid), generator=generator)[:sft_sequences]]
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-2, weight_decay=0.0)
    for _ in range(sft_steps):
        loss = -policy(shown).mean() / length
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        logps = policy(grid)[0]
    weights = logps.exp()
    mean = (weights * reward).sum()
    reward = (reward - mean) / (weights * (reward - mean) ** 2).sum().sqrt()
    drawn = torch.multinomial(weights, 4 * pairs, replacement=True, generator=generator).reshape(-1, 2)
    drawn = drawn[drawn[:, 0] != drawn[:, 1]][:pairs]  # twins have no order; they are about one in a hundred
    wins = torch.rand(len(drawn), generator=generator) < (sharpness * (reward[drawn[:, 0]] - reward[drawn[:, 1]])).sigmoid()
    ordered = torch.where(wins[:, None], drawn, drawn.flip(1))
    seen = torch.zeros(len(grid), dtype=torch.bool)
    seen[ordered.flatten()] = True
    return Tree(grid, reward, ordered, seen, policy, logps)


class Point(NamedTuple):
    """Exact state of the copies at a step; every entry ``(copies,)``."""

    step: int
    gold: Tensor
    """Expected hidden reward; the initial policy's is 0, its standard deviation 1."""
    win: Tensor
    """P(a draw is better than one of the initial policy), ties half."""
    kl: Tensor
    """KL(policy ‖ initial), nats."""
    outside: Tensor
    """Probability of sequences in no pair."""
    accuracy: Tensor
    """Share of pairs of sequences outside the data, drawn by the initial policy, that implicit rewards order rightly."""
    chosen_logp: Tensor


def climb(
    tree: Tree, loss: PairLoss, betas: Sequence[float], *, steps: int, lr: float, batch: int, seed: int, points: int,
    updater: Callable[[nn.Module, nn.Module], Any] | None, track: Any = iter,
) -> list[Point]:  # fmt: skip
    """Trains a copy for each β on the same batches and measures all of them exactly along the way.

    Args:
        loss: ``(pol_chosen, pol_rejected, ref_chosen, ref_rejected, beta, length) -> (batch,)``.
        updater: Makes what moves the reference, with a ``step()``; None: it stands still.
        points: Measurements, evenly spaced, the start left out.
    """
    policy = tree.policy.repeated(len(betas))
    reference = copy.deepcopy(policy).requires_grad_(False)
    moving = updater(policy, reference) if updater else None
    optimizer = torch.optim.AdamW(policy.parameters(), lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    length = torch.full((batch,), tree.sequences.shape[1])
    at = {round(steps * (i + 1) / points) for i in range(points)}
    path = []
    order: list[int] = []
    for step in track(range(1, steps + 1)):
        while len(order) < batch:
            order += torch.randperm(len(tree.pairs), generator=generator).tolist()
        rows, order = torch.tensor(order[:batch]), order[batch:]
        answers = tree.sequences[tree.pairs[rows].T.flatten()]  # chosen above rejected
        chosen, rejected = policy(answers).chunk(2, 1)
        with torch.no_grad():
            ref_chosen, ref_rejected = reference(answers).chunk(2, 1)
        each = [loss(chosen[i], rejected[i], ref_chosen[i], ref_rejected[i], beta, length) for i, beta in enumerate(betas)]
        total = torch.stack([rows.mean() for rows in each]).sum()  # the copies share nothing: each has its own gradient
        if not total.isfinite():
            raise FloatingPointError(f"the loss became {total.item()} at step {step}")
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        if moving is not None:
            moving.step()
        if step in at:
            path.append(measure(tree, policy, step))
    return path


@torch.no_grad()
def measure(tree: Tree, policy: GRUs, step: int = 0) -> Point:
    logps = policy(tree.sequences)  # (copies, N)
    mass, start = logps.exp(), tree.sft_logps.exp()
    order = tree.reward.argsort()
    below = torch.zeros_like(start)
    below[order] = start[order].cumsum(0) - 0.5 * start[order]  # P(initial draw is worse); rewards are all different
    return Point(
        step,
        gold=mass @ tree.reward,
        win=mass @ below,
        kl=(mass * (logps - tree.sft_logps)).sum(1),
        outside=mass[:, ~tree.seen].sum(1),
        accuracy=_accuracy(logps - tree.sft_logps, tree),
        chosen_logp=logps[:, tree.pairs[:, 0]].mean(1),
    )


def _accuracy(gained: Tensor, tree: Tree, pairs: int = 2000) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    unseen = torch.where(tree.seen, 0.0, tree.sft_logps.exp())
    drawn = torch.multinomial(unseen, 2 * pairs, replacement=True, generator=generator).reshape(-1, 2)
    drawn = drawn[drawn[:, 0] != drawn[:, 1]]
    better = (tree.reward[drawn[:, 0]] > tree.reward[drawn[:, 1]]).double() * 2 - 1
    right = (gained[:, drawn[:, 0]] - gained[:, drawn[:, 1]]) * better
    return ((right > 0).double() + 0.5 * (right == 0).double()).mean(1)


def fixed_or_moving(mode: str, alpha: float, every: int) -> Callable[[nn.Module, nn.Module], Any] | None:
    if mode == "fixed":
        return None
    return lambda policy, reference: ReferenceUpdater(policy, reference, mode=mode, alpha=alpha, every=every)
