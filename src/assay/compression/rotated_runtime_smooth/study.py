"""Rotated Runtime Smooth beside rounding, SmoothQuant's scales and rotation alone: what do 4-bit activations cost?

Published: LLaMA-3-70B with 4-bit weights and activations reads WikiText-2 at perplexity 6.66, where the best method
before stood at 57.33, with GPTQ weights and windows of 2,048 tokens; the paper puts rotated run-time smoothing before
rotation alone (QuaRot). Desk: SmolLM2-135M on Python's language reference, two windows of 1,024 tokens, weights
left at 16 bits (the activations' error alone) and at 4 bits by rounding with clip search. Whether run-time smoothing
helps, and whether rotation is what makes it safe, can be decided there. Whether it beats rotation *alone* cannot:
SmolLM2 keeps several massive activations in its first token, which after rotation set the scales of every other token. That comparison is therefore reported without a verdict, beside an arm that leaves this token out of the scales.
Only the paper scale can test the published order.

The method is deterministic, so the replicates are windows of text. The rotation's signs are the one random thing: at
16-bit weights, arms that rotate average their log-likelihood over three seeds within a window, since a window is what
the other arms are paired with; at 4 bits they use the first seed. Every arm also meets three synthetic activations
(512 × 1,024, standard normal, with outliers in ten channels, one spike, or four spikes in one token); their error is
taken over the tokens that carry no spike.

An arm is a callable ``(case, w_bits, a_bits, seed) -> PreTrainedModel``: ``case.fresh()`` is a private copy of the
full-precision model to quantise (``case.original()`` the model itself, to read), ``case.calib`` token ids for calibration. Two attributes are optional: ``settings``, a
dictionary of names and (w_bits, a_bits) pairs to be measured at (default: a4w16 and w4a4), and ``seeded``, True where
the seed matters. ``module:function`` without them will do.

``prepare`` must return a ``Case``: a model (a name or path that ``load_language_model`` knows, or the model itself),
the window's token ids ``(tokens,)`` and calibration ids ``(tokens,)``.
"""

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from assay.bench import Claim, Config, Study, above, at_least, at_most, below, between, require
from assay.data import load_text
from assay.models import load_language_model

from . import RRSLinear, packed_bytes
from .arms import A4W16_AND_W4A4, Rounded, SmoothQuant
from .figure import figure
from .measure import integer_gap, layer_errors, synthetic_error
from .quiet import quiet_torchao


class RotatedConfig(Config):
    model: str = "smollm2-135m"
    """A name, hub id or path of a Llama-shaped causal language model."""
    corpus: str = "pydoc"
    """Text: a name, a path to a UTF-8 file, or a hub id."""
    window: int = Field(1024, ge=16)
    """Tokens of a window."""
    windows: int = Field(2, ge=1)
    """Windows, spread evenly over the corpus: the replicates."""
    rotation_seeds: int = Field(3, ge=1)
    """Rotations averaged at 16-bit weights."""
    group: int | Literal["auto"] = 96
    """Channels that share a run-time scale in the grouped arms; must divide the smoothed linears' inputs."""
    weights: Literal["rtn", "gptq"] = "rtn"
    """How weights are rounded."""
    clip: bool = True
    """Search each weight row's clipping."""
    calib: int = Field(512, ge=16)
    """Tokens, from the end of the corpus, for the static scales and for GPTQ."""
    layers: int = Field(0, ge=0)
    """Keep only this many layers, and of the vocabulary what occurs in the text; 0: all. Then pass perplexity=False."""
    perplexity: bool = True
    """False: only the errors of single layers."""
    error_tokens: int = Field(256, ge=8)
    """Tokens on which every linear's own output error is measured."""


class Case(NamedTuple):
    model: Any  # name, path or PreTrainedModel
    window: Tensor  # (tokens,) int64
    calib: Tensor  # (tokens,) int64
    group: int | str = "auto"
    weights: str = "rtn"
    clip: bool = True
    layers: int = 0
    kept: Tensor | None = None  # token ids of the full model, where it is trimmed

    def original(self) -> Any:
        """The full-precision model, not to be changed."""
        model = _loaded(self.model)[0] if isinstance(self.model, str) else self.model
        return model.eval() if self.kept is None else _trimmed(model, self.layers, tuple(self.kept.tolist()))

    def fresh(self) -> Any:
        """A private full-precision copy of the model."""
        return copy.deepcopy(self.original())


@functools.lru_cache(maxsize=1)
def _loaded(name: str) -> Any:
    return load_language_model(name)


