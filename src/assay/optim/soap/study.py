"""SOAP beside AdamW, Shampoo and Muon: how many steps to the same loss, and what does a stale basis cost?

Published: over 40 % fewer steps and 35 % less wall time than AdamW at 360m and 660m parameters and batches of a million
tokens and more, and a slower decline than Shampoo's as the basis is refreshed less often. Desk: a byte-level transformer of
0.116 million weights on English (the text of Python's language reference, or any corpus), or an MLP on scikit-learn's
digits with ``task=digits``. Desk cannot show: the saving of wall time on GPUs, batches of two million tokens, the
critical batch size. Time a step is reported, not claimed.

An arm is a callable ``(model, config) -> optimizer``, or ``-> [optimizer, ...]`` where parameters are shared out among
several: it is given the whole ``torch.nn.Module``, so it can tell embeddings from hidden matrices (`hidden_matrices`
does), and sets ``config.lr``; the trial then runs the same warm-up and cosine on every optimizer it returned.

``prepare`` returns a ``Case``: a freshly initialised ``model``, training ``batches`` (used in order, again from the start
when they run out), ``validation`` batches, and ``loss(model, batch)``, a mean over the batch's rows. A batch is a tensor or a
tuple of tensors, rows first.
"""

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from assay.bench import Claim, Config, NotApplicable, Outcome, Replicate, Study, Tune, above, at_most, require, steps_to
from assay.data import load_text

from .byte_lm import ByteLM, next_byte_loss
from .rivals import FrozenSecondMoment, Shampoo, UnsortedSecondMoment
from .soap import SOAP

NEVER = 1_000_000
SHARES = (0.5, 0.625, 0.75, 0.875)


class SoapConfig(Config):
    task: Literal["text", "digits"] = "text"
    """A byte-level language model, or an MLP on scikit-learn's digits with all rows in every batch."""
    corpus: str = "pydoc"
    """Text to learn: a name that `assay.data.load_text` knows, a hub id, or a path."""
    width: int = Field(64, ge=8)
    """Width of the transformer, or of the MLP's hidden layers."""
    layers: int = Field(2, ge=1)
    """Transformer blocks, or hidden layers."""
    heads: int = Field(4, ge=1)
    """Attention heads; divides the width."""
    context: int = Field(48, ge=2)
    """Bytes in a training window."""
    batch: int = Field(24, ge=1)
    """Windows a step."""
    steps: int = Field(120, ge=8)
    """Training steps."""
    lr: float = Field(1e-2, gt=0)
    """Peak learning rate; tuned, every family of arms over the same grid."""
    warmup: float = Field(0.1, ge=0, lt=1)
    """Share of the steps that the learning rate rises; it then falls as a cosine to a tenth of its peak."""
    weight_decay: float = Field(1e-4, ge=0)
    """Decoupled weight decay, the same for every arm."""
    windows: int = Field(192, ge=1)
    """Validation windows, evenly spaced over the last tenth of the corpus."""
    evaluations: int = Field(6, ge=1)
    """Points on the validation curve after the start."""


class Case(NamedTuple):
    model: nn.Module
    batches: Sequence[Any]
    validation: Sequence[Any]
    loss: Callable[[nn.Module, Any], Tensor]


def prepare(config, log) -> Case:
    return digits_case(config) if config.task == "digits" else text_case(config)


def text_case(config) -> Case:
    data = np.frombuffer(load_text(config.corpus).encode(), dtype=np.uint8)
    if len(data) < 20 * (config.context + 1):
        raise ValueError(f"corpus {config.corpus!r} has {len(data)} bytes; it takes at least {20 * (config.context + 1)}")
    alphabet, ids = np.unique(data, return_inverse=True)
    text = torch.from_numpy(ids.astype(np.uint8)).unfold(0, config.context + 1, 1)  # every window, (n, context + 1), a view
    held_out = int(0.9 * len(ids))
    starts = torch.randint(held_out - config.context, (config.steps, config.batch))
    validation = text[torch.linspace(held_out, len(text) - 1, config.windows).long()]
    model = ByteLM(len(alphabet), config.width, config.layers, config.heads, config.context)
    return Case(model, text[starts].unbind(), validation.split(64), next_byte_loss)


