"""Which layer's weights hold the association: cut one layer at a time and read the prompts again, from that layer on."""

import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .prompts import AssociationProbe, Encoded, Scores, collect, evaluation
from .spectrum import Spectrum, kept_rank
from .truncate import Truncation, embedding_ids, matching, refuse_embedding


@dataclass(frozen=True)
class Cut:
    """One truncation and what the model makes of the prompts with it.

    Attributes:
        layer: Its number; -1 for the model as it is.
        matrices: What was cut in it; empty for the model as it is.
        fraction: ρ.
        scores: Each prompt's probabilities.
        nll: Nats a token on the held-out text; NaN without one.
    """

    layer: int
    matrices: str
    fraction: float
    scores: Scores
    nll: float


def laser_scan(
    model: Any,
    tok: Any,
    prompts: AssociationProbe | Iterable[tuple[str, str, str]],
    layers: Iterable[int],
    fractions: Sequence[float] = (0.5, 0.1, 0.0),
    matrices: Sequence[str] = ("mlp",),
    *,
    text: Tensor | None = None,
    stack: str | None = None,
) -> Any:
    r"""Every layer's matrices cut to every fraction, one at a time: how do answer and distractor fare?

    Chen, Bruna, Bietti: Distributional Associations vs In-Context Reasoning, ICLR 2025 (arXiv 2406.03068), after LASER.

    Each matrix is decomposed once for all fractions, and each cut model is run from the cut layer on: what comes before it
    is kept from one pass of the whole model. The model is left as it was.

    Args:
        model: A causal language model of transformers.
        tok: Its tokenizer.
        prompts: A probe, or its triples.
        layers: Numbers of layers, negative ones from the end.
        fractions: ρ in [0, 1].
        matrices: What is cut, by names or patterns within a layer, each entry on its own: ``"mlp"`` (all its matrices),
            ``"self_attn.o_proj"``, ``"mlp.up_proj"``.
        text: Token ids ``(tokens,)`` of other text, to see what a cut costs: column ``nll``.
        stack: Name of the list of layers, where the model has several of one length.

    Returns:
        A `pandas.DataFrame` with ``layer, matrices, fraction, p_answer, p_distractor, win_rate, accuracy`` and, with
        `text`, ``nll``. Its first row, layer -1, is the model as it is.

    Raises:
        ValueError: layers, fractions or names that are not there; what `truncate_` and `AssociationProbe` refuse.
        FloatingPointError: a model whose logits are not finite.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> model = LlamaForCausalLM(LlamaConfig(
        ...     vocab_size=300, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2))
        >>> def tok(text):
        ...     return {"input_ids": list(text.encode())}
        >>> table = laser_scan(model, tok, [("ab", "c", "d")], layers=range(2), fractions=[0.0])
        >>> list(table.layer)
        [-1, 0, 1]
    """
    import pandas as pd

    cuts = scan_cuts(model, tok, prompts, layers, fractions, matrices, text=text, stack=stack)
    rows = [
        {"layer": cut.layer, "matrices": cut.matrices, "fraction": cut.fraction, **cut.scores.summary()}
        | ({} if text is None else {"nll": cut.nll})
        for cut in cuts
    ]
    return pd.DataFrame(rows)


@torch.no_grad()
def scan_cuts(
    model: Any,
    tok: Any,
    prompts: AssociationProbe | Iterable[tuple[str, str, str]],
    layers: Iterable[int],
    fractions: Sequence[float],
    matrices: Sequence[str] = ("mlp",),
    *,
    text: Tensor | None = None,
    stack: str | None = None,
) -> Iterator[Cut]:
    """What `laser_scan` tabulates, with every prompt's own numbers; see there. The first is the model as it is."""
    probe = prompts if isinstance(prompts, AssociationProbe) else AssociationProbe(prompts)
    name, modules = layer_stack(model, stack)
    numbers = _layer_numbers(layers, len(modules))
    for fraction in fractions:
        kept_rank(fraction, 1)
    if text is not None and (text.ndim != 1 or len(text) < 2):
        raise ValueError(f"text must be (tokens,), at least two of them, got {tuple(text.shape)}")
    embeddings = embedding_ids(model)
    plan = {(i, what): matching(model, f"{name}.{i}.{what}") for i in numbers for what in matrices}
    for found in plan.values():
        for matrix, weight in found.items():
            refuse_embedding(matrix, weight, embeddings)
    passes = _Passes(model, modules, probe.encode(tok), text, numbers)

    with evaluation(model):
        base = Cut(-1, "", 1.0, *passes.whole())
        yield base
        for (i, what), found in plan.items():
            spectra: dict[str, Spectrum] = {}
            for fraction in fractions:
                handle = Truncation()
                for matrix, weight in found.items():
                    if 0 < fraction < 1:
                        if matrix not in spectra:
                            spectra[matrix] = Spectrum(weight, matrix)
                        handle.replace(matrix, weight, spectra[matrix].truncate(fraction))
                    elif fraction == 0:
                        handle.replace(matrix, weight, torch.zeros_like(weight))
                try:
                    scores, nll = passes.after(i) if fraction < 1 else (base.scores, base.nll)
                finally:
                    handle.restore()
                yield Cut(i, what, float(fraction), scores, nll)


