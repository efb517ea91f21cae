"""Does POWER keep a lucky poor answer down, and do dynamic labels keep an unlucky good one up, without unlearning the rest?

Published: up to 13.0 points of AlpacaEval 2 (length-controlled) and 11.5 of Arena-Hard over DPO (arXiv 2412.09544). Desk,
three kinds of replicates. ``bandits``: four problems with tables of logits, solved exactly (A1 a poor arm has won once; A2 a
good arm has lost once, A2b lost and won once; A3 the best arm is not the most often chosen). ``harmless/<seed>``: a tiny
Llama on people's pairs (HH, harmless), a fifth of the training labels turned round. ``reviews/<seed>``: a tiny Llama of
review sentences on pairs of its own samples, ordered by a proxy with a fifth turned round, prompts covered unevenly. Desk
cannot show: chat benchmarks, 8B models, whether weights of one over length hold back verbosity before a judge.

An arm is an ``Arm``: ``bandit(problems, config)`` gives policies ``(4, 4)`` by name of setting and step; ``trainer(model
path, pairs with columns prompt, chosen, rejected and pair_id, tokenizer, settings, beta=, flip=)`` gives a
``transformers.Trainer``. Either may be None; metrics are then left out. With ``reward="mean"`` its own margin is that of mean
log-probabilities, with ``"ratio"`` that of log-ratios to the initial policy. ``clean`` trains it on pairs as they were;
``harmless_lr`` and ``review_lr`` are AdamW's rates for it.

``prepare`` returns a ``Bandits``, a ``HarmlessCase`` with an ``Audit``, or a ``ReviewCase`` with ``Pairs``. Which of the
study's own arms train language models is told by ``harmless_arms`` and ``review_arms``; an arm of yours always does.
"""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import Field, model_validator
from transformers import TrainerCallback

from assay.alignment.preference_pairs import (
    HarmlessCase,
    PairLogps,
    Pairs,
    harmless_case,
    implicit_accuracy,
    pair_logps,
    sampled_pairs,
    uneven_counts,
)
from assay.alignment.preference_training import silence, trainer_settings
from assay.alignment.preferences import COMPARE, ReviewCase, evaluate, review_case
from assay.bench import Claim, Config, Study, at_least, at_most, between

from . import training
from .bandit import POWERBandit
from .rivals import RIVALS, Bandits, problems, solve


class PowerConfig(Config):
    bandit_steps: int = Field(40_000, ge=2)
    """Steps of gradient descent, at a rate of 0.5."""
    early: int = Field(4_000, ge=1)
    """Steps after which a bandit's policy is looked at as well, fewer than ``bandit_steps``."""
    seeds: int = Field(3, ge=0)
    """Replicates of each of the two language problems."""
    flips: float = Field(0.2, ge=0, lt=0.5)
    """Share of training labels turned round, known to no method (robust DPO and cDPO are told the rate)."""
    pairs: int = Field(2000, ge=32)
    """Harmless training pairs at most."""
    audited: int = Field(600, ge=20)
    """Training pairs, the first ones, by which flips are looked for."""
    epochs: int = Field(2, ge=1)
    """Passes over the harmless pairs."""
    review_prompts: int = Field(200, ge=10)
    """Prompts of reviews, 8 pairs each for four in five of them and 1 for the others."""
    review_steps: int = Field(100, ge=2)
    """Steps on review pairs, of which there are some 1,300; judged after the first half and at the end."""
    batch: int = Field(32, ge=1)
    """Pairs a step."""
    lr: float | None = Field(None, gt=0)
    """AdamW's rate, linear decay; None: each arm's own (see the page)."""
    beta: float = Field(2.0, gt=0)
    """Of losses with mean log-probabilities (SimPO, POWER)."""
    dpo_beta: float = Field(0.1, gt=0)
    """Of losses with log-ratios."""
    pretrain: int = Field(300, ge=1)
    """Steps that the initial policies were trained for."""
    tokens: int = Field(24, ge=4)
    """Tokens of a harmless prompt (its last) and of an answer (its first)."""
    harmless_arms: tuple[str, ...] = ("dpo-clean", "dpo", "power-dl")
    """Arms that train on harmless pairs."""
    review_arms: tuple[str, ...] = ("dpo", "simpo", "power", "power-dl")
    """Arms that train on review pairs."""
    limit: int | None = None
    """Take so many harmless pairs at most, before the split."""
    judged: int = Field(10, ge=5)
    """Completions a prompt by which a review policy is judged at the end."""

    @model_validator(mode="after")
    def _early_comes_first(self) -> "PowerConfig":
        if self.early >= self.bandit_steps:
            raise ValueError(f"early must be less than bandit_steps={self.bandit_steps}, got {self.early}")
        return self


