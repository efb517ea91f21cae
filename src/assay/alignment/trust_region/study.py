"""Does a moving reference give a better trade of quality for distance than a fixed one, each at its best beta?

Published: TR-DPO, TR-IPO and TR-KTO win 8.4, 14.3 and 15 points more often than their fixed-reference bases (Pythia 6.9B,
TL;DR), and gain 9.5, 15.1 and 2.3 points on AlpacaEval 2 (Llama-3), although they end further from the SFT model. Desk: three
cases. ``tree``: a language of 4^6 sequences that is enumerated, so that reward and KL are exact, every beta of the grid at
once. ``harmless``: a Llama of 0.8 million weights on human pairs (HH harmless), which have no scorer: held-out accuracy
against distance. ``reviews``: the same on pairs sampled from the SFT policy and labelled by a classifier with flips, judged
by another classifier. Desk cannot show: wins judged by GPT-4 or people, and anything about models of 3B and more.

An arm is a callable ``(config) -> Method`` (``arms.py``): a ``loss`` of summed log-probabilities and what its ``reference``
does, "fixed", "soft" or "hard". Arms that the text cases do not name in ``harmless_arms`` and ``reviews_arms`` run on the tree
alone, unless they are the user's own.

``prepare`` returns a ``Tree`` (a list of them to tune on), a ``HarmlessCase`` or a ``Reviews``. Your own pairs and model: ``--set cases=harmless --set
preferences=mine.jsonl --set model=path-or-hub-id``.
"""

import tempfile
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field

from assay.alignment.preference_pairs import (
    HarmlessCase,
    Pairs,
    harmless_case,
    implicit_accuracy,
    pair_logps,
    sampled_pairs,
    usable_pairs,
)
from assay.alignment.preference_training import silence, trainer_settings
from assay.alignment.preferences import COMPARE, ReviewCase, distinct2, evaluate, review_case
from assay.bench import Claim, Config, Replicate, Study, Tune, above, at_least, at_most
from assay.data.preferences import load_preferences
from assay.models.small_lm import Checkpoint, sample, token_kl

from .arms import Method, fixed_dpo, fixed_ipo, hard_dpo, simpo, soft_dpo, soft_ipo, trl_sync
from .readings import (
    EQUAL_BETA,
    bins_shared,
    difference,
    envelope_gain,
    frontier_gain,
    further,
    learns,
    lower_beta_gain,
    on,
    smaller_fall,
)
from .tree import Tree, climb, fixed_or_moving, grow

GRID = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
MOVING = ("tr-dpo-soft", "tr-dpo-hard")
PAIRED = (("tr-dpo-soft", "dpo"), ("tr-dpo-hard", "dpo"), ("tr-ipo-soft", "ipo"))
TUNED_ON = "tree/1000"  # languages of its own


class TrustRegionConfig(Config):
    cases: tuple[Literal["tree", "harmless", "reviews"], ...] = ("tree", "harmless", "reviews")
    """Which problems; each is repeated over the seeds."""
    alpha: float = Field(0.6, gt=0, lt=1)
    """Share of the policy in a soft update."""
    syncs: int = Field(8, ge=1)
    """Updates of the reference in a run."""
    beta: float = Field(EQUAL_BETA, gt=0)
    """On the tree, where it is tuned."""
    betas: tuple[float, ...] = GRID
    """On the tree, trained besides: what is read off at equal beta."""
    vocabulary: int = Field(4, ge=2)
    """Of the tree."""
    length: int = Field(6, ge=3)
    """Of the tree's sequences."""
    hidden: int = 32
    """Width of the tree's recurrent network."""
    tree_pairs: int = 60
    """Preference pairs of the tree."""
    sharpness: float = 1.0
    """How reliably the tree's judge prefers the better: P = σ(sharpness · difference), in standard deviations of the reward."""
    tree_steps: int = 400
    tree_lr: float = 1e-3
    tree_batch: int = 32
    tuning_trees: int = Field(4, ge=1)
    """Languages that the tree's beta is tuned on, by the mean of their last rewards: on one alone it is a matter of luck."""
    points: int = Field(20, ge=2)
    """Measurements along a run on the tree."""
    preferences: str = "preferences"
    """People's pairs: a set's name, a file or a hub id."""
    reviews: str = "reviews"
    """Sentences with 0/1 labels: a set's name or a file."""
    model: str = ""
    """Your own SFT model for the harmless case, a path or hub id, in place of the small Llama."""
    sft_steps: int = 300
    """Pre-training of the small Llamas."""
    review_prompts: int = Field(400, ge=1)
    """Prompts of reviews, trained on and judged on."""
    review_pairs: int = 4
    """Pairs a prompt, sampled from the SFT policy."""
    flips: float = Field(0.15, ge=0, le=1)
    """Share of the sampled pairs with the wrong label."""
    text_steps: int = 100
    text_batch: int = 32
    harmless_lr: float = 1e-4
    """DPO's best of 1e-4 and 3e-4 on a seed that is not reported; so is the next."""
    reviews_lr: float = 3e-4
    text_beta: float = Field(EQUAL_BETA, gt=0)
    harmless_arms: tuple[str, ...] = ("dpo", "tr-dpo-soft", "tr-dpo-hard")
    reviews_arms: tuple[str, ...] = ("dpo", "tr-dpo-soft", "trl-sync")
    held_pairs: int = Field(400, ge=2)
    """Held-out pairs of people that a policy is judged by, of those there are."""
    looks: int = Field(2, ge=1)
    """Evaluations along a run on text."""
    samples: int = 3
    """Completions of each prompt that a text policy is judged by."""


