"""Syre beside weight decay, L2-init and their rivals: does decay towards a random point keep a network able to learn?

Published: removing the symmetries of the loss keeps rank and accuracy where weight decay destroys them: continual
learning on permuted MNIST, where an unprotected network collapses after about six tasks; SimCLR's last layer, 22.2 % to
32.5 % probe accuracy; posterior collapse; no change for a ResNet-18 that had no such trouble. Desk: scikit-learn's digits
and diabetes data. ``plasticity`` is a sequence of tasks, each a permutation of pixels and labels, learnt one after the
other by a ReLU network of three layers, every arm at its own best γ; ``fixed`` is the same at one γ for all. ``digits-γ``
is plain classification by a tanh network, ``dead`` the linear model y = Σ uᵢwᵢxᵢ started on its symmetric point u = w = 0,
``vae`` a β-VAE and ``simclr`` a contrastive encoder with its head. Desk cannot show: reinforcement learning, transformers,
or what c = 0.01 does over a long training, since its pull needs about 1/(lr·γ) steps.

An arm is a callable ``(model, config) -> torch.optim.Optimizer``: it reads ``config.gamma`` (γ of γ‖w‖², half of torch's
``weight_decay``) and ``config.lr``, may change the model, and hooks whatever it does on the optimizer (`sgd` makes one).

``prepare`` returns a ``Case``: a ``model``, ``tasks`` that it learns in turn, ``loss(model, batch)``, and
``measure(model, task)``, which returns numbers (``accuracy`` and ``rank`` are what the claims on plasticity read). A task
is ``train`` and ``test``, tuples of tensors with rows first, and ``order (steps, batch)``, the rows of each step. For a case
of your own add ``--set cases=plasticity``.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor, nn

from assay.bench import Claim, Config, NotApplicable, Replicate, Study, Tune, above, at_least, at_most
from assay.data import load_images

from .anchors import draw_anchors
from .diagnostics import symmetry_diagnostics
from .problems import (
    VAE,
    Contrastive,
    ContrastiveLoss,
    EvidenceLoss,
    TwoFactorLinear,
    class_loss,
    dead_units,
    linear_probe,
    mlp,
    square_loss,
)
from .rivals import ReDo, decay_towards, drop_connect, hidden_layers, hold_fixed, to_noise, to_the_start
from .syre import Syre

CASES = ("plasticity", "fixed", "digits-0.001", "digits-0.02", "dead", "vae", "simclr")
EVERYWHERE = ("wd", "syre-0.1", "syre-1", "l2-init")
"""The arms that are run in every case."""
DIGITS = ("plasticity", "digits-0.001", "digits-0.02")
RUN_IN = {
    **dict.fromkeys(("syre-0.01", "noise"), (*DIGITS, "fixed", "dead")),
    **dict.fromkeys(("none", "syre-ar", "shift-only"), (*DIGITS, "dead")),
    **dict.fromkeys(("w-fix", "dropconnect", "redo"), DIGITS),  # they act on matrices or hidden units: `dead` has none
}
"""The cases of each other arm."""


class SyreConfig(Config):
    cases: tuple[str, ...] = CASES
    """What is run: `plasticity` (tuned γ), `fixed` (plasticity at `fixed_gamma`), `digits-γ`, `dead`, `vae`, `simclr`."""
    images: str = "digits"
    """Images to learn, in every case but `dead`: a name `assay.data.load_images` knows, or a folder."""
    lr: float = Field(0.1, gt=0)
    """Learning rate of SGD with momentum 0.9."""
    gamma: float = Field(5e-3, gt=0)
    """γ in `plasticity`: tuned, every family of arms over the same grid."""
    fixed_gamma: float = Field(5e-3, gt=0)
    """γ in `fixed`, for all arms."""
    tasks: int = Field(12, ge=1)
    """Tasks in the sequence."""
    task_steps: int = Field(150, ge=1)
    """Steps on each task."""
    width: int = Field(64, ge=2)
    """Hidden units of the network that learns the sequence."""
    steps: int = Field(500, ge=1)
    """Steps in every other case."""
    batch: int = Field(64, ge=2)
    """Rows a step."""
    beta: float = Field(0.3, gt=0)
    """β of the VAE."""


class Task(NamedTuple):
    train: tuple[Tensor, ...]
    test: tuple[Tensor, ...]
    order: Tensor


class Case(NamedTuple):
    model: nn.Module
    tasks: Sequence[Task]
    loss: Callable[[nn.Module, Any], Tensor]
    measure: Callable[[nn.Module, Task], dict[str, float]]


# -- cases --------------------------------------------------------------------------------------------------------------


def prepare(config, log) -> Case:
    name = log.replicate.partition("/")[0]
    if name in ("plasticity", "fixed") or name.isdecimal():  # a number: the replicate that γ is tuned on
        return plasticity_case(config)
    if name == "dead":
        return dead_case(config)
    train, test, classes = images(config)
    task = Task(train, test, torch.randint(len(train[0]), (config.steps, config.batch)))
    pixels = train[0].shape[1]
    if name.startswith("digits-"):
        return Case(mlp([pixels, 128, 128, classes], nn.Tanh), [task], class_loss, classification)
    if name == "vae":
        return Case(VAE(pixels, 64, 8), [task], EvidenceLoss(config.beta), code_quality)
    if name == "simclr":
        return Case(Contrastive(pixels, 128, 64), [task], ContrastiveLoss(0.5, 0.1), representation)
    raise ValueError(f"cases must be among {', '.join(CASES)} or digits-<γ>, got {name!r}")


def images(config) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], int]:
    data = load_images(config.images)
    x = torch.from_numpy(data.images.reshape(len(data.images), -1)).float() / 255
    y = torch.from_numpy(data.labels)
    held_out = torch.from_numpy(data.is_test)
    return (x[~held_out], y[~held_out]), (x[held_out], y[held_out]), len(data.classes)


def plasticity_case(config) -> Case:
    (train_x, train_y), (test_x, test_y), classes = images(config)
    tasks = []
    for _ in range(config.tasks):
        pixels, labels = torch.randperm(train_x.shape[1]), torch.randperm(classes)
        order = torch.randint(len(train_x), (config.task_steps, config.batch))
        tasks.append(Task((train_x[:, pixels], labels[train_y]), (test_x[:, pixels], labels[test_y]), order))
    sizes = [train_x.shape[1], *[config.width] * 3, classes]
    return Case(mlp(sizes, nn.ReLU), tasks, class_loss, classification)


def dead_case(config) -> Case:
    from sklearn.datasets import load_diabetes

    x, y = (torch.from_numpy(a).float() for a in load_diabetes(return_X_y=True))
    x, y = ((a - a.mean(0)) / a.std(0) for a in (x, y))
    rows = torch.randperm(len(x))
    train, test = rows[: len(x) * 4 // 5], rows[len(x) * 4 // 5 :]
    everything = torch.arange(len(train)).expand(config.steps, -1)
    return Case(
        TwoFactorLinear(x.shape[1]), [Task((x[train], y[train]), (x[test], y[test]), everything)], square_loss, coordinates
    )


def classification(model: nn.Module, task: Task) -> dict[str, float]:
    x, y = task.test
    seen = symmetry_diagnostics(model, x)
    return {
        "accuracy": float((model(x).argmax(1) == y).float().mean()),
        "rank": seen["numerical_rank"],
        "dead": seen["dead_units"],
    }


def coordinates(model: Any, task: Task) -> dict[str, float]:
    x, y = task.test
    return {"error": float((model(x) - y).square().mean()), "used": len(model.u) - dead_units(model, 1e-3)}


def code_quality(model: nn.Module, task: Task) -> dict[str, float]:
    x = task.test[0]
    mean, _, y = model(x)
    return {"error": float((y - x).square().mean()), "active": int((mean.var(0) > 0.01).sum())}


def representation(model: Any, task: Task) -> dict[str, float]:
    """Rank and probe accuracy of the head's output and of the layer that is kept, in front of the head."""
    kept = [torch.relu(model.encoder(part[0])) for part in (task.train, task.test)]
    head = [model.head(h) for h in kept]
    labels = task.train[1], task.test[1]
    return {
        "rank": symmetry_diagnostics(model, task.test[0], hook="")["numerical_rank"],
        "probe": linear_probe((head[0], labels[0]), (head[1], labels[1])),
        "kept_probe": linear_probe((kept[0], labels[0]), (kept[1], labels[1])),
    }


