"""Variational best-of-N beside KL-regularised RL: at the same KL, which comes closer to best-of-N's win rate?

Published: vBoN appears most often on the front of win rate against KL, ahead of PPO, DPO, BoNBoN and SFT on winners. Desk, two
cases. *exact*: all 4,096 strings of a character chain counted from review sentences, random rewards, gradients by enumeration:
no noise. *reviews*: a 0.8 M Llama of review sentences, a TF-IDF sentiment classifier as the reward, judged by itself (win rate
against one sample of the reference, which is what best-of-N optimises) and by a gold classifier on sentence embeddings. Desk
scale cannot show: human or model judges, summarisation, billions of weights. Theory expects a small margin: for Gaussian
rewards best-of-N is 0.8, 2.2 and 2.8 points of win rate ahead of the best tilt of the raw reward at 0.5, 1 and 2 nats.

An arm is a callable ``(task) -> iterator of (setting, policy)``, see ``arms.Task``: with ``task.strings`` a policy is its
log-probabilities ``(S,)``; else it is a model trained from the folder ``task.path``, or a list of texts for each prompt. Every
point is judged; the point ``config.headline``, or else the last, is also reported without a suffix.

``prepare`` returns a ``Case``: ``strings`` (reference log-probabilities and rewards of all strings) or ``reviews`` (an
`assay.alignment.preferences.ReviewCase`: policy, prompts, proxy, gold scorer, the reference's answers).
"""

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from assay.alignment.preference_training import silence, trainer_settings
from assay.alignment.preferences import COMPARE, ReviewCase, evaluate, judged, review_case
from assay.bench import Claim, Config, NotApplicable, Replicate, Study, above, at_least, at_most
from assay.data import load_reviews

from .arms import Points, Task, bon, bon_sft, kl_rl, order_twin, simulated, vbon
from .exact import Strings, best_tilt, bon_logp, chain, counted_chain, kl, random_rewards, tilt_at_kl, win_rate

NEW_TOKENS = 20
"""Of an answer, in the table, in training and where policies are judged: the shared problem's default."""


class VBoNStudyConfig(Config):
    cases: tuple[Literal["exact", "reviews"], ...] = ("exact", "reviews")
    """Each is repeated over the seeds."""
    source: str = "reviews"
    """Labelled sentences: a name or a path, as `load_reviews` takes it."""
    exact_ns: tuple[int, ...] = (2, 4, 8, 16, 64)
    """N of vBoN and best-of-N in the exact case."""
    exact_betas: tuple[float, ...] = (20.0, 10.0, 5.0, 2.5, 1.2, 0.6, 0.3)
    """β of KL-regularised RL in the exact case."""
    exact_steps: int = Field(200, ge=1)
    """Full-gradient steps."""
    draws: int = Field(1_000_000, ge=1000)
    """Best-of-N draws that the closed form is compared with."""
    ns: tuple[int, ...] = (4, 16)
    """N of vBoN on reviews."""
    bon_ns: tuple[int, ...] = (2, 4, 8, 16, 64)
    """N of best-of-N on reviews."""
    betas: tuple[float, ...] = (1.0, 0.1, 0.03)
    """β of KL-regularised RL on reviews, whose KL must bracket vBoN's."""
    sft_n: int = Field(4, ge=2)
    """N of the winners that SFT is given."""
    headline: float = 16
    """The setting whose numbers are reported without a suffix."""
    pretrain_steps: int = Field(300, ge=1)
    """Steps of 32 sentences for the language model."""
    prompts: int = Field(100, ge=2)
    """Prompts, trained on and judged on."""
    table: int = Field(300, ge=8)
    """Answers of the reference a prompt: the table of rewards."""
    steps: int = Field(80, ge=1)
    """Policy steps of every trained arm."""
    group: int = Field(8, ge=2)
    """Answers a prompt in a step; four prompts a step."""
    lr: float = Field(1.5e-4, gt=0)
    """Learning rate of every trained arm."""
    per_prompt: int = Field(25, ge=1)
    """Answers a prompt that the proxy judges."""
    gold_per_prompt: int = Field(5, ge=1)
    """Answers a prompt that the gold scorer and VADER judge."""