class Arm(NamedTuple):
    bandit: Callable[[Bandits, PowerConfig], dict[str, dict[int, torch.Tensor]]] | None = None
    trainer: Callable[..., Any] | None = None
    reward: str = "ratio"
    clean: bool = False
    harmless_lr: float = 1e-4
    review_lr: float = 3e-4


class Audit(NamedTuple):
    """Training pairs with labels turned round, and what the initial policy makes of them and of held-out ones."""

    case: HarmlessCase
    flipped: Pairs
    train_logps: PairLogps
    test_logps: PairLogps


class Reviews(NamedTuple):
    case: ReviewCase
    pairs: Pairs


def replicates(config: PowerConfig) -> list[str]:
    return ["bandits", *(f"{kind}/{seed}" for kind in ("harmless", "reviews") for seed in range(config.seeds))]


def prepare(config: PowerConfig, log: Any) -> Bandits | Audit | Reviews:
    kind, _, number = log.replicate.partition("/")
    if kind == "bandits":
        return problems()
    seed, track = int(number), partial(log.track, label="pre-training")
    if kind == "harmless":
        case = harmless_case(
            seed=seed, steps=config.pretrain, prompt_tokens=config.tokens, reply_tokens=config.tokens, limit=config.limit,
            heldout=min(407, (config.limit or 2303) // 4), track=track,
        )  # fmt: skip
        model, tokenizer = case.sft.load()
        kept = separable(Pairs(case.train.rows[: config.pairs], case.train.skipped), tokenizer)
        case = replace(case, train=kept)
        flipped = kept.flip(config.flips, seed)
        audited = Pairs(flipped.rows[: config.audited], {})
        return Audit(case, flipped, pair_logps(model, tokenizer, audited), pair_logps(model, tokenizer, case.test))
    few = 0 if config.limit else 5
    reviews = review_case(
        seed=seed, steps=config.pretrain, prompts=config.review_prompts, table=10, gold_table=few, track=track
    )
    model, tokenizer = reviews.sft.load()
    counts = uneven_counts(len(reviews.prompts), seed=seed)
    pairs = sampled_pairs(model, tokenizer, reviews.prompts, reviews.proxy, seed=seed, per_prompt=counts, flips=config.flips)
    return Reviews(reviews, separable(pairs, tokenizer))


def separable(pairs: Pairs, tokenizer: Any) -> Pairs:
    """The pairs that every trainer takes."""
    rows = tuple(r for r in pairs.rows if all(training.apart(tokenizer, r.prompt, a) for a in (r.chosen, r.rejected)))
    return Pairs(rows, pairs.skipped | {"answer merges with its prompt": len(pairs) - len(rows)})


def trial(arm: Arm, shared: Any, config: PowerConfig, log: Any) -> dict[str, float]:
    if isinstance(shared, Bandits):
        return on_bandits(arm, shared, config)
    chosen = config.harmless_arms if isinstance(shared, Audit) else config.review_arms
    if arm.trainer is None or (log.arm in study.arms and log.arm not in chosen):
        return {}
    return on_harmless(arm, shared, config, log) if isinstance(shared, Audit) else on_reviews(arm, shared, config, log)


# ---- bandits -----------------------------------------------------------------------------------------------------------


def on_bandits(arm: Arm, bandits: Bandits, config: PowerConfig) -> dict[str, float]:
    """``A1_C`` is the last probability of arm C in problem A1, ``A1_C_early`` the one before, ``A1_C_eta1`` another setting's."""
    if arm.bandit is None:
        return {}
    metrics: dict[str, float] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tables of sixteen numbers
    try:
        for setting, path in arm.bandit(bandits, config).items():
            for step, policies in path.items():
                end = (f"_{setting}" if setting else "") + ("_early" if step < config.bandit_steps else "")
                for name, policy, value in zip(
                    bandits.names, policies, (policies * bandits.values).sum(1).tolist(), strict=True
                ):
                    metrics |= {f"{name}_{letter}{end}": p for letter, p in zip("ABCD", policy.tolist(), strict=True)}
                    metrics[f"{name}_value{end}"] = value
    finally:
        torch.set_num_threads(threads)
    return metrics


def rival(bandits: Bandits, config: PowerConfig, *, name: str) -> dict[str, dict[int, torch.Tensor]]:
    return {"": solve(RIVALS[name], bandits, steps=config.bandit_steps, lr=0.5, flip=config.flips, at=[config.early])}


def family(
    bandits: Bandits,
    config: PowerConfig,
    *,
    settings: dict[str, tuple[float, float]],
    baseline: str = "chosen",
    gate_sft: bool = False,
) -> dict[str, dict[int, torch.Tensor]]:
    """POWER's bandit for settings ``(eta, gamma)``, all problems and settings in one batch."""
    many, each = len(settings), len(bandits.names)
    eta, gamma = torch.tensor(list(settings.values()), dtype=torch.float64).repeat_interleave(each, 0).T
    pairs = [(winner, loser, count.repeat(many)) for winner, loser, count in bandits.pairs]
    at = (config.early, config.bandit_steps)
    solver = POWERBandit(lr=0.5, steps=config.bandit_steps, baseline=baseline, gate_sft=gate_sft, at=at)
    path = solver.fit(pairs, bandits.theta0.repeat(many, 1), beta=1.0, eta=eta, gamma=gamma).path
    return {
        name: {step: policies[i * each : (i + 1) * each] for step, policies in path.items()} for i, name in enumerate(settings)
    }


# ---- language models -----------------------------------------------------------------------------------------------------


@contextmanager
def trained(
    arm: Arm,
    case: Any,
    pairs: Pairs,
    steps: int,
    lr: float,
    config: PowerConfig,
    log: Any,
    callbacks: Sequence[TrainerCallback] = (),
):
    """The trainer of an arm after training, and its tokenizer."""
    assert arm.trainer is not None
    tokenizer = case.sft.load()[1]
    with case.sft.on_disk() as path, tempfile.TemporaryDirectory() as folder, silence():
        settings = trainer_settings(folder, steps=steps, batch=config.batch, lr=config.lr or lr, seed=log.seed % 2**31)
        beta = config.beta if arm.reward == "mean" else config.dpo_beta
        trainer = arm.trainer(path, pairs.dataset(), tokenizer, settings, beta=beta, flip=config.flips)
        for callback in callbacks:
            trainer.add_callback(callback)
        result = trainer.train()
        for line in trainer.state.log_history:
            if "loss" in line:
                log.metric("train_loss", line["loss"], line["step"])
        log.note(f"{result.metrics['train_runtime'] / steps:.2f} s a step of {config.batch} pairs")
        yield trainer, tokenizer


def on_harmless(arm: Arm, shared: Audit, config: PowerConfig, log: Any) -> dict[str, float]:
    pairs = Pairs(shared.case.train.rows[: len(shared.flipped)], {}) if arm.clean else shared.flipped
    steps = config.epochs * (len(pairs) // config.batch)
    with trained(arm, shared.case, pairs, steps, arm.harmless_lr, config, log) as (trainer, tokenizer):
        model = trainer.model
        test = pair_logps(model, tokenizer, shared.case.test)
        train = pair_logps(model, tokenizer, Pairs(shared.flipped.rows[: len(shared.train_logps.chosen)], {}))
        labels = getattr(trainer, "dynamic_labels", None)
    wrong = shared.flipped.flipped[: len(train.chosen)]
    own = auroc(wrong, -margins(train, shared.train_logps, arm.reward))
    metrics = {
        "accuracy": implicit_accuracy(test, shared.test_logps),
        "own_accuracy": float((margins(test, shared.test_logps, arm.reward) > 0).mean()),
        "initial_accuracy": float((margins(shared.test_logps, shared.test_logps, "mean") > 0).mean()),
        "margin_auroc": own,
        "initial_auroc": auroc(wrong, -margins(shared.train_logps, shared.train_logps, "mean")),
        "drift": float(((test.chosen - shared.test_logps.chosen) / test.chosen_length).mean()),
    }
    if labels is not None:
        ids = range(len(wrong))
        metrics |= {"label_auroc": auroc(wrong, -labels.of(ids).numpy()), "label_mean": float(labels.labels.mean())}
        metrics["visits"] = float(labels.visits.float().mean())
    return metrics


def margins(logps: PairLogps, initial: PairLogps, reward: str) -> np.ndarray:
    """Chosen less rejected, ``(n,)``: of mean log-probabilities, or of log-ratios to the initial policy."""
    if reward == "mean":
        return (logps.chosen / logps.chosen_length - logps.rejected / logps.rejected_length).numpy()
    return ((logps.chosen - initial.chosen) - (logps.rejected - initial.rejected)).numpy()


def auroc(truth: np.ndarray, score: np.ndarray) -> float:
    """P(score of a true one > score of a false one), ties half; ½ where there are not both.

    Example:
        >>> auroc(np.array([True, False, False]), np.array([2.0, 1.0, 2.0]))
        0.75
    """
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(truth, score)) if 0 < truth.sum() < len(truth) else 0.5


class Judge(TrainerCallback):
    """Judges a review policy at given steps of its training."""

    def __init__(self, case: ReviewCase, steps: set[int], log: Any):
        self.case, self.steps, self.log = case, steps, log

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step in self.steps:
            report(evaluate(model, self.case, seed=1, per_prompt=5, kl_per_prompt=5), state.global_step, self.log)
            model.train()


def report(metrics: dict[str, float], step: int, log: Any) -> None:
    for name in ("kl", "gold_win", "proxy_win"):
        if name in metrics:
            log.metric(name, metrics[name], step)


def on_reviews(arm: Arm, shared: Reviews, config: PowerConfig, log: Any) -> dict[str, float]:
    steps = config.review_steps
    judge = Judge(shared.case, {steps // 2}, log)
    with trained(arm, shared.case, shared.pairs, steps, arm.review_lr, config, log, [judge]) as (trainer, _):
        metrics = evaluate(trainer.model, shared.case, seed=1, per_prompt=config.judged, kl_per_prompt=min(10, config.judged))
    report(metrics, steps, log)
    return metrics


# ---- claims --------------------------------------------------------------------------------------------------------------


def of(metric: str, arm: str, less: str = ""):
    """A metric of an arm (less the same of another); None on a replicate that has no such metric."""

    def statistic(r: Any) -> float | None:
        names = [name for name in (arm, less) if name]
        if any(metric not in r[name].metrics for name in names):
            return None
        first, *second = (r[name].metrics[metric] for name in names)
        return first - second[0] if second else first

    return statistic


def labels_beside(arm: str):
    """How much better POWER-DL's labels tell turned pairs than the trained margins of an arm do."""

    def statistic(r: Any) -> float | None:
        labels, margin = r["power-dl"].metrics.get("label_auroc"), r[arm].metrics.get("margin_auroc")
        return None if labels is None or margin is None else labels - margin

    return statistic


def odds(problem: str, arm: str, end: str = ""):
    """How often A is taken for one B."""

    def statistic(r: Any) -> float | None:
        if f"{problem}_A{end}" not in r[arm].metrics:
            return None
        return r[arm].metrics[f"{problem}_A{end}"] / max(r[arm].metrics[f"{problem}_B{end}"], 1e-300)

    return statistic


def over_b(problem: str, arm: str, end: str = ""):
    ratio = odds(problem, arm, end)
    return lambda r: None if ratio(r) is None else ratio(r) > 1


def gold_at_equal_kl(arm: str, less: str):
    """An arm's gold win rate less another's where both have gone as far from the initial policy as the nearer one ended."""

    def statistic(r: Any) -> float | None:
        if any("gold_win" not in r[name].metrics for name in (arm, less)):
            return None
        ours, theirs = ((r[name].curve("kl")[1], r[name].curve("gold_win")[1]) for name in (arm, less))
        kl = min(float(ours[0][-1]), float(theirs[0][-1]))
        return at_kl(kl, *ours) - at_kl(kl, *theirs)

    return statistic


def better(metric: str, *arms: str):
    """The best that one of the arms has."""

    def statistic(r: Any) -> float | None:
        found = [r[name].metrics[metric] for name in arms if metric in r[name].metrics]
        return max(found, default=None)

    return statistic


def at_kl(kl: float, kls: np.ndarray, golds: np.ndarray) -> float:
    """A frontier's gold win rate at a KL, along its path from the initial policy (0, ½).

    Example:
        >>> at_kl(1.0, np.array([2.0, 4.0]), np.array([0.7, 0.8]))
        0.6
    """
    k, g = np.array([0.0, *kls]), np.array([0.5, *golds])
    order = np.argsort(k, kind="stable")
    return float(np.interp(kl, k[order], g[order]))


def figure(results: list[Any]):
    from .figures import draw

    return draw(results)


DPO_LEARNS = Claim(
    "DPO on labels as they were reaches a held-out accuracy of 0.55",
    statistic=of("accuracy", "dpo-clean"),
    holds=at_least(0.55),
)
LEARNT_REVIEWS = Claim(
    "SimPO or POWER-DL wins 0.55 by the proxy that ordered its pairs",
    statistic=better("proxy_win", "simpo", "power-dl"),
    holds=at_least(0.55),
)


def claims() -> list[Claim]:
    early = "_early"
    kept = {"DL alone": ("dl", ""), "POWER": ("power", ""), "POWER-DL": ("power-dl", "")}
    type_one = [
        ("DL alone (γ=0.02)", "dl", "", at_most(0.05)), ("POWER (η=1)", "power", "_eta1", at_most(0.03)),
        ("POWER-DL (η=0.1, γ=0.02)", "power-dl", "_eta0.1-gamma0.02", at_most(0.03)), ("SimPO", "simpo", "", at_least(0.9)),
    ]  # fmt: skip
    type_two = [("DL alone (γ=0.02)", "dl", ""), ("POWER, initial baseline (η=0.1)", "power-initial", ""),
                ("POWER, initial baseline (η=1)", "power-initial", "_eta1")]  # fmt: skip
    return [
        *(Claim(f"Type I: {who} ends with P(C) {bound}", statistic=of(f"A1_C{end}", arm), holds=bound) for who, arm, end, bound in type_one),
        Claim("Type I: DPO ends with P(C) ≥ 0.9", statistic=of("A1_C", "dpo"), holds=at_least(0.9)),
        Claim("Type I: DPO early on, P(C)", statistic=of("A1_C_early", "dpo")),
        Claim("Type I: SFT on the chosen answers, P(C)", statistic=of("A1_C", "sft")),
        *(
            Claim(f"Order unlike frequency: {who} puts A above B early on", statistic=over_b("A3", arm, end + early), holds=at_least(1))
            for who, (arm, end) in kept.items()
        ),
        *(
            Claim(f"Order unlike frequency: {who} has P(C) ≤ 0.05 early on", statistic=of(f"A3_C{end}{early}", arm), holds=at_most(0.05))
            for who, (arm, end) in kept.items()
        ),
        Claim("Order unlike frequency: SFT on the chosen answers ends with B above A (odds A:B)", statistic=odds("A3", "sft"), holds=at_most(1)),
        Claim("Order unlike frequency: SimPO has P(C) ≥ 0.7 early on", statistic=of("A3_C_early", "simpo"), holds=at_least(0.7)),
        *(Claim(f"Type II: {who} ends with P(A) ≥ 0.65 (0.787 at first)", statistic=of(f"A2_A{end}", arm), holds=at_least(0.65)) for who, arm, end in type_two),
        *(Claim(f"Type II: {who} ends with A above B", statistic=over_b("A2", arm, end), holds=at_least(1)) for who, arm, end in type_two),
        *(Claim(f"Type II: {who} early on, P(A)", statistic=of("A2_A_early", arm)) for who, arm in (("DPO", "dpo"), ("SimPO", "simpo"), ("IPO", "ipo"))),
        *(
            Claim(f"Type II: POWER-DL (η={eta}, γ=0.02) early on, P(A)", statistic=of(f"A2_A_eta{eta}-gamma0.02_early", "power-dl"))
            for eta in ("0.001", "0.01", "0.1")
        ),
        Claim("Type II, A also chosen once: POWER-DL (η=0.001, γ=0.02) early on, P(A)", statistic=of("A2b_A_eta0.001-gamma0.02_early", "power-dl")),
        *(
            Claim(f"Learnt all the same: {who} early on, odds A:B of A1 (1.5 in the data)", statistic=odds("A1", arm, end + early), holds=between(1.35, 1.65))
            for who, (arm, end) in kept.items()
        ),
        *(
            Claim(f"Learnt all the same: {who} early on, odds A:B of A3", statistic=odds("A3", arm, end + early), holds=between(1.15, 1.6))
            for who, (arm, end) in kept.items()
        ),
        *(
            Claim(f"Learning against γ={gamma}: DL with the initial baseline (η=0.1) at the end, odds A:B of A1", statistic=odds("A1", "power-initial", f"_gamma{gamma}"))
            for gamma in ("0.0002", "0.002", "0.02", "0.2")
        ),
        Claim("Harmless: POWER-DL's held-out accuracy less DPO's, each by its own margin, with labels turned round", published="higher scores than DPO", statistic=of("own_accuracy", "power-dl", "dpo"), holds=at_least(0), gates=(DPO_LEARNS,)),
        Claim("Harmless: labels find turned pairs (AUROC)", statistic=of("label_auroc", "power-dl"), holds=at_least(0.6), gates=(DPO_LEARNS,)),
        *(
            Claim(f"Harmless: labels' AUROC less that of {whose} margins", statistic=labels_beside(arm))
            for whose, arm in (("POWER-DL's trained", "power-dl"), ("DPO's trained", "dpo"), ("SimPO's trained", "simpo"))
        ),
        Claim("Harmless: AUROC of the initial policy's own margins", statistic=of("initial_auroc", "power-dl")),
        Claim("Harmless: accuracy of the initial policy's own margins", statistic=of("initial_accuracy", "power-dl")),
        Claim("Harmless: POWER-DL's accuracy less DPO's, both by DPO's log-ratios", statistic=of("accuracy", "power-dl", "dpo")),
        Claim("Harmless: DL alone less DPO, held-out accuracy", statistic=of("own_accuracy", "dl", "dpo")),
        Claim("Harmless: cDPO told the flip rate less POWER-DL, held-out accuracy", statistic=of("own_accuracy", "cdpo", "power-dl")),
        Claim("Reviews: POWER-DL's gold win rate less SimPO's at equal KL", published="less reward hacking", statistic=gold_at_equal_kl("power-dl", "simpo"), holds=at_least(0), gates=(LEARNT_REVIEWS,)),
        *(Claim(f"Reviews: {who}'s proxy win rate", statistic=of("proxy_win", arm)) for who, arm in (("DPO", "dpo"), ("SimPO", "simpo"), ("POWER (η=0.1)", "power"), ("POWER-DL", "power-dl"))),
        *(Claim(f"Reviews: {who}'s gold win rate less DPO's at equal KL", statistic=gold_at_equal_kl(arm, "dpo")) for who, arm in (("POWER (η=0.1)", "power"), ("POWER-DL", "power-dl"))),
    ]  # fmt: skip


REFERENCE_FREE: dict[str, Any] = {"harmless_lr": 3e-4, "review_lr": 3e-5}
"""Mean log-probabilities that nothing holds back leave the initial policy far behind at DPO's rate on reviews."""

study = Study(
    prepare=prepare,
    trial=trial,
    replicates=replicates,
    arms={
        "sft": Arm(partial(rival, name="sft"), training.sft, "mean"),
        "dpo": Arm(partial(rival, name="dpo"), training.dpo),
        "dpo-clean": Arm(None, training.dpo, clean=True),
        "rpo": Arm(partial(rival, name="rpo"), partial(training.dpo, loss_type=["sigmoid", "sft"])),
        "cdpo": Arm(partial(rival, name="cdpo"), partial(training.dpo, kind="smoothed", label_smoothing="flip")),
        "robust-dpo": Arm(partial(rival, name="robust-dpo"), partial(training.dpo, loss_type="robust", label_smoothing="flip")),
        "ipo": Arm(partial(rival, name="ipo"), partial(training.dpo, loss_type="ipo")),
        "simpo": Arm(partial(rival, name="simpo"), training.simpo, "mean", **REFERENCE_FREE),
        "chipo": Arm(partial(rival, name="chipo"), partial(training.dpo, kind="chi")),
        "orpo": Arm(partial(rival, name="orpo"), training.orpo),
        "ropo": Arm(partial(rival, name="ropo"), partial(training.dpo, kind="ropo")),
        "power": Arm(partial(family, settings={"": (0.1, 0), "eta1": (1, 0)}), partial(training.power, gamma=0.0), "mean", harmless_lr=3e-4),
        "dl": Arm(partial(family, settings={"": (0, 0.02), "gamma0.002": (0, 0.002)}), partial(training.power, eta=0.0), "mean", **REFERENCE_FREE),
        "power-dl": Arm(
            partial(
                family,
                settings={
                    "": (0.001, 0.002),
                    **{f"eta{eta}-gamma{gamma}": (eta, gamma) for gamma in (0.002, 0.02) for eta in (0.001, 0.01, 0.1)},
                },
            ),
            training.power,
            "mean",
            **REFERENCE_FREE,
        ),
        "power-dl-gated": Arm(
            partial(family, settings={"": (0.1, 0.02)}, gate_sft=True), partial(training.power, gate_sft=True), "mean", **REFERENCE_FREE
        ),
        "power-initial": Arm(
            partial(
                family,
                settings={"": (0.1, 0), "eta1": (1, 0), **{f"gamma{g}": (0.1, float(g)) for g in ("0.0002", "0.002", "0.02", "0.2")}},
                baseline="initial",
            ),
            partial(training.power, gamma=0.0, baseline="initial", baseline_tokens=32),
            "mean",
            harmless_lr=3e-4,
        ),
    },
    scales={
        "smoke": PowerConfig(
            bandit_steps=400, early=200, seeds=1, limit=160, pairs=64, audited=40, epochs=2, review_prompts=10, review_steps=3, pretrain=5, judged=5,
            harmless_arms=("dpo", "power-dl"), review_arms=("power-dl",), tokens=8, batch=16,
        ),
        "desk": PowerConfig(),
        "paper": PowerConfig(harmless_arms=(), review_arms=(), seeds=1),
    },
    paper=(
        "Llama-3-8B and Llama-3.1-8B, base and instruct, on UltraFeedback (hub: HuggingFaceH4/ultrafeedback_binarized) and "
        "HelpSteer2 (nvidia/HelpSteer2), and the Zephyr pipeline; batches of 128, rates of 5e-7 to 1e-6, sweeps of β, η and γ; "
        "AlpacaEval 2, Arena-Hard, MT-Bench, GSM8K and the tasks of LM harness: some 500 hours of an 80 GB GPU, and a judge. "
        "This study's own problems stop at the desk: at paper scale it runs the bandits, and your model comes by --case."
    ),
    claims=claims(),
    figure=figure,
    compare=(*COMPARE, "own_accuracy", "label_auroc", "A1_C", "A2_A", "A3_A", "A3_B", "A3_C"),
)  # fmt: skip