class Reviews(NamedTuple):
    case: ReviewCase
    train: Pairs


def replicates(config) -> list[str]:
    return [f"{case}/{seed}" for case in config.cases for seed in range(config.seeds)]


def prepare(config, log) -> Any:
    case, _, number = log.replicate.rpartition("/")
    seed = int(number)
    if case == "tree":
        shape = {"vocabulary": config.vocabulary, "length": config.length, "hidden": config.hidden}
        grown = partial(grow, sft_sequences=60, sft_steps=60, pairs=config.tree_pairs, sharpness=config.sharpness, **shape)
        return [grown(seed=seed + i) for i in range(config.tuning_trees)] if log.replicate == TUNED_ON else grown(seed=seed)
    if case == "harmless":
        if config.model:
            return own_model_case(config, seed)
        made = harmless_case(config.preferences, seed=seed, steps=config.sft_steps, track=tracked(log))
        log.note(f"{len(made.train)} pairs to train on, {len(made.test)} held out; skipped {made.train.skipped}")
        return made
    reviews = review_case(
        config.reviews, seed=seed, steps=config.sft_steps, prompts=config.review_prompts, table=10, track=tracked(log)
    )
    policy, tokenizer = reviews.sft.load()
    pairs = sampled_pairs(
        policy, tokenizer, reviews.prompts, reviews.proxy, seed=seed + 1, per_prompt=config.review_pairs, flips=config.flips
    )
    log.note(f"{len(pairs)} sampled pairs, {pairs.flipped.mean():.0%} with the wrong label; skipped {pairs.skipped}")
    return Reviews(reviews, pairs)


def tracked(log):
    return lambda steps: log.track(steps, "pre-training")


def own_model_case(config, seed) -> HarmlessCase:
    """People's pairs as they are, a share of 15 % held out, and the user's model."""
    rows = load_preferences(config.preferences).pairs
    order = np.random.default_rng(seed).permutation(len(rows)).tolist()
    held = max(2, round(0.15 * len(order)))
    test, train = (usable_pairs([rows[i][:3] for i in part]) for part in (order[:held], order[held:]))
    return HarmlessCase(Checkpoint(path=config.model), train, test, float("nan"))


def trial(arm, shared, config, log) -> dict[str, float]:
    method = arm(config)
    case = log.replicate.rpartition("/")[0]
    if case == "tree":
        if method.reference not in ("fixed", "soft", "hard") or method.unpaired:
            return {}  # TRL's trainers need a language model
        if isinstance(shared, Tree):
            return on_tree(method, shared, (config.beta, *config.betas), config, log)
        golds = [on_tree(method, tree, (config.beta,), config, log)["tree_gold"] for tree in shared]
        return {"tree_gold": float(np.mean(golds))}
    named = config.harmless_arms if case == "harmless" else config.reviews_arms
    if log.arm in study.arms and log.arm not in named:
        return {}
    return on_text(method, shared, config, log)


# -- tree ---------------------------------------------------------------------------------------------------------------


