"""Does the frequent continuation live in feed-forward weights, so that removing those, and not others, brings out the answer?

Published: a two-layer transformer trained on noisy in-context recall predicts the noise token with about its probability α;
without its last feed-forward layer it predicts the answer instead. Without feed-forward layers at all, the noise sits in a
nearly rank-one part of the value and output matrices. In Pythia, truncating one late MLP lowers the probability of "the"
and raises the answer's. Desk: ``recall`` is the published task on the character statistics of Python's language reference,
with one model trained whole and then ablated, never two models compared; ``attention-only`` is a model without feed-forward layers,
``linear`` one whose last feed-forward is a single matrix. ``cities`` is SmolLM2-135M on forty prompts such as "Madrid is
located in": layer and fraction are chosen on one half and judged on the other, three random halvings being the replicates,
beside the likelihood of other text and 28 prompts that ask for a name in the context. Desk cannot show: how this changes
over a family of model sizes, nor few-shot GSM8K.

An arm is a callable ``(case) -> context manager`` within which ``case.model`` is changed; it is measured inside and must be
what it was afterwards. On prompts an arm may look at ``case.tune``, the rows of ``case.prompts`` to choose on.

``prepare`` must return a ``RecallCase`` (a trained model, clean test sequences) or a ``PromptCase`` (a causal language model, by name or
itself with its tokenizer, prompts with the rows to choose on and to judge on, and two texts of token ids). For a case of your own
add ``--set cases=cities`` (or ``cases=recall``), so that it is run once.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from assay.bench import Claim, Config, NotApplicable, Replicate, Study, at_least, at_most, between
from assay.data import load_text
from assay.models import load_language_model
from assay.models.locate import locate

from .arms import Chosen, Remove, WithoutTop, direction, logit_bias, out_value, random_drop, random_layer
from .competing import city_prompts, name_prompts
from .figure import figure
from .margins import gradient_margins
from .prompts import AssociationProbe, Scores
from .scan import Cut, scan_cuts
from .task import NoisyRecall, RecallBatch
from .training import evaluate_recall, train_recall
from .transformer import FeedForwardKind, RecallTransformer
from .truncate import Target

FEED_FORWARD: dict[str, tuple[FeedForwardKind, FeedForwardKind]] = {
    "recall": ("mlp", "mlp"),
    "attention-only": (None, None),
    "linear": ("mlp", "linear"),
}
DROP_F2: dict[Target, float] = {"blocks.1.ff": 0.0}


class RecallConfig(Config):
    cases: tuple[str, ...] = ("recall", "attention-only", "linear", "cities")
    """What is run: models trained on recall by their feed-forward layers, and `cities`, a pretrained model."""
    corpus: str = "pydoc"
    """Text: its characters' statistics make the task, its words the text on which damage is measured."""
    alpha: float = Field(0.5, ge=0, lt=1)
    """Probability of the noise token after a trigger, in training."""
    triggers: int = Field(1, ge=1)
    """Triggers of a sequence."""
    dim: int = Field(128, ge=4)
    """Width of the trained model."""
    seq_len: int = Field(96, ge=8)
    """Tokens of a sequence."""
    batch: int = Field(64, ge=1)
    """Sequences a step."""
    steps: int = Field(300, ge=1)
    """Steps of training."""
    attention_steps: int = Field(450, ge=1)
    """Steps in `attention-only`, which learns more slowly."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """Adam, or SGD with momentum 0.9 and weight decay 1e-4."""
    lr: float = Field(1e-3, gt=0)
    """Learning rate."""
    model: str = "smollm2-135m"
    """The language model of `cities`: a name, hub id or path."""
    prompts: int = Field(40, ge=2)
    """Prompts about cities; half of them to choose on."""
    names: int = Field(28, ge=1)
    """Prompts about names, to see what a cut costs."""
    last_layers: int = Field(10, ge=1)
    """How many of the last layers are tried."""
    fractions: tuple[float, ...] = (0.5, 0.1, 0.01, 0.0)
    """Fractions of the rank that are tried."""
    text: int = Field(256, ge=16)
    """Tokens of text to choose on, and as many to judge damage on."""


# -- cases --------------------------------------------------------------------------------------------------------------


@dataclass
class RecallCase:
    """A model trained on noisy recall."""

    model: nn.Module
    test: RecallBatch
    history: list[dict[str, Any]] = field(default_factory=list)
    extra: dict[str, float] = field(default_factory=dict)
    """Numbers that belong to the case and not to an arm; reported with `full`."""
    tune: None = None

    def generic_tokens(self) -> list[int]:
        return [self.test.noise_token]

    def measure(self) -> dict[str, float]:
        device = next(self.model.parameters()).device
        return evaluate_recall(self.model, self.test.to(device))


@dataclass
class PromptCase:
    """A language model and prompts on which a generic token competes with the answer."""

    source: Any  # name, or the model
    prompts: AssociationProbe
    tune: Tensor  # rows of prompts to choose on
    test: Tensor
    texts: tuple[Tensor, Tensor]  # token ids: to choose on, to judge on
    layers: tuple[int, ...]
    fractions: tuple[float, ...]
    others: AssociationProbe | None = None  # prompts that should not suffer
    tokenizer: Any = None
    history: tuple[()] = ()
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def model(self) -> Any:
        return _language(self.source)[0] if isinstance(self.source, str) else self.source

    @property
    def tok(self) -> Any:
        return self.tokenizer or _language(self.source)[1]

    def scan(self, part: str) -> tuple[Cut, ...]:
        """Every cut of the layers' ``"mlp"`` or ``"attention"``, the model as it is first; computed once."""
        layer = locate(self.model).layers[0]
        chosen = layer.mlp if part == "mlp" else layer.attention_out
        within = chosen.name.removeprefix(f"{layer.name}.")
        items, text = tuple(self.prompts.items), tuple(self.texts[0].tolist())
        return _scan(self.model, self.tok, items, self.layers, self.fractions, within, text)

    def name_of(self, layer: int, within: str) -> str:
        return f"{locate(self.model).layers[layer].name}.{within}"

    def writer(self, layer: int) -> nn.Parameter:
        out = locate(self.model).layers[layer].mlp_out
        if out is None:
            raise NotApplicable("the model's MLPs are mixtures without one output matrix")
        return out.module.weight  # type: ignore[return-value]

    def generic_tokens(self) -> list[int]:
        return sorted({token for group in self.prompts.encode(self.tok) for token in group.distractor.tolist()})

    def distractor_direction(self) -> Tensor:
        """What of the stream raises the distractor's logit: its row of the head, through the last norm's gain."""
        parts = locate(self.model)
        head, gain = (
            self.model.get_parameter(f"{part.name}.weight").detach()
            for part in (parts.lm_head or parts.embedding, parts.final_norm)
        )
        return (head[self.generic_tokens()].mean(0) * gain).float()

    def tuning_scores(self) -> Scores:
        return self._part(self.tune).scores(self.model, self.tok)

    def measure(self) -> dict[str, float]:
        found = self._part(self.test).evaluate(self.model, self.tok)
        found["nll"] = self._nll(self.texts[1])
        if self.others is not None:
            found["names_accuracy"] = self.others.evaluate(self.model, self.tok)["accuracy"]
        return found

    @torch.no_grad()
    def _nll(self, ids: Tensor) -> float:
        logits = self.model(input_ids=ids[None].to(self.model.device), use_cache=False).logits[0, :-1].float()
        return float(F.cross_entropy(logits, ids[1:].to(logits.device)))

    def _part(self, rows: Tensor) -> AssociationProbe:
        return AssociationProbe(self.prompts.items[i] for i in rows.tolist())


