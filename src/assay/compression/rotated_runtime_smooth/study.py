"""Rotated Runtime Smooth beside rounding, SmoothQuant's scales and rotation alone: what do 4-bit activations cost?

Published: LLaMA-3-70B with 4-bit weights and activations reads WikiText-2 at perplexity 6.66, where the best method
before stood at 57.33; run-time smoothing beats rotation alone (QuaRot) in every model of the paper, with GPTQ weights
and windows of 2,048 tokens. Desk: SmolLM2-135M on Python's language reference, two windows of 1,024 tokens, weights
left at 16 bits (the activations' error alone) and at 4 bits by rounding with clip search. Whether run-time smoothing
helps, and whether rotation is what makes it safe, can be decided there. Whether it beats rotation *alone* cannot:
small models keep several massive activations in their first token, which after rotation set the scales of every other
token. That comparison is therefore reported without a verdict, beside an arm that leaves this token out of the scales.
Only the paper scale can test the published order.

The method is deterministic, so the replicates are windows of text. The rotation's signs are the one random thing: at
16-bit weights, arms that rotate average their log-likelihood over three seeds within a window, since a window is what
the other arms are paired with; at 4 bits they use the first seed. Every arm also meets three synthetic activations
(512 × 1,024, standard normal, with outliers in ten channels, one spike, or four spikes in one token); their error is
taken over the tokens that carry no spike.

An arm is a callable ``(case, w_bits, a_bits, seed) -> PreTrainedModel``: ``case.fresh()`` is a private copy of the
full-precision model to quantise, ``case.calib`` token ids for calibration. Two attributes are optional: ``settings``, a
dictionary of names and (w_bits, a_bits) pairs to be measured at (default: a4w16 and w4a4), and ``seeded``, True where
the seed matters. ``module:function`` without them will do.

``prepare`` must return a ``Case``: a model (a name or path that ``load_language_model`` knows, or the model itself),
the window's token ids ``(tokens,)`` and calibration ids ``(tokens,)``.
"""

import copy
import functools
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from assay.bench import Claim, Config, Study, above, at_least, at_most, below, between, require
from assay.data import load_text
from assay.models import load_language_model

from . import RRSConfig, RRSLinear, configure_activations, packed_bytes, quantize_rrs
from .config import RELEASED_TARGETS
from .measure import integer_gap, layer_errors, synthetic_error
from .smoothquant import quantize_smoothquant

A4W16_AND_W4A4 = {"a4w16": (16, 4), "w4a4": (4, 4)}


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

    def fresh(self) -> Any:
        """A private full-precision copy of the model."""
        model = _loaded(self.model)[0] if isinstance(self.model, str) else self.model
        if self.kept is None:
            return copy.deepcopy(model).eval()
        return _trimmed(model, self.layers, self.kept)


@functools.lru_cache(maxsize=1)
def _loaded(name: str) -> Any:
    return load_language_model(name)


def _trimmed(model: Any, layers: int, kept: Tensor) -> Any:
    """The first layers, and of the vocabulary the tokens that occur: those layers' activations stay what they were."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers, config.vocab_size = layers, len(kept)
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    weights = model.state_dict()
    small = type(model)(config)
    own = {name: weights[name] for name in small.state_dict()}
    rows = {name: weight[kept] for name, weight in own.items() if name.endswith(("embed_tokens.weight", "lm_head.weight"))}
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
class Rounded:
    """An arm made of this method's own parts, so that arms differ in nothing but what they are named after."""

    rotate: str = "none"
    smooth: bool = False
    group: int | None = None  # None: the configuration's
    targets: tuple[str, ...] | str = RELEASED_TARGETS
    sink: int = 0
    settings: dict[str, tuple[int, int]] = field(default_factory=lambda: A4W16_AND_W4A4, hash=False)

    @property
    def seeded(self) -> bool:
        return self.rotate != "none"

    def config(self, case: Case, w_bits: int, a_bits: int, seed: int = 0) -> RRSConfig:
        return RRSConfig(
            w_bits=w_bits,
            a_bits=a_bits,
            rotate=self.rotate,
            group=self.group or case.group,
            smooth=self.smooth,
            smooth_targets=self.targets,
            weight_method=case.weights,
            w_clip=case.clip,
            sink=self.sink,
            seed=seed,
        )

    def __call__(self, case: Case, w_bits: int, a_bits: int, seed: int) -> Any:
        model = rounded_weights(case, self.rotate, seed if self.seeded else 0, w_bits)
        return configure_activations(model, self.config(case, w_bits, a_bits, seed))


_WEIGHTS: dict[tuple[Any, ...], Any] = {}


def shared_weights(case: Case, key: tuple[Any, ...], build: Callable[[], Any]) -> Any:
    """A model with its weights done, kept for all arms and windows that differ only in activations."""
    texts = [None if ids is None else hashlib.sha256(ids.numpy().tobytes()).hexdigest() for ids in (case.calib, case.kept)]
    key = (case.model, case.layers, case.weights, case.clip, *texts, *key)  # holds the model: an id could be taken again
    if key not in _WEIGHTS:
        while len(_WEIGHTS) >= 7:  # about 3.5 GB of SmolLM2
            _WEIGHTS.pop(next(iter(_WEIGHTS)))
        _WEIGHTS[key] = build()
    return _WEIGHTS[key]


def rounded_weights(case: Case, rotate: str, seed: int, w_bits: int) -> Any:
    def build() -> Any:
        config = RRSConfig(
            w_bits=w_bits, a_bits=16, rotate=rotate, group="auto", weight_method=case.weights, w_clip=case.clip, seed=seed
        )
        return quantize_rrs(case.fresh(), config, calib=case.calib.split(2048))

    return shared_weights(case, (rotate, seed, w_bits), build)