class Case(NamedTuple):
    """One of the two."""

    strings: Strings | None = None
    reviews: ReviewCase | None = None


def prepare(config: VBoNStudyConfig, log: Any) -> Case:
    name, _, seed = log.replicate.partition("/")
    if name == "exact":
        text = "\n".join(load_reviews(config.source).sentences)
        return Case(strings=Strings(chain(*counted_chain(text, 8), length=4), random_rewards(8, 4, int(seed))))
    reviews = review_case(
        config.source,
        seed=int(seed),
        steps=config.pretrain_steps,
        prompts=config.prompts,
        table=config.table,
        gold_table=config.gold_per_prompt,
        track=partial(log.track, label="pre-training"),
    )
    log.note(f"language model: {reviews.heldout_loss:.2f} nats a token on unseen sentences; dropped {reviews.dropped}")
    return Case(reviews=reviews)


def trial(arm: Any, shared: Case, config: VBoNStudyConfig, log: Any) -> dict[str, float]:
    if shared.strings is not None:
        return exact_trial(arm, shared.strings, config, log)
    assert shared.reviews is not None
    return review_trial(arm, shared.reviews, config, log)


# ---- the enumerated case -----------------------------------------------------------------------------------------------


def vbon_exact(task: Task) -> Points:
    """The objective itself instead of its bound, by enumeration."""
    if task.strings is None:
        raise NotApplicable(
            "on real text the exact objective and its bound pay the same to the last digits: trained by --arm only"
        )
    return vbon(task, "exact")


def exact_trial(arm: Any, strings: Strings, config: VBoNStudyConfig, log: Any) -> dict[str, float]:
    task = Task(config.exact_ns, config.exact_betas, config.sft_n, config.exact_steps, strings=strings)
    points = list(arm(task))
    metrics: dict[str, float] = {}
    teachers = {n: bon_logp(strings, n) for n in config.exact_ns}
    for setting, logp in points:
        found = {"kl": kl(logp, strings.ref_logp), "proxy_win": win_rate(logp, strings)}
        metrics |= suffixed(found, setting)
        log.metric("frontier", found["proxy_win"], found["kl"])
    settings_are_n = all(setting in teachers for setting, _ in points)
    for n, teacher in teachers.items():
        # the point that was meant for this n; where settings mean something else, the nearest
        own = [logp for setting, logp in points if setting == n and settings_are_n]
        metrics[f"to_bon@{n}"] = min(kl(logp, teacher) for logp in own or [logp for _, logp in points])
    if settings_are_n:
        # beside the raw reward's optimum of the same KL, and the one nearest to best-of-N
        for setting, logp in points:
            tilt, _ = tilt_at_kl(strings, kl(logp, strings.ref_logp))
            metrics[f"over_tilt@{setting:g}"] = win_rate(logp, strings) - win_rate(tilt, strings)
            metrics[f"tilt_to_bon@{setting:g}"] = kl(best_tilt(strings, teachers[int(setting)])[0], teachers[int(setting)])
    twins = list(arm(order_twin(task)))
    metrics["order_change"] = max((a - b).abs().max().item() for (_, a), (_, b) in zip(points, twins, strict=True))
    if log.arm == "bon":
        tied = Strings(strings.ref_logp, (2 * strings.rewards).round() / 2)
        for name, each in (("distinct", strings), ("tied", tied)):
            metrics[f"sum_error_{name}"] = max(abs(bon_logp(each, n).exp().sum().item() - 1) for n in config.exact_ns)
            metrics[f"simulation_{name}"] = simulated(each, 4, config.draws, log.seed)
    return {**metrics, **chosen(metrics, points, config)}


# ---- review sentences --------------------------------------------------------------------------------------------------