def on_tree(method: Method, tree: Tree, betas, config, log) -> dict[str, float]:
    """Trained with every β at once; the first is the tuned one."""
    betas = tuple(dict.fromkeys(betas))
    path = climb(
        tree,
        lambda *args: method.loss(*args, args[-1]),
        betas,
        steps=config.tree_steps,
        lr=config.tree_lr,
        batch=config.tree_batch,
        seed=log.seed,
        points=config.points,
        updater=fixed_or_moving(method.reference, config.alpha, max(1, round(config.tree_steps / config.syncs))),
        track=lambda steps: log.track(steps, "step"),
    )
    gold = torch.stack([point.gold for point in path])  # (points, betas)
    kl = torch.stack([point.kl for point in path])
    for i, beta in enumerate(betas):
        end = "" if i == 0 else f"@{beta:g}"
        for point in path:
            log.metric(f"tree_gold{end}", point.gold[i].item(), point.step)
            log.metric(f"tree_kl{end}", point.kl[i].item(), point.step)
    last, peak = path[-1], gold.max(0).values.clamp_min(0)  # the start counts: its reward is 0
    metrics = {
        "tree_gold": last.gold[0], "tree_peak": peak[0], "tree_win": last.win[0], "tree_kl": last.kl[0],
        "tree_outside": last.outside[0], "tree_accuracy": last.accuracy[0], "tree_chosen_logp": last.chosen_logp[0],
    }  # fmt: skip
    for i, beta in enumerate(betas):
        metrics |= {
            f"tree_kl@{beta:g}": kl[-1, i],
            f"tree_drop@{beta:g}": peak[i] - gold[-1, i],
            f"tree_peak@{beta:g}": peak[i],
        }
    return {name: float(value) for name, value in metrics.items()}


# -- text ---------------------------------------------------------------------------------------------------------------


def on_text(method: Method, shared: Any, config, log) -> dict[str, float]:
    from . import text

    pairs, sft = (shared.train, shared.case.sft) if isinstance(shared, Reviews) else (shared.train, shared.sft)
    look = look_at_reviews(shared, config, log) if isinstance(shared, Reviews) else look_at_pairs(shared, config, log)
    lr = config.reviews_lr if isinstance(shared, Reviews) else config.harmless_lr
    seed = int(log.replicate.rpartition("/")[2])
    with silence(), sft.on_disk() as path, tempfile.TemporaryDirectory() as folder:
        tokenizer = sft.load()[1]
        settings = trainer_settings(
            folder, steps=config.text_steps, batch=config.text_batch, lr=lr, seed=seed, warmup_steps=0.1
        )
        options = {"beta": config.text_beta, "alpha": config.alpha}
        if method.reference == "trl":
            return {"parity": text.difference_from_trl(path, tokenizer, pairs.dataset(), settings, **options)}
        every = max(1, round(config.text_steps / config.syncs))
        trainer = text.build(method, path, tokenizer, pairs.dataset(), settings, every=every, **options)
        metrics: dict[str, float] = {}

        def observe(step, model):
            metrics.update(look(model))
            for name, value in metrics.items():
                log.metric(name, value, step)

        at = {round(config.text_steps * (i + 1) / config.looks) for i in range(config.looks)}
        trainer.add_callback(text.Observe(at, observe))
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {**metrics, "train_loss": float(np.mean(losses[-3:]))}


def look_at_reviews(shared: Reviews, config, log):
    """Judged by the classifiers on completions of prompts; by held-out scores, not by the pairs."""
    few = config.samples

    def look(policy):
        return evaluate(policy, shared.case, seed=7, per_prompt=few, gold_per_prompt=few, kl_per_prompt=few)

    return look


def look_at_pairs(shared: HarmlessCase, config, log):
    """Held-out pairs and the distance from the SFT policy; there is no scorer for people's pairs."""
    sft, tokenizer = shared.sft.load()
    held = Pairs(shared.test.rows[: config.held_pairs], shared.test.skipped)
    start = pair_logps(sft, tokenizer, held)
    prompts = [row.prompt for row in held.rows[:100]]

    def look(policy):
        now = pair_logps(policy, tokenizer, held)
        drawn = sample(policy, tokenizer, prompts, per_prompt=config.samples, max_new_tokens=20, seed=7)
        kl = token_kl(policy, sft, drawn)
        return {
            "harmless_accuracy": implicit_accuracy(now, start),
            "harmless_kl": kl.exact.mean().item(),
            "harmless_chosen_gain": (now.chosen - start.chosen).mean().item(),
            "harmless_distinct2": distinct2(drawn.ids, drawn.mask),
            "harmless_length": drawn.lengths.double().mean().item(),
        }

    return look


# -- what is claimed ----------------------------------------------------------------------------------------------------


def draw(results: list[Replicate]):
    from .figures import frontiers

    return frontiers(results)


LEARNS = {
    "tree": Claim(
        "Tree: DPO learns, its best reward is a tenth of a standard deviation", statistic=learns("tree"), holds=at_least(0.1)
    ),
    "harmless": Claim("Harmless: DPO reaches a held-out accuracy of 0.55", statistic=learns("harmless"), holds=at_least(0.55)),
    "reviews": Claim("Reviews: DPO wins 0.55 by the proxy", statistic=learns("reviews"), holds=at_least(0.55)),
}
"""What has to be true of a case before its claims mean anything; those of the other cases stand without it."""


def about(case, text, statistic, holds=None, published=""):
    return Claim(
        f"{case.capitalize()}: {text}", statistic=on(case, statistic), holds=holds, published=published, gates=(LEARNS[case],)
    )