@dataclass(frozen=True)
class SmoothQuant:
    """Static scales from calibration text, moved into the weights."""

    alpha: float = 0.5

    def __call__(self, case: Case, w_bits: int, a_bits: int, seed: int) -> Any:
        def build() -> Any:
            return quantize_smoothquant(case.fresh(), case.calib[:2048], w_bits=w_bits, alpha=self.alpha, w_clip=case.clip)

        model = shared_weights(case, (self, w_bits), build) if w_bits < 16 else build()
        return configure_activations(model, RRSConfig(w_bits=w_bits, a_bits=a_bits, rotate="none", smooth=False))


@dataclass(frozen=True)
class TorchAO:
    """torchao's 4-bit weights (groups of 32) with activations rounded to 8 bits a token: a peer, but not A4."""

    settings: dict[str, tuple[int, int]] = field(default_factory=lambda: {"w4a8": (4, 8)}, hash=False)

    def __call__(self, case: Case, w_bits: int, a_bits: int, seed: int) -> Any:
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
    return (
        (model(input_ids=ids, use_cache=False).logits - case.fresh()(input_ids=ids, use_cache=False).logits).abs().max().item()
    )


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


def figure(results: list[Any]) -> Figure:
    fig = Figure(figsize=(10, 4), layout="constrained")
    depth, bars = fig.subplots(1, 2)
    for arm in ("rtn", "rotation", "rrs", "rrs-sink-out"):
        curves = [r[arm].curve("layer_error") for r in results]
        curves = [(steps, values) for steps, values in curves if len(steps)]
        if curves:
            depth.plot(curves[0][0], sum(values for _, values in curves) / len(curves), marker=".", label=arm)
    depth.set(
        xlabel="layer",
        ylabel="relative output error, mean of 7 linears",
        title="4-bit activations, exact weights",
        ylim=(0, None),
    )
    depth.legend()
    arms = ("rtn", "smoothquant", "rs-g1", "rs-grouped", "rotation", "rrs", "rrs-all", "rrs-sink-out")
    for offset, setting in ((-0.2, "a4w16"), (0.2, "w4a4")):
        for i, arm in enumerate(arms):
            values = [v for r in results if arm in r and (v := r[arm].metrics.get(f"ppl_{setting}"))]
            if values:
                height = math.exp(sum(map(math.log, values)) / len(values))
                bars.bar(
                    i + offset,
                    height,
                    0.4,
                    color="C0" if setting == "a4w16" else "C1",
                    label=setting.upper() if i == 0 else None,
                )
    full = [v for r in results if "fp" in r and (v := r["fp"].metrics.get("ppl_fp"))]
    if full:
        bars.axhline(math.exp(sum(map(math.log, full)) / len(full)), color="black", linestyle=":", label="full precision")
        bars.set_yscale("log")
        bars.legend()
    bars.set_xticks(range(len(arms)), arms, rotation=40, ha="right")
    bars.set(ylabel="perplexity", title="geometric mean over windows")
    return fig


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
        Claim("run-time scales a channel save rounding: perplexity at A4W16, RS (g=1) / RTN", published="RTN diverges",
              statistic=ratio("rs-g1", "rtn", "ppl_a4w16"), holds=at_most(0.2)),
        Claim("rotation makes run-time scales safe: perplexity at A4W16, RRS / RS (g=1)", published="RRS best in every model",
              statistic=ratio("rrs", "rs-g1", "ppl_a4w16"), holds=at_most(0.3)),
        Claim("plain rounding at W4A4 is far worse: perplexity RTN / RRS", published="57.33 → 6.66 from the best rival",
              statistic=ratio("rtn", "rrs", "ppl_w4a4"), holds=at_least(20)),
        Claim("more entries are rounded to zero without rotation: down_proj, RS (g=1) − RRS", published="victims",
              statistic=more_victims, holds=above(0)),
        Claim("rotation changes no logit of the full-precision model", published="exact",
              statistic=measured("fp-rotated", "logit_change"), holds=below(1e-3)),
        Claim("rotation keeps the perplexity", published="exact",
              statistic=ratio("fp-rotated", "fp", "ppl_fp"), holds=between(1 - 1e-4, 1 + 1e-4)),
        Claim("integer tiles equal fake quantisation (largest relative gap)", published="exact",
              statistic=measured("rrs", "integer_gap"), holds=at_most(1e-5)),
        Claim("outliers in ten channels: error RRS / rotation alone", published="smoothing removes channel outliers",
              statistic=ratio("rrs", "rotation", "synthetic_channels"), holds=at_most(0.65)),
        Claim("one spike: error RRS / rotation alone", published="rotation removes spikes",
              statistic=ratio("rrs", "rotation", "synthetic_one_spike"), holds=between(0.95, 1.05)),
        Claim("one spike: error RS without rotation / rotation alone", published="victims",
              statistic=ratio("rs-grouped", "rotation", "synthetic_one_spike"), holds=at_least(2)),
        Claim("packed weights in bytes / 16-bit weights", statistic=measured("rrs", "weight_bytes"), holds=at_most(0.27)),
        Claim("four spikes in one token: error RRS / rotation alone", statistic=ratio("rrs", "rotation", "synthetic_four_spikes")),
        Claim("perplexity at A4W16, RRS / rotation alone", published="< 1 in every model",
              statistic=ratio("rrs", "rotation", "ppl_a4w16")),
        Claim("perplexity at W4A4, RRS / rotation alone", published="< 1 in every model",
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