@functools.lru_cache(maxsize=1)
def _trimmed(model: Any, layers: int, kept: tuple[int, ...]) -> Any:
    """The first layers, and of the vocabulary the tokens that occur: those layers' activations stay what they were."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers, config.vocab_size = layers, len(kept)
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    weights = model.state_dict()
    small = type(model)(config)
    own = {name: weights[name] for name in small.state_dict()}
    rows = {
        name: weight[list(kept)] for name, weight in own.items() if name.endswith(("embed_tokens.weight", "lm_head.weight"))
    }
    small.load_state_dict(own | rows)
    return small.to(model.dtype).eval()


def prepare(config: RotatedConfig, log: Any) -> Case:
    text = load_text(config.corpus)
    tokenizer = _loaded(config.model)[1]
    if config.layers:  # a trial of the parts: the beginning of the text will do
        text = text[: 16 * (config.windows * config.window + config.calib)]
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    body, calib = ids[: -config.calib], ids[-config.calib :]
    if len(body) < config.windows * config.window:
        raise ValueError(f"the corpus has {len(ids)} tokens; {config.windows} windows of {config.window} and calib do not fit")
    start = int(log.replicate.removeprefix("window")) * (len(body) // config.windows)
    window, kept = body[start : start + config.window], None
    if config.layers:
        kept, renamed = torch.cat([window, calib]).unique(return_inverse=True)
        window, calib = renamed[: len(window)], renamed[len(window) :]
    return Case(config.model, window.clone(), calib.clone(), config.group, config.weights, config.clip, config.layers, kept)


@dataclass(frozen=True)
class TorchAO:
    """torchao's 4-bit weights (groups of 32) with activations rounded to 8 bits a token: a peer, but not A4."""

    settings: dict[str, tuple[int, int]] = field(default_factory=lambda: {"w4a8": (4, 8)}, hash=False)

    def __call__(self, case: Case, w_bits: int, a_bits: int, seed: int) -> Any:
        with quiet_torchao():
            quantization = require("torchao.quantization", extra="compression")
            granularity = require("torchao.quantization.granularity", extra="compression")
        model = case.fresh()
        int4 = torch.int4  # type: ignore[attr-defined]  # there, but not in torch's stubs
        config = quantization.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=int4, weight_granularity=granularity.PerGroup(32)
        )
        quantization.quantize_(model.get_decoder().layers, config)
        return model


def trial(arm: Any, case: Case, config: RotatedConfig, log: Any) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for setting, (w_bits, a_bits) in getattr(arm, "settings", A4W16_AND_W4A4).items():
        seeds = config.rotation_seeds if getattr(arm, "seeded", False) and w_bits == 16 else 1
        losses, changes = [], []
        for seed in log.track(range(seeds), setting):
            model = arm(case, w_bits, a_bits, seed)
            if config.perplexity:
                losses.append(loss(model, case.window))
            if w_bits == a_bits == 16:
                changes.append(logit_change(model, case))
            if seed == 0 and any(isinstance(m, RRSLinear) for m in model.modules()):
                ids = case.window[: config.error_tokens]
                if setting == "a4w16":
                    means, by_layer = layer_errors(model, ids)
                    metrics |= means
                    for depth, error in enumerate(by_layer):
                        log.metric("layer_error", error, depth)
                elif w_bits == 4:
                    held, fp16 = packed_bytes(model)
                    metrics["weight_bytes"] = held / fp16
                    if a_bits == 4:
                        metrics["integer_gap"] = integer_gap(model, ids[:64])
        if losses:
            metrics[f"ppl_{setting}"] = math.exp(sum(losses) / len(losses))
        if changes:
            metrics["logit_change"] = max(changes)
    if isinstance(arm, Rounded) and "a4w16" in arm.settings:
        group = (arm.group or 128) if arm.smooth else None
        metrics |= {
            f"synthetic_{kind}": synthetic_error(kind, log.seed, rotate=arm.seeded, group=group, sink=arm.sink)
            for kind in ("channels", "one_spike", "four_spikes")
        }
    return metrics


@torch.no_grad()
def loss(model: Any, ids: Tensor) -> float:
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    return F.cross_entropy(logits.float(), ids[1:]).item()


@torch.no_grad()
def logit_change(model: Any, case: Case) -> float:
    """Largest change of a logit against the untouched model, on 64 tokens."""
    ids = case.window[None, :64]
    before, after = (m(input_ids=ids, use_cache=False).logits for m in (case.original(), model))
    return (after - before).abs().max().item()


def ratio(arm: str, other: str, metric: str) -> Callable[..., float | None]:
    def statistic(r: Any) -> float | None:
        over, under = r[arm].metrics.get(metric), r[other].metrics.get(metric)
        return None if over is None or under is None else over / under

    return statistic


def measured(arm: str, metric: str) -> Callable[..., float | None]:
    return lambda r: r[arm].metrics.get(metric)


def more_victims(r: Any) -> float:
    return r["rs-g1"].victims_down - r["rrs"].victims_down


def gap_closed(r: Any) -> float | None:
    """Share of what RRS loses to rotation alone that comes back when one token is left out of the scales."""
    rotation, rrs, out = (r[arm].metrics.get("ppl_a4w16") for arm in ("rotation", "rrs", "rrs-sink-out"))
    return None if rotation is None else (rrs - out) / (rrs - rotation)