@functools.lru_cache(maxsize=1)
def _language(name: str) -> Any:
    return load_language_model(name)


@functools.lru_cache(maxsize=4)
def _scan(model: Any, tok: Any, items: Any, layers: Any, fractions: Any, within: str, text: Any) -> tuple[Cut, ...]:
    return tuple(scan_cuts(model, tok, AssociationProbe(items), layers, fractions, (within,), text=torch.tensor(text)))


def prepare(config: RecallConfig, log: Any) -> RecallCase | PromptCase:
    name = log.replicate.partition("/")[0]
    if name == "cities":
        return cities(config)
    if name not in FEED_FORWARD:
        raise ValueError(f"cases must be among {', '.join([*FEED_FORWARD, 'cities'])}, got {name!r}")
    task = NoisyRecall.from_text(
        load_text(config.corpus), n_triggers=config.triggers, alpha=config.alpha, seq_len=config.seq_len
    )
    test, watched = task.clean().sample(256), task.clean().sample(64)
    model = RecallTransformer(task.vocab, config.dim, config.seq_len, FEED_FORWARD[name]).to(log.device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer
    if config.optimizer == "sgd":
        optimizer = torch.optim.SGD(trained, config.lr, momentum=0.9, weight_decay=1e-4)
    else:
        optimizer = torch.optim.Adam(trained, config.lr)
    steps = config.attention_steps if name == "attention-only" else config.steps
    history = train_recall(
        model, task, steps, optimizer, batch=config.batch, eval_every=max(1, steps // 12), test=watched.to(log.device),
        ablations={} if FEED_FORWARD[name][1] is None else {"drop_F2": DROP_F2},
        generator=torch.Generator(log.device).manual_seed(log.seed),
    )  # fmt: skip
    margins = gradient_margins(task, config.batch)
    extra = {"margin_ff": margins["ff"].mean, "margin_attention": margins["attn"].mean}
    return RecallCase(model.cpu(), test, history, extra)


def cities(config: RecallConfig) -> PromptCase:
    model, tok = _language(config.model)
    prompts = AssociationProbe(city_prompts().items[: config.prompts])
    others = AssociationProbe(name_prompts().items[:: max(1, 56 // config.names)][: config.names])
    ids = torch.tensor(tok(load_text(config.corpus, limit=40 * config.text), verbose=False)["input_ids"])
    if len(ids) < 2 * config.text:
        raise ValueError(f"corpus {config.corpus!r} is too short for two texts of {config.text} tokens")
    rows, depth = torch.randperm(len(prompts.items)), len(locate(model).layers)
    half = len(rows) // 2
    return PromptCase(
        config.model, prompts, rows[:half], rows[half:], (ids[: config.text], ids[-config.text :]),
        tuple(range(max(0, depth - config.last_layers), depth)), config.fractions, others,
    )  # fmt: skip


# -- one arm on one case ------------------------------------------------------------------------------------------------

IN_ALL = ("recall", "attention-only", "linear")
WITH_F2 = ("recall", "linear")
ARMS: dict[str, Callable[[Any], Any]] = {
    "full": lambda case: nullcontext(),
    "drop_F2": Remove(DROP_F2),
    "drop_F1": Remove({"blocks.0.ff": 0.0}),
    "F2-0.2": Remove({"blocks.1.ff": 0.2}),
    "F2-0.1": Remove({"blocks.1.ff": 0.1}),
    "random-drop": random_drop,
    "F2-less-top": WithoutTop("blocks.1.ff"),
    "WoWv1-0.1": Remove({out_value(0): 0.1}),
    "WoWv2-0.1": Remove({out_value(1): 0.1}),
    "WoWv1-less-top": WithoutTop(out_value(0)),
    "WoWv2-less-top": WithoutTop(out_value(1)),
    "logit-bias": logit_bias,
    "mlp": Chosen("mlp"),
    "mlp-budget": Chosen("mlp", max_nll=0.15),
    "attention-out": Chosen("attention"),
    "random-layer": random_layer,
    "direction": direction,
}
RUN_IN = {
    **dict.fromkeys(("drop_F2", "drop_F1", "F2-0.2", "F2-0.1", "F2-less-top", "random-drop"), WITH_F2),
    **dict.fromkeys(("WoWv1-0.1", "WoWv2-0.1", "WoWv1-less-top", "WoWv2-less-top"), IN_ALL),
    **dict.fromkeys(("mlp", "mlp-budget", "attention-out", "random-layer", "direction"), ("cities",)),
}
"""The cases of the arms that are not run in all."""


def trial(arm: Any, case: Any, config: RecallConfig, log: Any) -> dict[str, float]:
    name = log.replicate.partition("/")[0]
    if name not in RUN_IN.get(log.arm, (name,)):
        raise NotApplicable(f"run on {', '.join(RUN_IN[log.arm])} alone")
    case.model.to(log.device)
    with arm(case):
        found = case.measure()
    prefix = "" if log.arm == "full" else f"{log.arm}/"
    for entry in case.history:
        for metric in ("p_noise", "p_answer"):
            if prefix + metric in entry:
                log.metric(metric, entry[prefix + metric], entry["step"])
    return found | (case.extra if log.arm == "full" else {})


# -- what is read off ---------------------------------------------------------------------------------------------------


def only_in(case: str, statistic: Callable[[Replicate], float]) -> Callable[[Replicate], float | None]:
    """The statistic on the replicates of one case, None on the others."""
    return lambda r: statistic(r) if r.name.partition("/")[0] == case else None


def of(arm: str, metric: str) -> Callable[[Replicate], float]:
    return lambda r: r[arm].metrics[metric]


def gain(metric: str, arm: str, other: str = "full") -> Callable[[Replicate], float]:
    return lambda r: r[arm].metrics[metric] - r[other].metrics[metric]


def ratio(metric: str, arm: str, other: str) -> Callable[[Replicate], float]:
    return lambda r: r[arm].metrics[metric] / r[other].metrics[metric]


def noise_before_answer(r: Replicate) -> float:
    """Step at which P(noise) first reaches α/2 over the one at which P(answer) reaches (1 - α)/2; 0 if it never does."""
    alpha = r.config.alpha
    reached = []
    for metric, level in (("p_noise", alpha / 2), ("p_answer", (1 - alpha) / 2)):
        steps, values = r["full"].curve(metric)
        reached.append(next((step for step, value in zip(steps, values, strict=True) if value >= level), float("inf")))
    return reached[0] / reached[1]


LEARNT = Claim(
    "The answer is found in context: P(answer | full)",
    statistic=only_in("recall", of("full", "p_answer")),
    holds=at_least(0.25),
)
LEARNT_ALONE = Claim(
    "Without feed-forward layers the answer is found in context too: P(answer | full)",
    statistic=only_in("attention-only", of("full", "p_answer")), holds=at_least(0.15),
)  # fmt: skip
DISTRACTED = Claim(
    'The whole model prefers " the": P(the) over P(answer)',
    statistic=only_in("cities", lambda r: r["full"].p_distractor / r["full"].p_answer), holds=at_least(2),
)  # fmt: skip

study = Study(
    prepare=prepare,
    trial=trial,
    arms=ARMS,
    replicates=lambda config: [f"{case}/{seed}" for case in config.cases for seed in range(config.seeds)],
    scales={
        "smoke": RecallConfig(
            cases=("recall", "cities"), seeds=1, dim=64, seq_len=48, batch=32, steps=40, prompts=4, names=1, last_layers=2,
            fractions=(0.0,), text=16,
        ),
        "desk": RecallConfig(),
        "paper": RecallConfig(
            corpus="input.txt", dim=256, seq_len=256, batch=512, steps=5000, attention_steps=5000, optimizer="sgd", lr=0.03,
            model="EleutherAI/pythia-2.8b", last_layers=32, fractions=(0.5, 0.1, 0.05, 0.01, 0.0), text=8192, names=56, num_cpus=16,
            num_gpus=1,
        ),
    },
    paper=(
        "Tiny Shakespeare's characters (karpathy/char-rnn, input.txt, 1.1 million characters), width 256, 256 tokens, 512 sequences, "
        "5,000 steps of SGD at 0.03; --set triggers=5 and --set alpha=0.3, 0.7 for the others: about an hour a model on one GPU. "
        "EleutherAI/pythia-160m to 2.8b by --set model=, and meta-llama/Llama-3.1-8B on few-shot GSM8K, for which bring the prompts by "
        "--case: minutes to hours on one 80 GB GPU."
    ),
    claims=[
        Claim("P(noise) of the whole model above α", published="about 0", gates=(LEARNT,),
              statistic=only_in("recall", lambda r: r["full"].p_noise - r.config.alpha), holds=between(-0.15, 0.15)),
        Claim("P(noise) without the last feed-forward", published="about 0", gates=(LEARNT,),
              statistic=only_in("recall", of("drop_F2", "p_noise")), holds=at_most(0.1)),
        Claim("Accuracy without the last feed-forward above the whole model's", published="yes", gates=(LEARNT,),
              statistic=only_in("recall", gain("accuracy", "drop_F2")), holds=at_least(0.25)),
        Claim("Accuracy without the first feed-forward above the whole model's", gates=(LEARNT,),
              statistic=only_in("recall", gain("accuracy", "drop_F1")), holds=at_most(0.05)),
        Claim('One MLP cut, chosen on one half: P(the) before / after on the other', published="lower", gates=(DISTRACTED,),
              statistic=only_in("cities", ratio("p_distractor", "full", "mlp")), holds=at_least(3)),
        Claim("One MLP cut, chosen on one half: P(answer) after / before on the other", published="higher", gates=(DISTRACTED,),
              statistic=only_in("cities", ratio("p_answer", "mlp", "full")), holds=at_least(1.5)),
        Claim("Accuracy with random weights of the same mass dropped, above the whole model's",
              statistic=only_in("recall", gain("accuracy", "random-drop"))),
        Claim("Accuracy with the noise token ruled out, above that without the last feed-forward",
              statistic=only_in("recall", gain("accuracy", "logit-bias", "drop_F2"))),
        Claim("P(answer) without the last feed-forward's largest singular values alone, above that without all of it",
              statistic=only_in("recall", gain("p_answer", "F2-less-top", "drop_F2"))),
        Claim("P(noise) with a tenth of the last feed-forward's rank left", statistic=only_in("recall", of("F2-0.1", "p_noise"))),
        Claim("Noise before answer: steps to half of each level, ratio", published="below 1",
              statistic=only_in("recall", noise_before_answer)),
        Claim("One gradient step from zero: noise margin through attention / through feed-forward", published="about 1/N",
              statistic=only_in("recall", lambda r: r["full"].margin_attention / r["full"].margin_ff)),
        Claim("No feed-forward: P(noise) without the largest singular value of block 2's W_O W_V / the whole model's", published="lower",
              gates=(LEARNT_ALONE,), statistic=only_in("attention-only", ratio("p_noise", "WoWv2-less-top", "full"))),
        Claim("No feed-forward: P(noise) with only the top tenth of block 2's W_O W_V / the whole model's",
              gates=(LEARNT_ALONE,), statistic=only_in("attention-only", ratio("p_noise", "WoWv2-0.1", "full"))),
        Claim("No feed-forward: accuracy without that singular value above the whole model's", published="higher",
              gates=(LEARNT_ALONE,), statistic=only_in("attention-only", gain("accuracy", "WoWv2-less-top"))),
        Claim("Linear last feed-forward: accuracy without it above the whole model's",
              statistic=only_in("linear", gain("accuracy", "drop_F2"))),
        *(
            Claim(f"{what}: P(answer) after / before", statistic=only_in("cities", ratio("p_answer", arm, "full")))
            for arm, what in (
                ("attention-out", "One attention output cut, chosen alike"),
                ("random-layer", "The MLP cut in another layer"),
                ("mlp-budget", "The MLP cut within 0.15 nats a token"),
                ("direction", 'Only the direction of " the" taken out of one MLP'),
                ("logit-bias", 'A constant off the logit of " the", as rare as the cut makes it'),
            )
        ),
        Claim("What the chosen MLP cut costs on other text, nats a token", statistic=only_in("cities", gain("nll", "mlp"))),
        Claim("What the constant costs on other text, nats a token", statistic=only_in("cities", gain("nll", "logit-bias"))),
        Claim("What the chosen MLP cut costs where a name in the context is asked for, accuracy",
              statistic=only_in("cities", gain("names_accuracy", "mlp"))),
    ],
    figure=figure,
    compare=("p_noise", "p_answer", "accuracy", "p_distractor", "win_rate", "nll"),
)  # fmt: skip
