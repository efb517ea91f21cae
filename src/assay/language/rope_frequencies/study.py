"""Which rotary frequencies do trained models use, and is it harmless to stop the lowest?

Published: Gemma 7B uses its lowest frequencies most; its few positional heads live on the highest ones; RoPE need not
decay with distance, and NoPE cannot look at positions; a Gemma 2B trained with the highest three quarters alone (0.75-RoPE)
reads Wiki at perplexity 4.4414 (RoPE: 4.4627) and FlanV2 at 6.4422 (6.4429).

Desk, in four cases. ``theory`` computes the propositions. A case with a model's name, ``smollm2-135m`` and ``gemma3-270m``
(this one on a single window), audits the trained model on 512 tokens of Python's language reference: shares of usage by
frequency beside those of the same architecture untrained and of shuffled tokens, heads that look at the token before, and
what is left of them without one quarter of their own frequencies. Then the model reads 2,048 tokens while an arm's pairs
stand still: perplexity of the first 512 and, with everything before them in view, of the last 512. ``train`` trains a Llama
of 0.8 million weights on 276,000 bytes of source from scratch, context 256, and reads 1,024.

Desk cannot show the published gains, 0.5 % and 0.01 %: they are far below what another seed changes at this size. It judges
parity. Within a short window the lowest frequencies hardly turn (reported: the most that
the lowest quarter turns), so that stopping them in a trained model is partly harmless for a trivial reason; the shares of usage are not.

An arm is a callable ``(head_dim, base) -> inv_freq``: the frequency in radians a token of each of the ``head_dim // 2`` pairs,
highest first; the model is trained with them, or, if it is trained already, reads with them.

``prepare`` must return a ``Case``: a ``model`` (a name that ``load_language_model`` knows, a PreTrainedModel, or a config to
build one from, which is then trained), ``text (windows, tokens)`` to read, ``train (steps, batch, context + 1)`` or None, and
``short``, the length that is audited and at which perplexity is taken. For a case of your own add ``--set cases=mine``; for
a model of yours by name, ``--set cases=owner/name``.
"""

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from assay.bench import Claim, Config, NotApplicable, Replicate, Study, above, at_least, at_most
from assay.data import load_text
from assay.models import load_language_model

from . import p_rope_inv_freq, partial_inv_freq, rotary_frequencies
from .audit import audit
from .figure import figure
from .frequencies import frequency_tables
from .propositions import propositions
from .reading import fresh, perplexities, train

LARGER_BASE = 500_000.0
ONLY_TRAINED = ("theta-5e5", "partial-0.75")
"""Arms that mean nothing to a model trained otherwise; run with ``--set rivals=true``."""
IN_GEMMA = ("rope", "p-rope-0.75", "p-rope-0.75-reversed")
"""The arms that read with Gemma 3, whose vocabulary makes every reading dear."""


class RopeConfig(Config):
    cases: tuple[str, ...] = ("theory", "smollm2-135m", "gemma3-270m", "train")
    """What is run: `theory`, `train`, and models to audit, by name."""
    once: tuple[str, ...] = ("gemma3-270m",)
    """Cases that are run for the first seed alone."""
    rivals: bool = False
    """Also train with base 500,000 and with NeoX's partial rotary factor."""
    corpus: str = "pydoc"
    """Text that models are audited on: a name, a path to a UTF-8 file, or a hub id."""
    window: int = Field(512, ge=16)
    """Tokens that are audited."""
    long: int = Field(2048, ge=32)
    """Tokens that are read; at least twice the window."""
    source: str = "stdlib"
    """Text to train on, byte by byte."""
    steps: int = Field(270, ge=1)
    """Training steps."""
    batch: int = Field(4, ge=1)
    """Sequences a step."""
    context: int = Field(256, ge=16)
    """Bytes of a sequence in training."""
    extrapolate: int = Field(1024, ge=32)
    """Bytes that a trained model reads; at least twice the context."""
    windows: int = Field(24, ge=1)
    """Held-out sequences that it reads."""
    hidden: int = Field(128, ge=4)
    """Width of the model that is trained."""
    layers: int = Field(4, ge=1)
    """Its layers."""
    head_dim: int = Field(64, ge=2, multiple_of=2)
    """Its head size; the number of heads is hidden / head_dim."""
    base: float = Field(10_000.0, gt=1)
    """Its rotary base."""
    lr: float = Field(1e-3, gt=0)
    """Its learning rate (AdamW, warm-up over a tenth, cosine to a tenth)."""
    draws: int = Field(100_000, ge=100)
    """Gaussian pairs in the second proposition."""