def review_trial(arm: Any, case: ReviewCase, config: VBoNStudyConfig, log: Any) -> dict[str, float]:
    seed = int(log.replicate.partition("/")[2])

    def reward(prompts: list[str], completions: list[str], **more: Any) -> list[float | None]:
        return case.proxy([p + c for p, c in zip(prompts, completions, strict=True)]).tolist()

    settings = trainer_settings(
        "",
        steps=config.steps,
        batch=4 * config.group,
        lr=config.lr,
        seed=seed,
        num_generations=config.group,
        max_completion_length=NEW_TOKENS,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=min(5, config.steps),
    )
    del settings["output_dir"]
    with case.sft.on_disk() as path:
        task = Task(
            ns=config.bon_ns if log.arm == "bon" else config.ns,
            betas=config.betas,
            sft_n=config.sft_n,
            steps=config.steps,
            path=path,
            prompts=case.prompts,
            texts=case.reference.texts,
            rewards=case.reference.proxy,
            reward=reward,
            settings=settings,
            seed=seed,
            quiet=silence,
        )
        metrics: dict[str, float] = {}
        points = []
        for setting, policy in arm(task):
            by_gold = log.arm != "bon" or setting in config.ns  # best-of-N beside vBoN's points: encoding is half of its cost
            found = judge(policy, case if by_gold else replace(case, gold=None), config, seed, setting)
            metrics |= suffixed(found, setting)
            log.metric("frontier", found["proxy_win"], found["kl"])
            points.append((setting, None))
    return {**metrics, **chosen(metrics, points, config)}


def judge(policy: Any, case: ReviewCase, config: VBoNStudyConfig, seed: int, n: float) -> dict[str, float]:
    """A model by its own answers; best-of-N by the winners among the reference's, its KL in the limit of long strings."""
    if not isinstance(policy, list):
        few = {"gold_per_prompt": config.gold_per_prompt, "kl_per_prompt": min(10, config.per_prompt)}
        return evaluate(policy.eval(), case, seed=seed + 10_000, per_prompt=config.per_prompt, **few)
    full = [[p + text for text in texts[: config.per_prompt]] for p, texts in zip(case.prompts, policy, strict=True)]
    found = judged(full, case, min(config.gold_per_prompt, len(full[0])))
    tokens = case.sft.load()[1]([text for row in policy for text in row[: config.per_prompt]], add_special_tokens=False)[
        "input_ids"
    ]
    pairs = [pair for row in tokens for pair in pairwise(row)]
    scores = case.proxy([text for row in full for text in row]).reshape(len(full), -1)
    return {
        **found,
        "proxy_win": winners_win_rate(scores, case.reference.proxy, int(n)),
        "kl": math.log(n) - (n - 1) / n,
        "distinct2": len(set(pairs)) / max(1, len(pairs)),
        "length": float(np.mean([min(len(row) + 1, NEW_TOKENS) for row in tokens])),  # with the end token, as `evaluate` counts
    }


def winners_win_rate(scores: np.ndarray, table: np.ndarray, n: int) -> float:
    """Win rate of winners ``(P, k)`` against the answers that they were not picked from: the k-th is of the k-th n."""
    k = scores.shape[1]
    if table.shape[1] <= n:
        raise ValueError(f"table: {table.shape[1]} answers a prompt leave none that the best of {n} was not picked from")
    beaten = (scores[:, :, None] > table[:, None, :]) + 0.5 * (scores[:, :, None] == table[:, None, :])
    own = np.arange(table.shape[1]) // n == np.arange(k)[:, None]  # (k, M)
    return float(beaten[:, ~own].mean())


def suffixed(metrics: dict[str, float], setting: float) -> dict[str, float]:
    return {f"{name}@{setting:g}": value for name, value in metrics.items()}


def chosen(metrics: dict[str, float], points: list[tuple[float, Any]], config: VBoNStudyConfig) -> dict[str, float]:
    """The headline point's numbers, without their suffix."""
    settings = [setting for setting, _ in points]
    suffix = f"@{config.headline if config.headline in settings else settings[-1]:g}"
    found = {name.removesuffix(suffix): value for name, value in metrics.items() if name.endswith(suffix)}
    return {name: value for name, value in found.items() if not name.startswith(("to_bon", "over_tilt", "tilt_to_bon"))}


# ---- claims ------------------------------------------------------------------------------------------------------------