_RRS: dict[str, Any] = {"rotate": "hadamard", "smooth": True}
study = Study(
    prepare=prepare,
    trial=trial,
    arms={
        "fp": Rounded(settings={"fp": (16, 16)}),
        "fp-rotated": Rounded(rotate="hadamard", settings={"fp": (16, 16)}),
        "w4a16": Rounded(settings={"w4a16": (4, 16)}),
        "w4a16-rotated": Rounded(rotate="hadamard", settings={"w4a16": (4, 16)}),
        "rtn": Rounded(),
        "smoothquant": SmoothQuant(),
        "rs-g1": Rounded(smooth=True, group=1),
        "rs-grouped": Rounded(smooth=True),
        "rotation": Rounded(rotate="hadamard"),
        "rrs": Rounded(**_RRS),
        "rrs-all": Rounded(**_RRS, targets="all"),
        "rrs-sink-out": Rounded(**_RRS, sink=1),
        "torchao-w4a8": TorchAO(),
    },
    scales={
        "smoke": RotatedConfig(
            layers=2, window=128, windows=1, error_tokens=128, calib=64, perplexity=False, rotation_seeds=1, clip=False
        ),
        "desk": RotatedConfig(num_cpus=2),
        "paper": RotatedConfig(
            model="meta-llama/Meta-Llama-3-70B",
            corpus="Salesforce/wikitext:wikitext-2-raw-v1",
            window=2048,
            windows=140,
            group=128,
            weights="gptq",
            calib=128 * 2048,
            rotation_seeds=1,
            num_cpus=16,
        ),
    },
    replicates=lambda config: [f"window{i}" for i in range(config.windows)],
    compare=("ppl_a4w16", "ppl_w4a4", "error_down", "victims_down", "weight_bytes"),
    gates=[Claim("the full-precision model predicts the text (perplexity)", statistic=measured("fp", "ppl_fp"), holds=at_most(60))],
    claims=[
        Claim("run-time scales a channel save rounding: perplexity at A4W16, RS (g=1) / RTN",
              statistic=ratio("rs-g1", "rtn", "ppl_a4w16"), holds=at_most(0.2)),
        Claim("rotation makes run-time scales safe: perplexity at A4W16, RRS / RS (g=1)",
              statistic=ratio("rrs", "rs-g1", "ppl_a4w16"), holds=at_most(0.3)),
        Claim("plain rounding at W4A4 is far worse: perplexity RTN / RRS", published="LLaMA-3-70B: best prior 57.33, RRS 6.66",
              statistic=ratio("rtn", "rrs", "ppl_w4a4"), holds=at_least(20)),
        Claim("more entries are rounded to zero without rotation: down_proj, RS (g=1) − RRS",
              statistic=more_victims, holds=above(0)),
        Claim("rotation changes no logit of the full-precision model",
              statistic=measured("fp-rotated", "logit_change"), holds=below(1e-3)),
        Claim("rotation keeps the perplexity",
              statistic=ratio("fp-rotated", "fp", "ppl_fp"), holds=between(1 - 1e-4, 1 + 1e-4)),
        Claim("integer tiles equal fake quantisation (largest relative gap)",
              statistic=measured("rrs", "integer_gap"), holds=at_most(1e-5)),
        Claim("outliers in ten channels: error RRS / rotation alone",
              statistic=ratio("rrs", "rotation", "synthetic_channels"), holds=at_most(0.65)),
        Claim("one spike: error RRS / rotation alone",
              statistic=ratio("rrs", "rotation", "synthetic_one_spike"), holds=between(0.95, 1.05)),
        Claim("one spike: error RS without rotation / rotation alone",
              statistic=ratio("rs-grouped", "rotation", "synthetic_one_spike"), holds=at_least(2)),
        Claim("packed weights in bytes / 16-bit weights", statistic=measured("rrs", "weight_bytes"), holds=at_most(0.27)),
        Claim("four spikes in one token break the rotated scales: error RRS / rotation alone",
              statistic=ratio("rrs", "rotation", "synthetic_four_spikes"), holds=at_least(3)),
        Claim("perplexity at A4W16, RRS / rotation alone", published="below 1",
              statistic=ratio("rrs", "rotation", "ppl_a4w16")),
        Claim("perplexity at W4A4, RRS / rotation alone", published="below 1",
              statistic=ratio("rrs", "rotation", "ppl_w4a4")),
        Claim("perplexity at A4W16, one token left out of the scales / rotation alone",
              statistic=ratio("rrs-sink-out", "rotation", "ppl_a4w16")),
        Claim("share of RRS's deficit that leaving one token out removes", statistic=gap_closed),
        Claim("perplexity at W4A4, all linears smoothed / the released four", statistic=ratio("rrs-all", "rrs", "ppl_w4a4")),
        Claim("perplexity of 4-bit weights alone, rotated / not", statistic=ratio("w4a16-rotated", "w4a16", "ppl_w4a16")),
    ],
    figure=figure,
    paper=(
        "meta-llama/Meta-Llama-3-8B and -70B, Llama-2-13b/70b, Llama-3.1, Qwen/Qwen1.5-7B and -14B, mistralai/Mistral-7B-v0.1; "
        "Salesforce/wikitext (wikitext-2-raw-v1), windows of 2,048 tokens, GPTQ on 128 of them; zero-shot question answering by "
        "lm-eval. 70B: 140 GB of weights in 16 bits, about a day on four 80 GB GPUs; 8B: 16 GB, about two hours on one."
    ),
)  # fmt: skip