# -- one arm on one case ------------------------------------------------------------------------------------------------


def trial(arm, case: Case, config, log) -> dict[str, float]:
    name = log.replicate.partition("/")[0]
    chosen = RUN_IN.get(log.arm, ())
    if chosen and name in CASES and name not in chosen:
        raise NotApplicable(f"run on {', '.join(chosen)} alone")
    if name == "fixed":
        config = config.model_copy(update={"gamma": config.fixed_gamma})
    elif name.startswith("digits-"):
        config = config.model_copy(update={"gamma": float(name.partition("-")[2])})
    elif name in ("dead", "vae", "simclr"):
        config = config.model_copy(update={"gamma": {"dead": 0.05, "vae": 5e-4, "simclr": 2e-3}[name]})
    model = copy.deepcopy(case.model).to(log.device)
    optimizer = arm(model, config)
    seen: dict[str, float] = {}
    late: list[float] = []
    moves: list[float] = []
    start = [p.detach().clone() for p in model.parameters()]
    for number, task in enumerate(log.track(case.tasks, name), 1):
        train, test = (tuple(x.to(log.device) for x in part) for part in (task.train, task.test))
        for step, rows in enumerate(task.order.to(log.device)):
            loss = case.loss(model, tuple(x[rows] for x in train))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if number == 1 and step == 0:
                moves = [
                    float(x) / config.lr
                    for p, q in zip(model.parameters(), start, strict=True)
                    for x in (p.detach() - q).abs().aminmax()
                ]
            if step % 50 == 0:
                log.metric("train_loss", loss.item(), (number - 1) * len(task.order) + step)
        model.eval()
        with torch.no_grad():
            seen = case.measure(model, Task(train, test, task.order))
        model.train()
        for what, value in seen.items():
            log.metric(what, value, number)
        if "accuracy" in seen and number > len(case.tasks) // 2:
            late.append(seen["accuracy"])
    seen.pop("dead", None)  # drawn as a curve
    if late and len(case.tasks) > 1:
        seen["late"] = float(np.mean(late))  # over the later half: one task's accuracy is too noisy to tune on
    kind = name.partition("-")[0]
    if kind == "dead":
        seen["least_force"], seen["most_force"] = min(moves), max(moves)
        seen["anchor_min"] = min(float(x.abs().min()) for x in getattr(optimizer, "anchors", [torch.zeros(1)]))
    return {f"{kind if not kind.isdecimal() else 'plasticity'}_{what}": float(value) for what, value in seen.items()}