TRAINED = ("vbon", "kl-rl", "bon-sft")


def on(case: str, statistic: Any) -> Any:
    """A statistic of one case's replicates."""
    return lambda r: statistic(r) if r.name.startswith(f"{case}/") else None


def worst(arm: str, metric: str, r: Replicate, least_n: int = 2, pick: Any = max) -> float:
    """The largest (or least) of a metric over N ≥ ``least_n``."""
    return pick(r[arm].metrics[f"{metric}@{n}"] for n in r.config.exact_ns if n >= least_n)


def frontier(r: Replicate, arm: str) -> tuple[np.ndarray, np.ndarray]:
    """KL and win rate of an arm's points, by KL."""
    kls, wins = r[arm].curve("frontier")
    order = np.argsort(kls)
    return np.asarray(kls)[order], np.asarray(wins)[order]


def bracketed(r: Replicate) -> bool:
    """Whether KL-RL's smallest and largest KL lie on either side of all of vBoN's."""
    ours, rival = frontier(r, "vbon")[0], frontier(r, "kl-rl")[0]
    return bool(rival[0] <= ours[0] and ours[-1] <= rival[-1])


def matched_gain(r: Replicate) -> float:
    """vBoN's win rate minus KL-RL's at the same KL, in points; the mean over N.

    KL-RL's is interpolated, from the reference (no KL, half the wins) on, between the probit of the win rate and the root of
    the KL. There the optima for a Gaussian reward are a straight line; chords of the win rate over the KL itself would run
    below a concave curve, by as much as the difference that is sought.
    """
    kls, wins = frontier(r, "vbon")
    rival_kls, rival_wins = (
        np.concatenate([[least], values]) for least, values in zip((0, 0.5), frontier(r, "kl-rl"), strict=True)
    )
    probit = NormalDist().inv_cdf
    between = np.interp(np.sqrt(kls), np.sqrt(rival_kls), [probit(w) for w in rival_wins.clip(1e-6, 1 - 1e-6)])
    return 100 * float(np.mean(wins - [NormalDist().cdf(z) for z in between]))


def pareto_lead(r: Replicate) -> float:
    """Share of vBoN's points that no trained point beats in both KL and win rate, minus the best share of the others."""
    points = {arm: list(zip(*frontier(r, arm), strict=True)) for arm in TRAINED}
    everyone = [point for arm in TRAINED for point in points[arm]]

    def on_front(point: tuple[float, float]) -> bool:
        return not any(k <= point[0] and w >= point[1] and (k, w) != point for k, w in everyone)

    shares = {arm: float(np.mean([on_front(point) for point in points[arm]])) for arm in TRAINED}
    return shares["vbon"] - max(share for arm, share in shares.items() if arm != "vbon")


def teacher_gap(metric: str) -> Any:
    """Best-of-16's metric minus vBoN's at N = 16, in points."""
    return lambda r: 100 * (r["bon"].metrics[f"{metric}@16"] - r["vbon"].metrics[f"{metric}@16"])


def learnt(r: Replicate) -> float:
    """How far the weaker vBoN run is ahead of the reference on the proxy, in points of win rate."""
    return 100 * (min(frontier(r, "vbon")[1]) - 0.5)


def figure(results: list[Replicate]) -> Any:
    from matplotlib.figure import Figure

    cases = [case for case in ("exact", "reviews") if any(r.name.startswith(case) and r.outcomes for r in results)]
    drawn = Figure(figsize=(1 + 4.5 * max(1, len(cases)), 4), layout="constrained")
    for axes, case in zip(drawn.subplots(1, max(1, len(cases)), squeeze=False)[0], cases, strict=False):
        for r in (r for r in results if r.name.startswith(case)):
            for i, arm in enumerate(r.outcomes):
                if len(frontier(r, arm)[0]):
                    axes.plot(
                        *frontier(r, arm), f"C{i}o-", markersize=4, alpha=0.7, label=arm if r.name.endswith("/0") else None
                    )
        axes.set(title=case, xlabel="KL from the reference, nats", ylabel="win rate against one reference sample")
        axes.legend(fontsize=8)
    return drawn