class Case(NamedTuple):
    model: Any
    text: Tensor
    train: Tensor | None = None
    short: int = 512


# -- cases --------------------------------------------------------------------------------------------------------------


def prepare(config, log) -> Case:
    case = log.replicate.rpartition("/")[0] or log.replicate
    if case == "theory":
        return Case(None, torch.empty(0, 0))
    if case == "train":
        return training_case(config)
    tokenizer = loaded(case)[1]
    text = load_text(config.corpus)
    ids = torch.tensor(tokenizer(text, verbose=False, add_special_tokens=False)["input_ids"])
    start = int(torch.randint(len(ids) - config.long, ()))
    window = ids[start : start + config.long].clone()
    if tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id:  # Gemma was never trained without it
        window[0] = tokenizer.bos_token_id
    return Case(case, window[None], None, config.window)


def training_case(config) -> Case:
    data = torch.frombuffer(bytearray(load_text(config.source, limit=4_000_000).encode()), dtype=torch.uint8).long()
    places = torch.linspace(0, len(data) - config.extrapolate, config.windows).long()  # a held-out end would be one odd file
    held_out = places[:, None] + torch.arange(config.extrapolate)
    kept = torch.ones(len(data), dtype=torch.bool)
    kept[held_out] = False
    train = data[kept]
    at = torch.randint(len(train) - config.context - 1, (config.steps, config.batch))
    model = LlamaConfig(
        vocab_size=256, hidden_size=config.hidden, intermediate_size=8 * config.hidden // 3, num_hidden_layers=config.layers,
        num_attention_heads=config.hidden // config.head_dim, num_key_value_heads=config.hidden // config.head_dim,
        head_dim=config.head_dim, max_position_embeddings=config.extrapolate, tie_word_embeddings=True,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": config.base},
    )  # fmt: skip
    return Case(model, data[held_out], train[at[..., None] + torch.arange(config.context + 1)], config.context)


@functools.lru_cache(maxsize=1)
def loaded(name: str) -> Any:
    return load_language_model(name)


# -- one arm on one case ------------------------------------------------------------------------------------------------


def trial(arm, case: Case, config, log) -> dict[str, float]:
    name = log.replicate.rpartition("/")[0]
    if log.arm in ONLY_TRAINED and not (config.rivals and case.train is not None):
        raise NotApplicable("trained from scratch alone, with --set rivals=true")
    if case.model is None:
        return theory_trial(arm, config, log)
    if log.arm not in IN_GEMMA and name == "gemma3-270m":
        raise NotApplicable(f"reads with {', '.join(IN_GEMMA)} alone")
    if isinstance(case.model, PreTrainedConfig):
        model = fresh(case.model, log.seed)
    else:
        model = loaded(case.model)[0] if isinstance(case.model, str) else case.model
    model = model.to(log.device).eval()
    prefix = "train" if case.train is not None else "read"
    metrics: dict[str, float] = {}
    with turning(model, arm, case, log):
        if case.train is not None:
            train(model, case.train.to(log.device), config.lr, log)
        metrics |= {f"{prefix}_{what}": value for what, value in perplexities(model, case.text, case.short, log).items()}
        if log.arm == "rope":
            text = case.text[:4, : case.short]
            metrics |= {f"{prefix}_{what}": value for what, value in audit(model, text, log).items()}
            metrics[f"{prefix}_angle_low_long"] = metrics[f"{prefix}_angle_low"] * case.text.shape[1] / case.short
    return metrics