def best_cut(cuts: Iterable[Cut], rows: Tensor | None = None, max_nll: float | None = None) -> Cut:
    """The cut with the highest mean probability of the answer on some of the prompts; no cut at all where none helps.

    Args:
        cuts: What `scan_cuts` yields, the model as it is first.
        rows: The prompts to choose on, ids ``(n,)``; None: all. Judge on the others.
        max_nll: Largest rise of nats a token on the held-out text that is allowed; None: any.

    Raises:
        ValueError: no cuts, or a budget without a text.

    Example:
        >>> before = Scores(torch.tensor([0.1]), torch.tensor([0.3]), torch.tensor([False]))
        >>> after = Scores(torch.tensor([0.2]), torch.tensor([0.1]), torch.tensor([False]))
        >>> cuts = [Cut(-1, "", 1.0, before, 2.0), Cut(3, "mlp", 0.0, after, 2.3), Cut(4, "mlp", 0.0, before, 2.0)]
        >>> best_cut(cuts).layer, best_cut(cuts, max_nll=0.1).layer
        (3, -1)
    """
    cuts = list(cuts)
    if not cuts:
        raise ValueError("cuts must hold at least the model as it is")
    if max_nll is not None and math.isnan(cuts[0].nll):
        raise ValueError("max_nll needs a scan with text=")
    affordable = [cut for cut in cuts if max_nll is None or cut is cuts[0] or cut.nll - cuts[0].nll <= max_nll]
    return max(affordable, key=lambda cut: cut.scores.summary(rows)["p_answer"])  # of equals the first: no cut


def layer_stack(model: Any, stack: str | None = None) -> tuple[str, list[nn.Module]]:
    """Name and members of a model's list of layers: the one as long as ``config.num_hidden_layers``.

    Raises:
        ValueError: none or several, with their names.
    """
    if stack is not None:
        try:
            return stack, list(model.get_submodule(stack).children())
        except AttributeError:
            raise ValueError(f"stack: the model has no module {stack!r}") from None
    depth = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    lists = [(name, list(m)) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    if len(lists) != 1:
        names = ", ".join(name for name, _ in lists) or "none"
        raise ValueError(f"expected one list of {depth} layers in {type(model).__name__}, found {names}: pass stack=")
    return lists[0]


class _Passes:
    """Prompts and text through the whole model once, and from then on from any recorded layer."""

    def __init__(self, model: Any, layers: list[nn.Module], groups: list[Encoded], text: Tensor | None, numbers: list[int]):
        self._model, self._layers, self._groups, self._text = model, layers, groups, text
        self._numbers = numbers
        self._seen: list[dict[int, Any]] = []  # for every input: layer number to what entered it
        self._last_only = "logits_to_keep" in inspect.signature(model.forward).parameters

    def whole(self) -> tuple[Scores, float]:
        self._seen = [{} for _ in range(len(self._groups) + (self._text is not None))]
        return self._measure(lambda place: _recording(self._layers, self._numbers, self._seen[place]))

    def after(self, layer: int) -> tuple[Scores, float]:
        return self._measure(lambda place: _resuming(self._layers, layer, self._seen[place].get(layer)))

    def _measure(self, context: Any) -> tuple[Scores, float]:
        def run() -> Iterator[tuple[Encoded, Tensor]]:
            for place, group in enumerate(self._groups):
                with context(place):
                    yield group, self._logits(group.ids, 1)[:, -1]

        scores = collect(run(), sum(len(group.places) for group in self._groups))
        if self._text is None:
            return scores, math.nan
        with context(len(self._groups)):
            logits = self._logits(self._text[None], 0)[0, :-1]
        return scores, float(F.cross_entropy(logits.float(), self._text[1:].to(logits.device)))

    def _logits(self, ids: Tensor, keep: int) -> Tensor:
        device = next(self._model.parameters()).device
        extra = {"logits_to_keep": keep} if self._last_only else {}
        return self._model(input_ids=ids.to(device), use_cache=False, **extra).logits


@contextmanager
def _recording(layers: list[nn.Module], numbers: list[int], seen: dict[int, Any]) -> Iterator[None]:
    """Keeps what enters each of the numbered layers: the output of the one before."""

    def keep(number: int) -> Any:
        return lambda _module, _inputs, output: seen.__setitem__(number, output)

    with ExitStack() as hooks:
        for number in numbers:
            if number:
                handle = layers[number - 1].register_forward_hook(keep(number))
                hooks.callback(handle.remove)
        yield


@contextmanager
def _resuming(layers: list[nn.Module], number: int, output: Any) -> Iterator[None]:
    """Layers below `number` answer at once with what the one just below it gave.

    Their ``forward`` is exchanged and not they themselves, so that what a model reads off its layers stays there.
    """
    with ExitStack() as undo:
        for layer in layers[:number]:
            own = layer.__dict__.get("forward")
            layer.forward = lambda *_, **__: output
            if own is None:
                undo.callback(layer.__dict__.pop, "forward")
            else:
                undo.callback(layer.__dict__.__setitem__, "forward", own)
        yield


def _layer_numbers(layers: Iterable[int], depth: int) -> list[int]:
    numbers = [int(i) for i in layers]
    wrong = [i for i in numbers if not -depth <= i < depth]
    if wrong or not numbers:
        raise ValueError(f"layers must be numbers in [{-depth}, {depth}), at least one, got {wrong or numbers}")
    return [i % depth for i in numbers]