# -- arms ---------------------------------------------------------------------------------------------------------------


def sgd(model, config, *, decay: bool = True):
    weight_decay = 2 * config.gamma if decay else 0.0
    return torch.optim.SGD(model.named_parameters(), config.lr, momentum=0.9, weight_decay=weight_decay)


def syre(model, config, *, sigma: float, d_spread: float = 0.0):
    optimizer = sgd(model, config)
    on_the_point = all(not p.any() for p in model.parameters())  # the case that starts at the symmetric point stays on it
    wrapped = Syre(optimizer, sigma, d_spread=d_spread, seed=anchor_seed(), store="tensor", add_to_init=not on_the_point)
    optimizer.anchors = [wrapped.anchor(p) for p in model.parameters()]
    return optimizer


def anchor_seed() -> int:
    return torch.initial_seed() % 2**31


def l2_init(model, config):
    optimizer = sgd(model, config, decay=False)
    decay_towards(optimizer, to_the_start(optimizer), 2 * config.gamma)
    return optimizer


def noise(model, config):
    optimizer = sgd(model, config, decay=False)
    decay_towards(optimizer, to_noise(1.0), 2 * config.gamma)
    return optimizer


def shift_only(model, config):
    """From where `syre-1` starts, without decay."""
    anchors = draw_anchors(model.named_parameters(), 1.0, seed=anchor_seed())
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(anchors[name])
    return sgd(model, config, decay=False)


def w_fix(model, config):
    if all(p.ndim < 2 for p in model.parameters()):
        raise NotApplicable("W-fix holds entries of matrices: this model has none")
    optimizer = sgd(model, config)
    hold_fixed(optimizer, fraction=0.1, gain=1.0)
    return optimizer


def dropconnect(model, config):
    if not any(isinstance(m, nn.Linear) for m in model.modules()):
        raise NotApplicable("DropConnect drops entries of linear layers: this model has none")
    drop_connect(model, 0.1)
    return sgd(model, config)


def redo(model, config):
    if not hidden_layers(model):
        raise NotApplicable("ReDo recycles hidden units of a stack of layers: this model is none")
    optimizer = sgd(model, config)
    ReDo(model, optimizer, every=50, tau=0.025)
    return optimizer


ARMS: dict[str, Callable[..., Any]] = {
    "none": partial(sgd, decay=False),
    "wd": sgd,
    "syre-0.01": partial(syre, sigma=0.01),
    "syre-0.1": partial(syre, sigma=0.1),
    "syre-1": partial(syre, sigma=1.0),
    "syre-ar": partial(syre, sigma=1.0, d_spread=0.01),
    "l2-init": l2_init,
    "w-fix": w_fix,
    "noise": noise,
    "shift-only": shift_only,
    "dropconnect": dropconnect,
    "redo": redo,
}