def turning(model: Any, arm: Any, case: Case, log) -> Any:
    """The model at the arm's frequencies. A trained one under `rope` is what it is: its own may be scaled, or p-RoPE already."""
    if log.arm == "rope" and case.train is None:
        return nullcontext()
    try:
        frequency_tables(model)
    except ValueError as refused:
        raise NotApplicable(str(refused)) from refused
    return rotary_frequencies(model, arm)


def theory_trial(arm, config, log) -> dict[str, float]:
    """How many frequencies differ from transformers'; with RoPE also the propositions."""
    found = propositions(log.seed, config.draws) if log.arm == "rope" else {}
    p = {"rope": 1.0, "nope": 0.0, "p-rope-0.25": 0.25, "p-rope-0.75": 0.75}.get(log.arm)
    if p is None:
        raise NotApplicable("transformers has no frequencies of this kind")
    differ = 0
    for head_dim in (64, 80, 128, 256):
        for base in (1e4, 1e5, 5e5, 1e6):
            rope = {"rope_type": "proportional", "rope_theta": base, "partial_rotary_factor": p}
            theirs, _ = ROPE_INIT_FUNCTIONS["proportional"](LlamaConfig(head_dim=head_dim, rope_parameters=rope))
            differ += int((arm(head_dim, base) != theirs).sum())
    return {"theory_differ": float(differ), **found}


# -- what is read off ---------------------------------------------------------------------------------------------------


def case_of(r: Replicate) -> str:
    return r.name.rpartition("/")[0]


def only_in(case: str, statistic: Callable[[Replicate], float]) -> Callable[[Replicate], float | None]:
    """The statistic on the replicates of one case, None on the others."""
    return lambda r: statistic(r) if case_of(r) == case else None


def of_rope(case: str, metric: str) -> Callable[[Replicate], float | None]:
    return only_in(case, lambda r: r["rope"].metrics[metric])


def change(metric: str, arm: str, other: str) -> Callable[[Replicate], float]:
    """By how much of the other's the arm's perplexity is above it."""
    return lambda r: r[arm].metrics[metric] / r[other].metrics[metric] - 1


def beyond(arm: str) -> Callable[[Replicate], float]:
    return lambda r: r[arm].train_ppl_long / r[arm].train_ppl - 1


def over_untrained(r: Replicate) -> float:
    return r["rope"].read_low - r["rope"].read_low_untrained


def lowest_over_highest(metric: str) -> Callable[[Replicate], float]:
    """log perplexity with the highest quarter still, above that with the lowest still: > 0 where the lowest matter less."""
    return lambda r: math.log(r["p-rope-0.75-reversed"].metrics[metric] / r["p-rope-0.75"].metrics[metric])


def behind_both(r: Replicate) -> float:
    return r["nope"].train_ppl / max(r["rope"].train_ppl, r["p-rope-0.75"].train_ppl) - 1


SMOLLM, GEMMA = "smollm2-135m", "gemma3-270m"
positions_matter = Claim(
    "RoPE beats NoPE, or the model is too small to need positions (perplexity of NoPE above RoPE's)",
    statistic=only_in("train", change("train_ppl", "nope", "rope")), holds=at_least(0.02),
)  # fmt: skip