def digits_case(config) -> Case:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, test_size=0.25, stratify=labels, random_state=int(torch.randint(2**31, ())))
    train_x, test_x, train_y, test_y = (torch.tensor(part) for part in parts)
    sizes = [64] + [config.width] * config.layers
    hidden = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
    return Case(
        nn.Sequential(*hidden, nn.Linear(sizes[-1], 10)),
        [(train_x.float(), train_y)],
        [(test_x.float(), test_y)],
        class_loss,
    )


def class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def trial(arm, case: Case, config, log) -> dict[str, float]:
    model = copy.deepcopy(case.model).to(log.device)
    made = arm(model, config)
    optimizers = list(made) if isinstance(made, list | tuple) else [made]
    steps = round(config.steps * getattr(arm, "share", 1.0))
    shape = partial(warmup_then_cosine, steps=steps, warmup=config.warmup)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, shape) for optimizer in optimizers]
    every = max(1, steps // config.evaluations)
    log.metric("val_loss", evaluate(model, case, log.device), 0)
    seconds = val_loss = 0.0
    for step in log.track(range(1, steps + 1), "train"):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = case.loss(model, moved(case.batches[(step - 1) % len(case.batches)], log.device))
        loss.backward()
        started = time.perf_counter()
        for optimizer in optimizers:
            optimizer.step()
        seconds += time.perf_counter() - started
        for schedule in schedules:
            schedule.step()
        if step % 5 == 0:
            log.metric("train_loss", loss.item(), step)
        if step % every == 0 or step == steps:
            val_loss = evaluate(model, case, log.device)
            log.metric("val_loss", val_loss, step)
    state_mb = sum(x.numel() * x.element_size() for o in optimizers for x in tensors_in(list(o.state.values()))) / 1e6
    return {"val_loss": val_loss, "optimizer_ms": 1e3 * seconds / steps, "state_mb": state_mb}


def warmup_then_cosine(step: int, *, steps: int, warmup: float) -> float:
    """Factor of the peak learning rate: a linear rise, then half a cosine down to 0.1."""
    rise = warmup * steps
    if step < rise:
        return (step + 1) / (rise + 1)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - rise) / (steps - rise))))


@torch.no_grad()
def evaluate(model: nn.Module, case: Case, device: torch.device) -> float:
    model.eval()
    rows = [len(batch if isinstance(batch, Tensor) else batch[0]) for batch in case.validation]
    losses = [case.loss(model, moved(batch, device)).item() for batch in case.validation]
    model.train()
    return float(np.average(losses, weights=rows))


def moved(batch: Any, device: torch.device) -> Any:
    return batch.to(device) if isinstance(batch, Tensor) else tuple(x.to(device) for x in batch)


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


# -- arms ---------------------------------------------------------------------------------------------------------------


def soap(model, config, *, kind=SOAP, frequency=10, **options):
    return kind(model.parameters(), config.lr, weight_decay=config.weight_decay, precondition_frequency=frequency, **options)


def adamw(model, config, *, betas=(0.95, 0.95)):
    return torch.optim.AdamW(model.parameters(), config.lr, betas=betas, weight_decay=config.weight_decay)


def shampoo(model, config, *, frequency=10, exponent=0.25):
    return soap(model, config, kind=Shampoo, frequency=frequency, exponent=exponent)


def muon(model, config):
    """Muon on the hidden matrices, scaled so that AdamW's learning rates fit it, and AdamW on everything else."""
    hidden = hidden_matrices(model)
    if not hidden:
        raise NotApplicable("Muon needs a hidden matrix: this model has fewer than two linear layers")
    rest = [p for p in model.parameters() if all(p is not q for q in hidden)]
    shared = {"lr": config.lr, "weight_decay": config.weight_decay}
    return [
        torch.optim.Muon(hidden, adjust_lr_fn="match_rms_adamw", **shared),
        torch.optim.AdamW(rest, betas=(0.95, 0.95), **shared),
    ]


def hidden_matrices(model: nn.Module) -> list[Tensor]:
    """Weights of linear layers but the last, which is taken to be the output head. No embeddings, no vectors."""
    return [m.weight for m in model.modules() if isinstance(m, nn.Linear)][:-1]