# -- what is read off ---------------------------------------------------------------------------------------------------


def only_in(case: str, statistic: Callable[[Replicate], float]) -> Callable[[Replicate], float | None]:
    """The statistic on the replicates of one case, None on the others."""
    return lambda r: statistic(r) if r.name.partition("/")[0] == case else None


def gain(metric: str, better: str, worse: str, factor: float = 1.0) -> Callable[[Replicate], float]:
    return lambda r: factor * (r[better].metrics[metric] - r[worse].metrics[metric])


def force_over_bound(r: Replicate) -> float:
    """The smallest first force over 2γ·min|θ₀| (2γ = 0.1 in this case)."""
    return r["syre-0.01"].dead_least_force / (0.1 * r["syre-0.01"].dead_anchor_min)


def furthest_apart(r: Replicate) -> float:
    plain = r["wd"].digits_accuracy
    return max(100 * abs(r[arm].digits_accuracy - plain) for arm in ("syre-0.01", "syre-0.1"))


def over_plain(r: Replicate) -> float:
    """Syre's last accuracy above the better of plain decay and no decay."""
    return r["syre-1"].plasticity_accuracy - max(r[arm].plasticity_accuracy for arm in ("wd", "none"))


def learnt(r: Replicate) -> float:
    """The least accuracy that an arm of the comparison reached on the first task."""
    return min(r[arm].curve("accuracy")[1][0] for arm in ("none", "wd", "syre-1", "l2-init"))


def figure(results: list[Replicate]) -> Figure:
    shown = Figure(figsize=(11, 7), layout="constrained")
    axes = shown.subplots(2, 2, sharex=True)
    colours = {
        "none": "#9ca3af", "wd": "#111827", "syre-0.01": "#c7d2fe", "syre-0.1": "#818cf8", "syre-1": "#4338ca",
        "l2-init": "#0f766e", "noise": "#b45309", "redo": "#be123c",
    }  # fmt: skip
    titles = {"fixed": "plain decay and Syre at one γ", "plasticity": "every arm at its best γ"}
    for column, (case, title) in enumerate(titles.items()):
        chosen = [r for r in results if r.name.startswith(f"{case}/")]
        for row, metric in enumerate(("accuracy", "rank")):
            axis = axes[row][column]
            for arm, colour in colours.items():
                curves = [r[arm].curve(metric) for r in chosen if arm in r]
                if curves:
                    values = np.array([curve[1] for curve in curves])
                    axis.plot(curves[0][0], values.mean(0), color=colour, lw=2, label=arm)
                    axis.fill_between(curves[0][0], values.min(0), values.max(0), color=colour, alpha=0.12, lw=0)
            axis.set(ylabel=f"{metric} after the task", title=title if row == 0 else "")
        axes[1][column].set_xlabel("task")
    axes[0][1].legend(frameon=False, fontsize=8, ncols=2)
    return shown