study = Study(
    prepare=prepare,
    trial=trial,
    arms={
        "rope": partial(p_rope_inv_freq, p=1.0),
        "p-rope-0.75": partial(p_rope_inv_freq, p=0.75),
        "p-rope-0.25": partial(p_rope_inv_freq, p=0.25),
        "p-rope-0.75-reversed": partial(p_rope_inv_freq, p=0.75, reverse=True),
        "nope": partial(p_rope_inv_freq, p=0.0),
        "theta-5e5": lambda head_dim, base: p_rope_inv_freq(head_dim, LARGER_BASE, 1.0),
        "partial-0.75": partial(partial_inv_freq, p=0.75),
    },
    replicates=lambda config: [
        f"{case}/{seed}" for case in config.cases for seed in range(1 if case in config.once else config.seeds)
    ],
    scales={
        "smoke": RopeConfig(
            cases=("theory", "tiny-llama", "train"), seeds=1, window=64, long=128, steps=4, context=32, extrapolate=64,
            windows=2, hidden=32, head_dim=16, layers=2, draws=20_000, rivals=True,
        ),
        "desk": RopeConfig(),
        "paper": RopeConfig(
            cases=("theory", "google/gemma-7b", "meta-llama/Llama-3.1-8B", "train"), once=(), rivals=True,
            corpus="Salesforce/wikitext:wikitext-103-raw-v1", window=8192, long=32768, source="Salesforce/wikitext:wikitext-103-raw-v1",
            steps=100_000, batch=64, context=8192, extrapolate=32768, hidden=2048, layers=18, head_dim=256, lr=3e-4, num_cpus=16, num_gpus=1,
        ),
    },
    paper=(
        "Audit of google/gemma-7b (28 layers, 16 heads of 256) and meta-llama/Llama-3.1-8B (its frequencies are scaled unevenly: the "
        "arms that change them are refused, the audit is not): 16 GB of weights each, minutes on one 80 GB GPU. Training: Gemma 2B "
        "architecture (18 layers, width 2048, heads of 256), θ = 10,000, context 8,192, Wiki and FlanV2, for RoPE at θ = 10⁴ and 5·10⁵, "
        "NoPE, p-RoPE at 0.25 and 0.75 and reversed; here with Llama blocks on bytes of WikiText-103. About a week on eight GPUs."
    ),
    compare=("train_ppl", "train_ppl_long", "read_ppl", "read_ppl_long", "read_low", "read_prev_heads"),
    gates=[
        Claim("the audited model predicts the text (perplexity)", statistic=of_rope(SMOLLM, "read_ppl"), holds=at_most(60)),
    ],
    claims=[
        Claim("P1, RoPE need not decay: of 100 queries and distances, those whose key is not attended most there",
              published="0", statistic=of_rope("theory", "theory_p1_missed"), holds=at_most(0)),
        Claim("P2, no decay on random vectors: largest mean logit over distances, in standard errors",
              published="0", statistic=of_rope("theory", "theory_p2_errors"), holds=at_most(4)),
        Claim("P3, NoPE cannot be positional: largest gap to uniform attention on a constant sequence",
              published="0", statistic=of_rope("theory", "theory_p3_gap"), holds=at_most(1e-9)),
        Claim("P4, RoPE can: least weight on the target over what is asked for (1 − ε)",
              published="≥ 1", statistic=of_rope("theory", "theory_p4_weight"), holds=at_least(1 - 1e-9)),
        Claim("P5, content turns against itself: of all pairs, those whose logit does not change sign at its horizon",
              published="0", statistic=of_rope("theory", "theory_p5_missed"), holds=at_most(0)),
        Claim("P5, pairs that do not turn: largest change of their logit over 100,000 tokens",
              published="0", statistic=of_rope("theory", "theory_p5_still"), holds=at_most(1e-12)),
        Claim("SmolLM2: share of usage in the lower half of the frequencies", published="most",
              statistic=of_rope(SMOLLM, "read_low"), holds=at_least(0.7)),
        Claim("SmolLM2: that share above the untrained model's", statistic=only_in(SMOLLM, over_untrained), holds=at_least(0.15)),
        Claim("SmolLM2: previous-token heads that do not care what the tokens are", published="some",
              statistic=of_rope(SMOLLM, "read_prev_heads"), holds=at_least(1)),
        Claim("SmolLM2: share of the best such head's score that goes with its highest quarter of frequencies",
              statistic=of_rope(SMOLLM, "read_cut_high"), holds=at_least(0.5)),
        Claim("SmolLM2: share of it that goes with its lowest quarter",
              statistic=of_rope(SMOLLM, "read_cut_low"), holds=at_most(0.1)),
        Claim("SmolLM2, 512 tokens: log perplexity with the highest quarter still, above that with the lowest still",
              statistic=only_in(SMOLLM, lowest_over_highest("read_ppl")), holds=above(0)),
        Claim("SmolLM2, tokens 1,537 to 2,048: the same",
              statistic=only_in(SMOLLM, lowest_over_highest("read_ppl_long")), holds=above(0)),
        Claim("Trained: perplexity of 0.75-RoPE and RoPE, apart by", published="0.5 % (Gemma 2B, Wiki), 0.01 % (FlanV2)",
              statistic=only_in("train", lambda r: abs(change("train_ppl", "p-rope-0.75", "rope")(r))), holds=at_most(0.02),
              gates=(positions_matter,)),
        Claim("Trained: perplexity of NoPE above the worse of RoPE and 0.75-RoPE", published="yes",
              statistic=only_in("train", behind_both), holds=above(0), gates=(positions_matter,)),
        Claim("p-RoPE's frequencies that differ from transformers' in any bit",
              statistic=only_in("theory", lambda r: sum(r[arm].theory_differ for arm in ("rope", "p-rope-0.75", "p-rope-0.25", "nope"))),
              holds=at_most(0)),
        *(Claim(f"Trained: perplexity of {arm}, above RoPE's", published=published,
                statistic=only_in("train", change("train_ppl", arm, "rope")))
          for arm, published in (("p-rope-0.75", "−0.5 %, −0.01 %"), ("p-rope-0.25", ""), ("p-rope-0.75-reversed", ""), ("nope", ""))),
        *(Claim(f"Trained: {arm}, perplexity of the last 256 of 1,024 bytes above that of the first 256 (context 256)",
                statistic=only_in("train", beyond(arm)))
          for arm in ("rope", "p-rope-0.75", "p-rope-0.25", "nope")),
        *(Claim(f"SmolLM2, {length}: perplexity with the {which} still, above RoPE's",
                statistic=only_in(SMOLLM, change(metric, arm, "rope")))
          for length, metric in (("512 tokens", "read_ppl"), ("tokens 1,537 to 2,048", "read_ppl_long"))
          for which, arm in (("lowest quarter", "p-rope-0.75"), ("lowest three quarters", "p-rope-0.25"),
                             ("highest quarter", "p-rope-0.75-reversed"), ("whole", "nope"))),
        *(Claim(f"SmolLM2: radians that the fastest pair of its lowest quarter turns in {tokens} tokens", statistic=of_rope(SMOLLM, metric))
          for tokens, metric in (("512", "read_angle_low"), ("2,048", "read_angle_low_long"))),
        Claim("SmolLM2: lower half's share without the first token", statistic=of_rope(SMOLLM, "read_low_without_first")),
        Claim("SmolLM2: lower half's share of usage on shuffled tokens", statistic=of_rope(SMOLLM, "read_low_shuffled")),
        Claim("SmolLM2: lower half's share of the real contributions", statistic=of_rope(SMOLLM, "read_low_contrib")),
        Claim("SmolLM2: the same, weighted by attention", statistic=of_rope(SMOLLM, "read_low_attended")),
        Claim("SmolLM2: correlation over heads of the score for the token before with the highest quarter's share",
              statistic=of_rope(SMOLLM, "read_prev_high_correlation")),
        Claim("SmolLM2: of all previous-token heads, the least that the highest quarter takes", statistic=of_rope(SMOLLM, "read_cut_high_least")),
        Claim("SmolLM2: of all previous-token heads, the most that the lowest quarter takes", statistic=of_rope(SMOLLM, "read_cut_low_most")),
        Claim("Gemma 3: lower half's share of usage, local layers (θ = 10⁴)", statistic=of_rope(GEMMA, "read_low_sliding_attention")),
        Claim("Gemma 3: lower half's share of usage, global layers (θ = 10⁶)", statistic=of_rope(GEMMA, "read_low_full_attention")),
        Claim("Gemma 3: previous-token heads", statistic=of_rope(GEMMA, "read_prev_heads")),
        Claim("Gemma 3, 512 tokens: log perplexity with the highest quarter still, above that with the lowest still",
              statistic=only_in(GEMMA, lowest_over_highest("read_ppl"))),
        Claim("The model trained here: lower half's share of usage", statistic=of_rope("train", "train_low")),
    ],
    figure=figure,
)  # fmt: skip