LEARNT = Claim(
    "reviews: vBoN has learnt, its weaker run wins at least 5 points more often than the reference",
    on("reviews", learnt),
    at_least(5.0),
)
BRACKETED = Claim("reviews: KL-RL's runs bracket both of vBoN's in KL", on("reviews", bracketed), at_least(1))

study = Study(
    prepare=prepare,
    trial=trial,
    replicates=lambda config: [f"{case}/{seed}" for case in config.cases for seed in range(config.seeds)],
    arms={"vbon": vbon, "vbon-exact": vbon_exact, "kl-rl": kl_rl, "bon-sft": bon_sft, "bon": bon},
    scales={
        "smoke": VBoNStudyConfig(cases=("exact",), seeds=1, exact_ns=(2, 4, 16, 64), draws=100_000),
        "desk": VBoNStudyConfig(),
        "paper": VBoNStudyConfig(ns=(2, 4, 8, 16, 64), betas=(1.0, 0.5, 0.2, 0.1, 0.03), steps=2000, lr=3e-5, seeds=5),
    },
    paper=(
        "Sentiment: lvwerra/gpt2-imdb with lvwerra/distilbert-imdb's logit as the reward, 300 samples a prompt, 40 new tokens, lr "
        "3e-5, batch 32; summaries: a Pythia-2.8B SFT model and its reward model on openai/summarize_from_feedback (TL;DR), lr "
        "3e-6, temperatures .25, .5, .75 and 1; about 10 and 100 GPU hours. This configuration runs the sweep on the small model."
    ),
    compare=COMPARE,
    claims=[
        Claim("exact: best-of-N probabilities sum to one, ties or not (largest error)", on("exact", lambda r: max(r["bon"].sum_error_distinct, r["bon"].sum_error_tied)), at_most(1e-10)),
        Claim("exact: they agree with best-of-4 done by drawing, ties or not (χ² in standard deviations)", on("exact", lambda r: max(r["bon"].simulation_distinct, r["bon"].simulation_tied)), at_most(5.0)),
        Claim("exact: vBoN's bound ends within 0.02 nats of best-of-N at every N", on("exact", lambda r: worst("vbon", "to_bon", r)), at_most(0.02)),
        Claim("exact: the objective itself ends within 0.001 nats", on("exact", lambda r: worst("vbon-exact", "to_bon", r)), at_most(1e-3)),
        Claim("exact: no β brings the raw reward within 0.05 nats of best-of-N at any N ≥ 4", on("exact", lambda r: worst("vbon", "tilt_to_bon", r, 4, min)), at_least(0.05)),
        Claim("exact: at the same KL vBoN wins at least as often as the raw reward's optimum, N ≥ 4 (least difference)", on("exact", lambda r: worst("vbon", "over_tilt", r, 4, min)), at_least(0.0), "ahead"),
        Claim("exact: exp(reward) for the reward leaves vBoN as it was, to the bit", on("exact", lambda r: r["vbon"].order_change), at_most(0.0)),
        Claim("exact: it changes KL-RL", on("exact", lambda r: r["kl-rl"].order_change), above(1e-3)),
        Claim("reviews: at the same KL vBoN wins at least as often as KL-RL (points, mean over N)", on("reviews", matched_gain), at_least(0.0), "ahead", (LEARNT, BRACKETED)),
        Claim("reviews: no trained method has a larger share of its points on the front (lead; 0: level)", on("reviews", pareto_lead), at_least(0.0), "vBoN's is largest", (LEARNT,)),
        # Reported: the method is not meant to beat its teacher, and the gold scorer was not optimised.
        Claim("reviews: best-of-16 minus vBoN at N = 16, points of win rate", on("reviews", teacher_gap("proxy_win"))),
        Claim("reviews: the same by the gold scorer", on("reviews", teacher_gap("gold_win"))),
        Claim("reviews: KL of vBoN at N = 16 (best-of-16: 1.84)", on("reviews", lambda r: r["vbon"].metrics["kl@16"])),
    ],
    figure=figure,
)  # fmt: skip