study = Study(
    prepare=prepare,
    trial=trial,
    arms=ARMS,
    tune=Tune(
        "gamma",
        (1e-4, 5e-4, 2.5e-3, 1.25e-2),
        select="plasticity_late",
        mode="max",
        follow={"none": "wd", "shift-only": "wd", "syre-ar": "syre-1"},
    ),
    replicates=lambda config: [f"{case}/{seed}" for case in config.cases for seed in range(config.seeds)],
    scales={
        "smoke": SyreConfig(cases=("plasticity",), seeds=1, tasks=4, task_steps=80),
        "desk": SyreConfig(),
        "paper": SyreConfig(images="mnist", width=256, tasks=100, task_steps=2000, steps=100_000, batch=128, num_gpus=1),
    },
    paper=(
        "Permuted MNIST over 100 tasks (this study's own network, images='mnist'), ResNet-18 and a vision transformer on CIFAR-10, "
        "a β-VAE on Fashion-MNIST, SimCLR with a ResNet-18 on CIFAR-100 for 1,000 epochs, PPO on SlipperyAnt; σ₀ = 0.01/√d. "
        "Give the published networks by --case. About 50 GPU hours for the whole, most of them SimCLR's."
    ),
    gates=[
        Claim(
            "The first task of the sequence is learnt: accuracy of none, wd, syre-1 and l2-init, the least",
            statistic=only_in("plasticity", learnt),
            holds=at_least(0.6),
        ),
        Claim(
            "Digits are learnt without decay",
            statistic=only_in("digits-0.001", lambda r: r["none"].digits_accuracy),
            holds=at_least(0.9),
        ),
    ],
    claims=[
        Claim(
            "From u = w = 0 plain decay feels no force and never leaves: first force plus coordinates in use",
            published="0",
            statistic=only_in("dead", lambda r: r["wd"].dead_most_force + r["wd"].dead_used),
            holds=at_most(0),
        ),
        Claim(
            "At u = w = 0 the least force of Syre (c=0.01) over 2γ·min|θ₀|",
            published="≥ 1",
            statistic=only_in("dead", force_over_bound),
            holds=at_least(0.999),
        ),
        Claim(
            "Coordinates in use after training from u = w = 0: Syre (c=0.01) more than plain decay",
            published="yes",
            statistic=only_in("dead", gain("dead_used", "syre-0.01", "wd")),
            holds=above(0),
        ),
        *(
            Claim(
                f"Digits at γ=0.02: rank with Syre c={c} above plain decay's",
                published="yes",
                statistic=only_in("digits-0.02", gain("digits_rank", f"syre-{c}", "wd")),
                holds=bound,
            )
            for c, bound in (("0.1", above(0)), ("1", above(0)), ("0.01", None))
        ),
        Claim(
            "Digits at γ=0.001: accuracy of Syre (c=0.01, 0.1) and plain decay, points apart",
            published="no change",
            statistic=only_in("digits-0.001", furthest_apart),
            holds=at_most(1),
        ),
        Claim(
            "One γ: accuracy on the last task, Syre (c=1) above plain decay",
            published="plain collapses after about six tasks",
            statistic=only_in("fixed", gain("fixed_accuracy", "syre-1", "wd")),
            holds=at_least(0.3),
        ),
        Claim(
            "One γ: rank on the last task, Syre (c=1) above plain decay",
            published="yes",
            statistic=only_in("fixed", gain("fixed_rank", "syre-1", "wd")),
            holds=above(0),
        ),
        Claim(
            "Best γ of each: accuracy on the last task, Syre (c=1) above the better of plain and no decay",
            published="yes",
            statistic=only_in("plasticity", over_plain),
            holds=above(0),
        ),
        Claim(
            "SimCLR: rank of the head's output with Syre (c=1) above plain decay's",
            published="yes",
            statistic=only_in("simclr", gain("simclr_rank", "syre-1", "wd")),
            holds=above(0),
        ),
        Claim(
            "SimCLR: probe on the head's output, Syre (c=1) above plain decay (points)",
            published="10.3",
            statistic=only_in("simclr", gain("simclr_probe", "syre-1", "wd", 100)),
        ),
        Claim(
            "SimCLR: probe on the layer in front of the head, Syre (c=1) above plain decay (points)",
            published="0",
            statistic=only_in("simclr", gain("simclr_kept_probe", "syre-1", "wd", 100)),
        ),
        Claim(
            "β-VAE: error of the reconstruction, Syre (c=1) below plain decay",
            published="yes",
            statistic=only_in("vae", gain("vae_error", "wd", "syre-1")),
        ),
        *(
            Claim(
                f"One γ: accuracy on the last task, Syre (c={c}) above plain decay",
                statistic=only_in("fixed", gain("fixed_accuracy", f"syre-{c}", "wd")),
            )
            for c in ("0.01", "0.1")
        ),
        Claim(
            "One γ: accuracy on the last task, Syre (c=1) above L2-init",
            statistic=only_in("fixed", gain("fixed_accuracy", "syre-1", "l2-init")),
        ),
        *(
            Claim(
                f"Best γ of each: accuracy on the last task, Syre (c=1) above {what}",
                statistic=only_in("plasticity", gain("plasticity_accuracy", "syre-1", rival)),
            )
            for rival, what in (
                ("l2-init", "L2-init"),
                ("noise", "a point drawn anew at each step"),
                ("w-fix", "fixed random weights"),
                ("redo", "ReDo"),
                ("dropconnect", "DropConnect"),
                ("syre-ar", "itself with spread D"),
            )
        ),
        Claim(
            "A shift alone: accuracy on the last task above no decay's",
            published="0",
            statistic=only_in("plasticity", gain("plasticity_accuracy", "shift-only", "none")),
        ),
    ],
    figure=figure,
    compare=("plasticity_accuracy", "plasticity_rank", "fixed_accuracy", "digits_accuracy", "digits_rank"),
)
