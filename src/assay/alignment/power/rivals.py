"""The losses that POWER is measured against, on the bandit: slopes in closed form, and the four problems."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from .bandit import Counts, Gradient, count_matrices, descend

A, B, C, D = range(4)
ABSENT = -1e4
"""Logit of an arm that a problem does not have: its probability is 0 and stays so."""


class Bandits(NamedTuple):
    """Four problems done as four runs. Shapes: initial logits and values ``(4, 4)``; counts of a pair ``(4,)``."""

    names: tuple[str, ...]
    pairs: list[tuple[int, int, Tensor]]
    theta0: Tensor
    values: Tensor


def problems() -> Bandits:
    """Type I (a poor arm has won once), Type II (a good arm has lost once, or lost and won once), order unlike frequency."""
    counts = {
        (A, B): (60, 0, 1, 60),
        (B, A): (40, 1, 1, 40),
        (C, A): (1, 0, 0, 1),
        (B, C): (0, 60, 60, 0),
        (C, B): (0, 40, 40, 0),
        (B, D): (0, 0, 0, 100),
        (D, B): (0, 0, 0, 25),
    }
    theta0 = [(0.0, 0.0, -3.0, ABSENT), (2.0, 0.0, 0.0, ABSENT), (2.0, 0.0, 0.0, ABSENT), (0.0, 0.0, -3.0, 0.0)]
    values = [(1.0, 0.5, 0.0, 0.0)] * 3 + [(1.0, 0.5, 0.0, 0.25)]
    pairs = [(winner, loser, torch.tensor(n, dtype=torch.float64)) for (winner, loser), n in counts.items()]
    return Bandits(("A1", "A2", "A2b", "A3"), pairs, torch.tensor(theta0).double(), torch.tensor(values).double())


Slope = Callable[[Tensor, float, float], Tensor]
"""Of margins, beta and the flip rate: the loss's derivative in the margin."""

ROPO_ALPHA = 14.0
SLOPES: dict[str, Slope] = {
    "sigmoid": lambda m, beta, flip: -(-m).sigmoid(),
    "smoothed": lambda m, beta, flip: m.sigmoid() - (1 - flip),
    "robust": lambda m, beta, flip: -((1 - flip) * (-m).sigmoid() + flip * m.sigmoid()) / (1 - 2 * flip),
    "squared": lambda m, beta, flip: 2 * (m / beta - 1 / (2 * beta)) / beta,
    "ropo": lambda m, beta, flip: (
        -4 * ROPO_ALPHA / (1 + ROPO_ALPHA) ** 2 * ((-m).sigmoid() + ROPO_ALPHA * m.sigmoid() * (-m).sigmoid())
    ),
    "none": lambda m, beta, flip: torch.zeros_like(m),
}


class Rival(NamedTuple):
    """A loss of pairs: a slope in ``m = β (φ(y⁺) − φ(y⁻))``, the link φ, and the weight of log π(y⁺) beside it."""

    slope: str
    link: str
    beta: float
    sft: float = 0.0


RIVALS = {
    "sft": Rival("none", "plain", 1.0, sft=1.0),
    "dpo": Rival("sigmoid", "ratio", 0.1),
    "rpo": Rival("sigmoid", "ratio", 0.1, sft=1.0),
    "cdpo": Rival("smoothed", "ratio", 0.1),
    "robust-dpo": Rival("robust", "ratio", 0.1),
    "ipo": Rival("squared", "ratio", 0.5),
    "simpo": Rival("sigmoid", "plain", 1.0),
    "chipo": Rival("sigmoid", "chi", 0.1),
    "orpo": Rival("sigmoid", "odds", 1.0, sft=10.0),  # TRL's ORPO is the likelihood plus 0.1 of this: scaled by ten
    "ropo": Rival("ropo", "ratio", 0.1),
}


def link(kind: str, logp: Tensor, logp0: Tensor) -> tuple[Tensor, Tensor]:
    """φ of each arm, and its derivative in log π."""
    if kind == "plain":
        return logp, torch.ones_like(logp)
    if kind == "odds":  # log(π / (1 − π)); a certain arm is kept from infinity
        rest = torch.log(-torch.expm1(logp.clamp_max(-1e-12)))
        return logp - rest, (-rest).exp()
    ratio = logp - logp0
    if kind == "ratio":
        return ratio, torch.ones_like(logp)
    return ratio + ratio.exp(), 1 + ratio.exp()


def gradient_of(rival: Rival, counts: Counts, logp0: Tensor, flip: float) -> Gradient:
    """The slope of a rival's loss in log π, ``(runs, arms)``."""
    lift, slope = counts.winner - counts.loser, SLOPES[rival.slope]
    towards = rival.sft * counts.share @ counts.winner

    def gradient(logp: Tensor) -> Tensor:
        phi, dphi = link(rival.link, logp, logp0)
        margins = rival.beta * (phi @ lift.T)
        return rival.beta * (counts.share * slope(margins, rival.beta, flip)) @ lift * dphi - towards

    return gradient


def solve(rival: Rival, bandits: Bandits, *, steps: int, lr: float, flip: float, at: Iterable[int] = ()) -> dict[int, Tensor]:
    """Step to policies ``(4, 4)``, the last step included. The rate is for a loss whose terms have weight one."""
    counts = count_matrices(bandits.pairs, bandits.theta0.shape[1])
    gradient = gradient_of(rival, counts, bandits.theta0.log_softmax(-1), flip)
    rate = lr / max(1.0, rival.sft)
    return descend(bandits.theta0, gradient, steps=steps, lr=rate, at=[*at, steps])[1]
