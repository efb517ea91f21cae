"""Does label smoothing help a network that was given wrong labels?

Published: smoothed labels leave a network's confidence closer to its accuracy (Müller et al., NeurIPS 2019), and make it
more accurate where labels are noisy (Lukasik et al., ICML 2020). Desk: an MLP on scikit-learn's digits with a fifth of the
training labels replaced, trained until it is too sure of itself. Desk cannot show: mistakes that people make.

An arm is a callable ``(logits, labels) -> loss``, the scalar that the network is trained on.
``prepare`` returns a ``Case``: training and test rows, ``(n, features)`` and ``(n,)``.
"""

from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from assay.bench import Claim, Config, Study, above, at_least, below

from .smoothing import smoothed_cross_entropy


class HelloConfig(Config):
    width: int = 128
    """Hidden units."""
    steps: int = 1000
    """Full-batch Adam steps."""
    flipped: float = 0.2
    """Share of training labels that are replaced."""


class Case(NamedTuple):
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def prepare(config: HelloConfig, log) -> Case:
    digits = load_digits()
    order = torch.randperm(len(digits.data))
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32)[order], torch.tensor(digits.target)[order]
    half = len(x) // 2
    wrong = torch.rand(half) < config.flipped
    noisy = torch.where(wrong, (y[:half] + torch.randint(1, 10, (half,))) % 10, y[:half])
    return Case(x[:half], noisy, x[half:], y[half:])


def trial(arm, case: Case, config: HelloConfig, log) -> dict[str, float]:
    net = nn.Sequential(nn.Linear(case.train_x.shape[1], config.width), nn.ReLU(), nn.Linear(config.width, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for step in log.track(range(config.steps), "train"):
        loss = arm(net(case.train_x), case.train_y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            log.metric("loss", loss.item(), step)
    with torch.no_grad():
        confidence, predicted = net(case.test_x).softmax(-1).max(-1)
    right = (predicted == case.test_y).float()
    return {"overconfidence": (confidence.mean() - right.mean()).item(), "accuracy": right.mean().item()}


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, labels)


study = Study(
    prepare=prepare,
    trial=trial,
    arms={"plain": cross_entropy, "smoothed": smoothed_cross_entropy},
    scales={
        "smoke": HelloConfig(seeds=2),
        "desk": HelloConfig(seeds=5),
        "paper": HelloConfig(width=1024, seeds=5, steps=4000),
    },
    gates=[
        Claim("the plain network is too sure of itself", statistic=lambda r: r["plain"].overconfidence, holds=at_least(0.05))
    ],
    claims=[
        Claim(
            "confidence ends closer to accuracy",
            statistic=lambda r: abs(r["smoothed"].overconfidence) / abs(r["plain"].overconfidence),
            holds=below(1),
            published="closer",
        ),
        Claim(
            "accuracy on right labels rises",
            statistic=lambda r: r["smoothed"].accuracy - r["plain"].accuracy,
            holds=above(0),
            published="rises",
        ),
    ],
    compare=("overconfidence", "accuracy"),
    paper="The same digits with a wider network: nothing to fetch.",
)