def pytorch_optimizer_soap(model, config):
    peer = require("pytorch_optimizer", extra="optim")
    return peer.SOAP(model.parameters(), config.lr, weight_decay=config.weight_decay, precondition_frequency=10)


def heavyball_soap(model, config):
    """With SOAP's own settings in place of heavyball's defaults, and uncompiled: compiling takes longer than the run."""
    peer = require("heavyball", extra="optim")
    peer.utils.compile_mode = None
    warnings.filterwarnings("ignore", message="Learning rate changed", module="heavyball")  # every arm has a schedule
    options = {"precondition_frequency": 10, "merge_dims": False, "max_precond_dim": 10000, "use_precond_schedule": False}
    return peer.SOAP(model.parameters(), config.lr, betas=(0.95, 0.95), weight_decay=config.weight_decay, **options)


@dataclass(frozen=True)
class Shortened:
    """An arm that is given only a share of the steps, its schedule rescaled to them."""

    arm: Callable[..., Any]
    share: float

    def __call__(self, model, config):
        return self.arm(model, config)


# -- what is read off ---------------------------------------------------------------------------------------------------


def loss_gap(worse: str, better: str) -> Callable[[Replicate], float]:
    return lambda r: r[worse].val_loss - r[better].val_loss


def best_adamw(r: Replicate) -> Outcome:
    """The better of AdamW with SOAP's betas and with its usual ones, each at its own learning rate."""
    return min((r["adamw"], r["adamw-b90"]), key=lambda outcome: outcome.val_loss)


def below_adamw(arm: str) -> Callable[[Replicate], float]:
    return lambda r: best_adamw(r).val_loss - r[arm].val_loss


def share_of_steps(r: Replicate) -> float:
    return steps_to(r["soap"], best_adamw(r).val_loss) / r.config.steps


def cost_of_frozen_v(r: Replicate) -> float | None:
    """None where the run ends before the first refresh at f=50: the two arms are one until then."""
    return loss_gap("soap-f50-frozen-v", "soap-f50")(r) if r.config.steps > 51 else None


def fitted_share(r: Replicate) -> float:
    """The paper's efficiency: losses of whole, rescaled runs against their length, fitted and solved for AdamW's loss."""
    losses = [r[f"soap-{100 * share:.0f}pct"].val_loss for share in SHARES] + [r["soap"].val_loss]
    return power_law_share(np.array([*SHARES, 1.0]), np.array(losses), best_adamw(r).val_loss)


def power_law_share(shares: np.ndarray, losses: np.ndarray, target: float) -> float:
    """Where the least-squares fit of ``a + b · share^-β`` reaches `target`; infinity if it lies below ``a``.

    >>> x = np.array([0.5, 0.625, 0.75, 0.875, 1.0])
    >>> round(power_law_share(x, 1.5 + 0.4 * x**-0.8, 1.5 + 0.4 * 0.4**-0.8), 3)
    0.4
    """
    best = (math.inf, 0.0, 0.0, 0.0)
    for beta in np.linspace(0.05, 3, 60):
        design = np.stack([np.ones_like(shares), shares**-beta], axis=1)
        (a, b), *_ = np.linalg.lstsq(design, losses, rcond=None)
        best = min(best, (float(np.square(design @ (a, b) - losses).sum()), float(a), float(b), float(beta)))
    _, a, b, beta = best
    return math.inf if b <= 0 or target <= a else ((target - a) / b) ** (-1 / beta)


