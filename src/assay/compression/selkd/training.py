"""Small networks of the study, how one is trained, and what a student can do on test rows."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn import functional as F

from .arms import Outputs


class Case(NamedTuple):
    """What a student is made from. Labels are the teacher's class ids, of all classes, selected or not."""

    x: Tensor  # training rows (n, ...), of which the first few of each class are taken
    y: Tensor  # (n,)
    teacher_logits: Tensor  # (n, C)
    selected: Sequence[int]
    student: Callable[[int], nn.Module]  # number of outputs -> network
    held_out_x: Tensor  # rows that settings are chosen on
    held_out_y: Tensor
    test_x: Tensor
    test_y: Tensor
    test_teacher: Tensor | None = None  # the teacher's logits of the test rows, for reference


def mlp(sizes: Sequence[int], outputs: int) -> nn.Module:
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


def convolutions(channels: int, width: int, outputs: int) -> nn.Module:
    """For images of 8 × 8 and larger."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, outputs),
    )


def batches(rows: int, batch: int, steps: int, seed: int) -> Tensor:
    """Row numbers ``(steps, batch)``: one random order of all rows after another; all rows where they are fewer."""
    generator = torch.Generator().manual_seed(seed)
    if rows <= batch:
        return torch.arange(rows).expand(steps, -1)
    passes = -(-steps * batch // rows)
    order = torch.cat([torch.randperm(rows, generator=generator) for _ in range(passes)])
    return order[: steps * batch].view(steps, batch)


def fit(network: nn.Module, order: Tensor, lr: float, step_loss: Callable[[Tensor], Tensor], log: Any, name: str) -> None:
    """Adam with a rate that falls to zero along a cosine; `step_loss` takes the rows of a step."""
    optimizer = torch.optim.Adam(network.parameters(), lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(order))
    for step, rows in enumerate(order):
        loss = step_loss(rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            log.metric(f"loss_{name}", loss.item(), step)


def fit_teacher(network: nn.Module, x: Tensor, y: Tensor, steps: int, log: Any) -> nn.Module:
    fit(
        network,
        batches(len(x), 128, steps, log.seed),
        5e-3,
        lambda rows: F.cross_entropy(network(x[rows]), y[rows]),
        log,
        "teacher",
    )
    return network.eval()


def chosen_rows(labels: Tensor, selected: Sequence[int], shots: int, others: int | None, draw: int = 0) -> Tensor:
    """`shots` rows of each selected class and `others` of every other, 0 for all and None for none; draws take turns."""
    rows = []
    for c in labels.unique().tolist():
        many = shots if c in selected else others
        if many is not None:
            mine = torch.nonzero(labels == c)[:, 0]
            rows.append(mine.roll(-draw * many)[: many or len(mine)])
    return torch.cat(rows)


class Answers(NamedTuple):
    """What a student says of some rows: the best selected class, how sure it is that it is one of them, its whole answer."""

    best: Tensor  # (n,) in [0, K), positions in `selected`
    score: Tensor  # (n,) log-odds: of "selected" in an open student, else of the best class
    answer: Tensor | None  # (n,) in [0, K]; None where the student has no answer "not selected" of its own


def answers(logits: Tensor, selected: Sequence[int], outputs: Outputs) -> Answers:
    K = len(selected)
    if outputs == "open":
        return Answers(logits[:, :K].argmax(1), logits[:, :K].logsumexp(1) - logits[:, K], logits.argmax(1))
    columns = torch.tensor(selected) if outputs == "all" else torch.arange(K)
    top, best = logits[:, columns].max(1)
    rest = logits.scatter(1, columns[best][:, None], -torch.inf).logsumexp(1)
    return Answers(best, top - rest, None)


def abilities(said: Answers, targets: Tensor, threshold: float) -> dict[str, float]:
    """Of test rows with targets ``(n,)`` in [0, K], K for "not selected"; a student without that answer gives it below
    `threshold`."""
    K = int(targets.max())
    inside = targets < K
    answer = said.answer if said.answer is not None else said.best.where(said.score >= threshold, K)
    bar = torch.quantile(said.score[~inside], 0.95)
    return {
        "accuracy": float((said.best == targets)[inside].float().mean()),
        "open_accuracy": float((answer == targets).float().mean()),
        "auroc": float(roc_auc_score(inside.numpy(), said.score.numpy())),
        "recall95": float((said.score[inside] > bar).float().mean()),
    }


def best_threshold(said: Answers, targets: Tensor) -> float:
    """The score from which on answering, rather than "not selected", is right most often on these rows."""
    K = int(targets.max())
    order = said.score.argsort(descending=True)
    right = (said.best == targets)[order].long().cumsum(0)
    rejected = (targets == K)[order].long()
    good = right + rejected.sum() - rejected.cumsum(0)
    return float(said.score[order][int(np.argmax(good.numpy()))])