study = Study(
    prepare=prepare,
    trial=trial,
    replicates=replicates,
    arms={
        "dpo": fixed_dpo,
        "tr-dpo-soft": soft_dpo,
        "tr-dpo-hard": hard_dpo,
        "ipo": fixed_ipo,
        "tr-ipo-soft": soft_ipo,
        "simpo": simpo,
        "trl-sync": trl_sync,
    },
    tune=Tune("beta", GRID, select="tree_gold", mode="max", follow={"trl-sync": "tr-dpo-soft"}, replicate=TUNED_ON),
    scales={
        "smoke": TrustRegionConfig(seeds=1, cases=("tree",), length=5, tuning_trees=1, tree_steps=60, points=6, syncs=4),
        "desk": TrustRegionConfig(),
        "paper": TrustRegionConfig(
            cases=("harmless",),
            preferences="Anthropic/hh-rlhf",
            model="EleutherAI/pythia-2.8b",
            alpha=0.6,
            text_steps=5000,
            text_batch=64,
            harmless_lr=1e-6,
            text_beta=0.05,
            num_gpus=8,
        ),
    },
    paper=(
        "Pythia 2.8B, 6.9B and 12B (hub: EleutherAI/pythia-2.8b …), first fine-tuned on the preferred answers, on Anthropic/hh-rlhf "
        "and on Reddit TL;DR (hub: openai/summarize_from_feedback), max length 1024, one epoch, warm-up 100 steps, gradients "
        "clipped at 2, learning rate 1e-6, beta 0.05, alpha 0.6 every step count of 32 to 1024; Llama-3-8B Base and Instruct on "
        "UltraFeedback (hub: princeton-nlp/llama3-ultrafeedback), judged by AlpacaEval 2 and Arena-Hard. Both judges are GPT-4, "
        "which this study does not call; it gives the trained policies. About 60 hours of eight A100 for the Pythia grid."
    ),
    claims=[
        Claim(
            "C1: after three updates, ours (soft) and TRL's sync_ref_model have the same weights (largest difference)",
            statistic=lambda r: r["trl-sync"].metrics.get("parity"),
            holds=at_most(1e-6),
        ),
        *(
            about(
                "tree",
                f"C2, at equal KL, {arm} has at least the reward of {base}, each at its best beta (standard deviations)",
                frontier_gain(arm, base),
                at_least(0),
                "wins 8 to 15 points more often",
            )
            for arm, base in PAIRED
        ),
        *(
            about(
                "tree",
                f"at equal KL, reward of {arm} above {base}'s over all betas, none chosen beforehand",
                envelope_gain(arm, base),
            )
            for arm, base in PAIRED
        ),
        *(about("tree", f"KL bins that {arm} and {base} share, of half a nat", bins_shared(arm, base)) for arm, base in PAIRED),
        *(
            about(
                "tree",
                f"C3, where DPO over-optimises most, {arm} falls less from its peak (standard deviations less)",
                smaller_fall(arm, "dpo"),
                above(0),
                "yes",
            )
            for arm in MOVING
        ),
        *(
            about(
                case,
                f"C4, {arm} ends further from the SFT policy than DPO at equal beta (nats)",
                further(case, arm, "dpo"),
                above(0),
                "yes",
            )
            for case, arms in (("tree", MOVING), ("harmless", MOVING), ("reviews", MOVING[:1]))
            for arm in arms
        ),
        about("reviews", "gold win rate, TR-DPO soft above DPO", difference("gold_win", "tr-dpo-soft", "dpo")),
        about("reviews", "VADER win rate, TR-DPO soft above DPO", difference("vader_win", "tr-dpo-soft", "dpo")),
        about("harmless", "held-out accuracy, TR-DPO soft above DPO", difference("harmless_accuracy", "tr-dpo-soft", "dpo")),
        about("harmless", "held-out accuracy, TR-DPO hard above DPO", difference("harmless_accuracy", "tr-dpo-hard", "dpo")),
        about(
            "tree",
            "SimPO's best reward above TR-DPO soft's (is a reference needed?)",
            difference("tree_peak", "simpo", "tr-dpo-soft"),
        ),
        about(
            "tree",
            "best reward of TR-DPO soft above DPO's, each at its best beta",
            difference("tree_peak", "tr-dpo-soft", "dpo"),
        ),
        about(
            "tree", "best reward that DPO has at a third of its beta or less, above TR-DPO soft's at beta 0.1", lower_beta_gain
        ),
    ],
    figure=draw,
    compare=(*COMPARE, "tree_peak", "tree_kl", "harmless_accuracy", "harmless_kl"),
)
