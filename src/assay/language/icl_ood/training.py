"""Training a sequence model in context: fresh tasks at every step, an optional curriculum, one or several classes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .classes import FunctionClass, sample_prompts

_LOOK = 100  # rounds between two looks at the loss: each waits for the device


@dataclass(frozen=True)
class Curriculum:
    """Prompts that grow: few dimensions and short contexts first.

    Dimensions that are not there yet are zeros at the end of x; the function keeps all of its weights.

    Args:
        dims: Visible dimensions at first, ≥ 1.
        points: Examples at first, ≥ 1.
        dims_step: How many dimensions are added.
        points_step: How many examples are added. Published: 2, and 5 from 26 on for ReLU nets.
        every: Rounds between additions, ≥ 1.

    Raises:
        ValueError: a number out of its range.

    Example:
        >>> Curriculum().at(4000, d=20, n=101)
        (7, 15)
    """

    dims: int = 5
    points: int = 11
    dims_step: int = 1
    points_step: int = 2
    every: int = 2000

    def __post_init__(self) -> None:
        if min(self.dims, self.points, self.every) < 1 or min(self.dims_step, self.points_step) < 0:
            raise ValueError(f"a curriculum starts at 1 or more, grows by 0 or more, every 1 or more rounds; got {self}")

    def at(self, step: int, *, d: int, n: int) -> tuple[int, int]:
        """Visible dimensions and examples at a round, at most d and n."""
        grown = step // self.every
        return min(d, self.dims + grown * self.dims_step), min(n, self.points + grown * self.points_step)


def train_icl(
    model: nn.Module,
    classes: Sequence[FunctionClass],
    steps: int,
    batch: int = 64,
    lr: float = 1e-4,
    curriculum: Curriculum | None = Curriculum(),
    seed: int = 0,
    *,
    d: int | None = None,
    n: int | None = None,
    warmup: int = 0,
    cosine: bool = False,
    clip: float | None = None,
) -> dict[str, list[float]]:
    r"""Trains a model to predict every label of a prompt from the examples before it.

    "Can In-context Learning Really Generalize to Out-of-distribution Tasks?", ICLR 2025, https://arxiv.org/abs/2410.09695.

    .. math:: \min_\theta\; E_{f \sim F,\, x} \; \tfrac1n \sum_{i=1}^n \big(\hat y_\theta(x_1, y_1, …, x_i) - y_i\big)^2

    Each round draws one batch of inputs, and for every class in turn fresh functions of them and one step of Adam.

    Args:
        model: ``(xs (B, n, d), ys) -> as ys``; trained where its parameters lie.
        classes: One or more.
        steps: Rounds, ≥ 1: each is one optimizer step for every class.
        batch: Prompts a step, ≥ 1.
        lr: Of Adam, > 0.
        curriculum: None trains on whole prompts from the start.
        seed: Of prompts and functions; the model keeps its own initialisation.
        d: Dimensions of x; default ``model.d``.
        n: Examples a prompt, the query among them; default ``model.n_positions``.
        warmup: Rounds in which lr rises from 0.
        cosine: Whether lr then falls to 0 along a cosine.
        clip: Largest norm of a gradient; None does not clip.

    Returns:
        ``step``, and under each class's name the loss there: the mean over all rounds since the last.

    Raises:
        ValueError: an empty list of classes; a number out of its range; d or n that neither the call nor the model
            says; a class whose labels are not finite.
        FloatingPointError: the loss is not finite.

    Example:
        >>> from assay.language.icl_ood import LINEAR, LinearAttentionICL
        >>> train_icl(LinearAttentionICL(2), [LINEAR], 5, batch=8, curriculum=None, n=6)["step"]
        [5]
    """
    d, n = _sizes(model, d, n)
    if not classes:
        raise ValueError("classes must hold at least one function class, got none")
    if len({c.name for c in classes}) < len(classes):
        raise ValueError(f"classes must have names of their own, got {[c.name for c in classes]}")
    if min(steps, batch) < 1 or not lr > 0 or warmup < 0 or (clip is not None and not clip > 0):
        raise ValueError(f"steps, batch, lr and clip must be positive, got {steps}, {batch}, {lr}, {clip}; warmup {warmup}")
    parameters = [p for p in model.parameters() if p.requires_grad]
    device = parameters[0].device
    gen = torch.Generator(device).manual_seed(seed)
    for function_class in classes:
        sample_prompts(function_class, 2, n, d, torch.Generator(device).manual_seed(seed))
    optimizer = torch.optim.Adam(parameters, lr=lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _Schedule(warmup, steps, cosine))
    history: dict[str, list[Any]] = {"step": [], **{c.name: [] for c in classes}}
    recent: list[Tensor] = []
    model.train()
    for step in range(steps):
        dims, points = (d, n) if curriculum is None else curriculum.at(step, d=d, n=n)
        shared = _hidden(torch.randn(batch, points, d, generator=gen, device=device), dims)
        losses = []
        for function_class in classes:
            if hasattr(function_class, "inputs"):  # tokens: looked up before dimensions of their embeddings are hidden
                whole = function_class.inputs(batch, points, d, gen)
                xs, ys = _hidden(whole, dims), function_class.sample(batch, d, gen)(whole)
            else:
                xs, ys = shared, function_class.sample(batch, d, gen)(shared)
            loss = (model(xs, ys) - ys).square().mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(parameters, clip)
            optimizer.step()
            losses.append(loss.detach())
        schedule.step()
        recent.append(torch.stack(losses))
        if (step + 1) % _LOOK == 0 or step + 1 == steps:
            means = torch.stack(recent).mean(0).tolist()
            recent = []
            history["step"].append(step + 1)
            for function_class, value in zip(classes, means, strict=True):
                if not torch.isfinite(torch.tensor(value)):
                    raise FloatingPointError(
                        f"the loss on {function_class.name} is {value} by step {step + 1}: lower lr or clip"
                    )
                history[function_class.name].append(value)
    model.eval()
    return history


@dataclass(frozen=True)
class _Schedule:
    """Rises from 0 over `warmup` rounds, then stays at 1 or falls to 0 along a cosine."""

    warmup: int
    steps: int
    cosine: bool

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        share = (step - self.warmup) / max(1, self.steps - self.warmup)
        return 0.5 * (1 + math.cos(math.pi * share)) if self.cosine else 1.0


def _hidden(xs: Tensor, dims: int) -> Tensor:
    return nn.functional.pad(xs[..., :dims], (0, xs.shape[-1] - dims)) if dims < xs.shape[-1] else xs


def _sizes(model: nn.Module, d: int | None, n: int | None) -> tuple[int, int]:
    known: tuple[Any, Any] = getattr(model, "d", d), getattr(model, "n_positions", n)
    d, n = (known[0] if d is None else d), (known[1] if n is None else n)
    if not isinstance(d, int) or not isinstance(n, int) or min(d, n) < 1:
        raise ValueError(f"d and n must be integers of at least 1, given or known to the model, got {d} and {n}")
    if known[0] != d or known[1] < n:
        raise ValueError(f"the model takes d={known[0]} and at most n={known[1]} examples, got d={d} and n={n}")
    return d, n