def figure(results: list[Replicate]):
    from matplotlib.figure import Figure

    shown = Figure(figsize=(11, 4.2), layout="constrained")
    curves, stale = shown.subplots(1, 2, width_ratios=(1.5, 1))
    colours = {"adamw": "#9ca3af", "adamw-b90": "#4b5563", "shampoo": "#b45309", "muon": "#0f766e", "soap": "#4338ca"}

    def over_seeds(arm: str, read: Callable[[Any], Any]) -> np.ndarray:
        return np.array([read(r[arm]) for r in results if arm in r])

    for arm, colour in colours.items():
        values = over_seeds(arm, lambda o: o.curve("val_loss")[1])
        if len(values):
            steps = next(r[arm].curve("val_loss")[0] for r in results if arm in r)
            curves.plot(steps, values.mean(0), color=colour, lw=2, label=arm, marker="o", ms=3)
            curves.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.15, lw=0)
    both = [r for r in results if {"soap", "adamw", "adamw-b90"} <= r.outcomes.keys()]
    shares = [share for share in map(share_of_steps, both) if math.isfinite(share)]
    if both:
        target, steps = np.mean([best_adamw(r).val_loss for r in both]), both[0].config.steps
        curves.axhline(target, color=colours["adamw-b90"], ls="--", lw=1)
        if shares:
            curves.axvline(np.mean(shares) * steps, color=colours["soap"], ls="--", lw=1)
            text = f"SOAP reaches AdamW's final loss\nin {np.mean(shares):.0%} of its steps"
            curves.annotate(
                text, (np.mean(shares) * steps, target), (10, 40), textcoords="offset points", color=colours["soap"]
            )
        lowest = min(r[arm].val_loss for r in results for arm in colours if arm in r)
        curves.set_ylim(lowest - 0.05 * target, 1.9 * target)
    curves.set(xlabel="step", ylabel="validation loss (nats)", title="Loss at each arm's best learning rate")
    curves.legend(frameon=False)

    kinds = {"soap": "#4338ca", "shampoo": "#b45309", "shampoo-half": "#be123c"}
    ticks = {"-f1": "1", "": "10", "-f50": "50", "-never": "never"}
    for arm, colour in kinds.items():
        points = [(i, over_seeds(arm + end, lambda o: o.val_loss)) for i, end in enumerate(ticks)]
        points = [(i, values) for i, values in points if len(values)]
        stale.plot([i for i, _ in points], [v.mean() for _, v in points], color=colour, marker="o", lw=2, label=arm)
        stale.vlines(
            [i for i, _ in points], [v.min() for _, v in points], [v.max() for _, v in points], color=colour, alpha=0.4, lw=3
        )
    stale.set_xticks(range(len(ticks)), list(ticks.values()))
    stale.set(xlabel="steps between refreshes", ylabel="final validation loss", title="What a stale basis costs")
    stale.legend(frameon=False)
    return shown


