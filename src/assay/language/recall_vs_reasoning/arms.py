"""What the study removes from a trained model: chosen weights, a random set of them, one direction, or the token itself."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .scan import best_cut
from .spectrum import Which
from .truncate import Target, Truncation, matching, project_out, truncated

LAST_FF = "blocks.1.ff"


@dataclass(frozen=True)
class Remove:
    """Named weights cut to low rank."""

    fractions: Mapping[Target, float] = field(hash=False)
    which: Which = "top"

    def __call__(self, case: Any) -> AbstractContextManager[Any]:
        return truncated(case.model, self.fractions, self.which)


def out_value(block: int) -> tuple[str, str]:
    """W_O W_V of a block, counted from 0."""
    return f"blocks.{block}.attention.out", f"blocks.{block}.attention.value"


@dataclass(frozen=True)
class WithoutTop:
    """Weights without their largest singular value; of a pair of names the product."""

    target: Target

    def __call__(self, case: Any) -> AbstractContextManager[Any]:
        first = self.target if isinstance(self.target, str) else self.target[0]
        size = min(min(weight.shape) for weight in matching(case.model, first).values())
        return truncated(case.model, {self.target: 1 - 1 / size}, "bottom")


@contextmanager
def random_drop(case: Any) -> Iterator[None]:
    """Random entries of all trained matrices set to zero, of the last feed-forward's sum of squares together."""
    model = case.model
    mass = sum(float(p.detach().square().sum()) for p in model.get_submodule(LAST_FF).parameters())
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    flat = torch.cat([p.detach().flatten() for p in weights.values()])
    order = torch.randperm(len(flat)).to(flat.device)
    enough = int((flat[order].double().square().cumsum(0) < mass).sum())
    flat[order[:enough]] = 0
    handle = Truncation()
    for (name, p), values in zip(weights.items(), flat.split([p.numel() for p in weights.values()]), strict=True):
        handle.replace(name, p, values.reshape(p.shape))
    try:
        yield
    finally:
        handle.restore()


@dataclass(frozen=True)
class Chosen:
    """The single-layer cut that serves the answer best on the prompts to choose on.

    Args:
        part: ``"mlp"`` or ``"attention"``.
        max_nll: Budget of nats a token on held-out text.
    """

    part: str
    max_nll: float | None = None

    def __call__(self, case: Any) -> AbstractContextManager[Any]:
        cut = best_cut(case.scan(self.part), case.tune, self.max_nll)
        return nullcontext() if cut.layer < 0 else truncated(case.model, {case.name_of(cut.layer, cut.matrices): cut.fraction})


def random_layer(case: Any) -> AbstractContextManager[Any]:
    """The fraction that `Chosen` takes, in another layer, drawn from those it chose among."""
    cuts = case.scan("mlp")
    chosen = best_cut(cuts, case.tune)
    others = sorted({cut.layer for cut in cuts[1:]} - {chosen.layer}) or [chosen.layer]
    layer = others[int(torch.randint(len(others), ()))]
    return truncated(case.model, {case.name_of(layer, cuts[1].matrices): chosen.fraction})


@contextmanager
def direction(case: Any) -> Iterator[None]:
    """The distractor's direction taken out of what one layer's MLP writes, in the layer that serves the answer best."""
    best: tuple[float, int] | None = None
    for layer in sorted({cut.layer for cut in case.scan("mlp")[1:]}):
        handle = project_out(case.writer(layer), case.distractor_direction())
        try:
            p = case.tuning_scores().summary()["p_answer"]
        finally:
            handle.restore()
        best = max(best or (p, layer), (p, layer))
    assert best is not None
    handle = project_out(case.writer(best[1]), case.distractor_direction())
    try:
        yield
    finally:
        handle.restore()


@contextmanager
def logit_bias(case: Any) -> Iterator[None]:
    """A constant taken off the generic token's logit.

    On prompts it is the constant with which the token becomes as rare as the chosen cut makes it, on the prompts to choose
    on; in the recall task the token is ruled out.
    """
    constant = 30.0 if case.tune is None else matching_bias(case)
    ids = case.generic_tokens()

    def lower(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        logits = output if isinstance(output, Tensor) else output.logits
        logits[..., ids] -= constant
        return output

    hook = case.model.register_forward_hook(lower)
    try:
        with torch.no_grad():
            yield
    finally:
        hook.remove()


def matching_bias(case: Any) -> float:
    """By bisection: p → p e^{-c} / (1 - p + p e^{-c}) on each prompt."""
    cuts = case.scan("mlp")
    before: Tensor = cuts[0].scores.p_distractor[case.tune].double()
    wanted = best_cut(cuts, case.tune).scores.summary(case.tune)["p_distractor"]
    low, high = -30.0, 30.0
    for _ in range(60):
        c = torch.tensor((low + high) / 2, dtype=torch.double)
        now = float((before * (-c).exp() / (1 - before + before * (-c).exp())).mean())
        low, high = (float(c), high) if now > wanted else (low, float(c))
    return (low + high) / 2