study = Study(
    prepare=prepare,
    trial=trial,
    arms={
        "adamw": adamw,
        "soap": soap,
        "shampoo": shampoo,
        "muon": muon,
        "soap-factorized": partial(soap, factorized=True),
        "adamw-b90": partial(adamw, betas=(0.9, 0.95)),
        "soap-f1": partial(soap, frequency=1),
        "soap-f50": partial(soap, frequency=50),
        "soap-never": partial(soap, frequency=NEVER),
        "soap-one-sided": partial(soap, one_sided=True),
        "soap-f50-frozen-v": partial(soap, kind=FrozenSecondMoment, frequency=50),
        "soap-unpermuted-v": partial(soap, kind=UnsortedSecondMoment),
        "shampoo-f1": partial(shampoo, frequency=1),
        "shampoo-f50": partial(shampoo, frequency=50),
        "shampoo-half": partial(shampoo, exponent=0.5),
        "shampoo-half-f1": partial(shampoo, exponent=0.5, frequency=1),
        "shampoo-half-f50": partial(shampoo, exponent=0.5, frequency=50),
        "pytorch_optimizer": pytorch_optimizer_soap,
        "heavyball": heavyball_soap,
        **{f"soap-{100 * share:.0f}pct": Shortened(soap, share) for share in SHARES},
    },
    tune=Tune(
        "lr",
        (1e-3, 3.16e-3, 1e-2, 3.16e-2),
        select="val_loss",
        follow={
            **{f"soap-{what}": "soap" for what in ("f1", "f50", "never", "one-sided", "f50-frozen-v", "unpermuted-v")},
            **{f"soap-{100 * share:.0f}pct": "soap" for share in SHARES},
            **{f"shampoo-{what}": "shampoo" for what in ("f1", "f50", "half", "half-f1", "half-f50")},
            "pytorch_optimizer": "soap",
            "heavyball": "soap",
        },
    ),
    scales={
        "smoke": SoapConfig(seeds=1, steps=20, batch=16, width=16, heads=2, layers=1, context=16, windows=64, evaluations=2),
        "desk": SoapConfig(),
        "paper": SoapConfig(
            corpus="allenai/c4:en",
            width=1024,
            layers=24,
            heads=16,
            context=1024,
            batch=2048,
            steps=3200,
            lr=3.16e-3,
            warmup=0.1875,
            windows=4096,
            evaluations=32,
            num_gpus=8,
        ),
    },
    paper=(
        "OLMo-style decoders of 360m and 660m parameters on C4 (hub: allenai/c4, configuration en), T5 tokenizer, context 1024; "
        "360m: batches of about 2M tokens, 3,200 steps, 600 of warm-up; 660m: about 1M tokens, 6,400 steps, 1,200 of warm-up; "
        "weight decay 1e-4, learning rates around 3.16e-3, precondition frequency 10. This study's own network reads bytes, "
        "not T5 tokens, and takes a batch in one pass: give the published model by --case, with a loss that works through a batch in "
        "parts. Expect days on eight H100s for the whole grid."
    ),
    gates=[
        Claim(
            "AdamW has learnt: its final loss is at most 70 % of where it started",
            statistic=lambda r: best_adamw(r).val_loss / best_adamw(r).curve("val_loss")[1][0],
            holds=at_most(0.7),
        ),
    ],
    claims=[
        Claim(
            "SOAP ends at a lower loss than AdamW, the better of two betas (nats between)",
            published="yes",
            statistic=below_adamw("soap"),
            holds=above(0),
        ),
        Claim(
            "SOAP reaches AdamW's final loss in at most 75 % of its steps",
            published="60 %",
            statistic=share_of_steps,
            holds=at_most(0.75),
        ),
        *(
            Claim(
                f"SOAP ends below Shampoo (power 1/4) with a basis {age} (nats between)",
                published="yes",
                statistic=loss_gap(f"shampoo{end}", f"soap{end}"),
                holds=above(0),
            )
            for end, age in (("-f1", "of this step"), ("", "of up to 10 steps"), ("-f50", "of up to 50 steps"))
        ),
        *(
            Claim(text, published="little quality lost", statistic=statistic, holds=bound)
            for name in ("one-sided", "factorized")
            for text, statistic, bound in (
                (f"{name}: at most 0.1 nats above full SOAP", loss_gap(f"soap-{name}", "soap"), at_most(0.1)),
                (f"{name}: below AdamW (nats between)", below_adamw(f"soap-{name}"), above(0)),
            )
        ),
        Claim(
            "Freezing the second moment between refreshes costs, at f=50 (nats between)",
            published="it is why SOAP declines more slowly",
            statistic=cost_of_frozen_v,
            holds=above(0),
        ),
        Claim("Loss added from f=1 to f=50, SOAP", published="least", statistic=loss_gap("soap-f50", "soap-f1")),
        Claim(
            "Loss added from f=1 to f=50, Shampoo power 1/4",
            published="more",
            statistic=loss_gap("shampoo-f50", "shampoo-f1"),
        ),
        Claim(
            "Loss added from f=1 to f=50, Shampoo power 1/2",
            published="more",
            statistic=loss_gap("shampoo-half-f50", "shampoo-half-f1"),
        ),
        Claim("Shampoo power 1/2 above SOAP, both f=1 (nats)", statistic=loss_gap("shampoo-half-f1", "soap-f1")),
        Claim("Loss added by never refreshing the basis", statistic=loss_gap("soap-never", "soap")),
        Claim("Loss added by not permuting the second moment", statistic=loss_gap("soap-unpermuted-v", "soap")),
        Claim("Share of AdamW's steps by the paper's fit over rescaled runs", published="60 %", statistic=fitted_share),
        Claim("Muon above SOAP (nats)", statistic=loss_gap("muon", "soap")),
        Claim("heavyball's SOAP above ours (nats)", statistic=loss_gap("heavyball", "soap")),
        Claim(
            "pytorch_optimizer's SOAP above ours (nats)",
            published="same recursion",
            statistic=loss_gap("pytorch_optimizer", "soap"),
        ),
        Claim("Optimizer's time a step over AdamW's", statistic=lambda r: r["soap"].optimizer_ms / r["adamw"].optimizer_ms),
        Claim("Optimizer's memory over AdamW's", statistic=lambda r: r["soap"].state_mb / r["adamw"].state_mb),
    ],
    figure=figure,
    compare=("val_loss", "optimizer_ms", "state_mb"),
)
