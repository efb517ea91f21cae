"""What the study's claims read off a replicate: one number, or None where there is none to read."""

from collections.abc import Callable
from typing import Any

import numpy as np

from .frontier import gain_at_equal_kl, shared_bins

EQUAL_BETA = 0.1  # at which distances are compared on the tree
OVER = 0.05  # of the reward's standard deviation: a smaller fall from the peak is no over-optimisation

LEARNT = {"tree": "tree_peak", "harmless": "harmless_accuracy", "reviews": "proxy_win"}
DISTANCE = {"tree": f"tree_kl@{EQUAL_BETA:g}", "harmless": "harmless_kl", "reviews": "kl"}

Statistic = Callable[[Any], float | None]


def on(case: str, statistic: Statistic) -> Statistic:
    """A statistic that applies to one case's replicates alone."""
    return lambda r: statistic(r) if r.name.startswith(f"{case}/") else None


def learns(case: str) -> Statistic:
    """What DPO reaches: its best expected reward on the tree, held-out accuracy, proxy wins."""
    return on(case, lambda r: r["dpo"].metrics.get(LEARNT[case]))


def frontier_gain(arm: str, base: str) -> Statistic:
    """Mean over KL bins that both reach of the difference in best reward."""

    def statistic(r: Any) -> float | None:
        ours, theirs = ((r[name].curve("tree_kl")[1], r[name].curve("tree_gold")[1]) for name in (arm, base))
        return gain_at_equal_kl(ours, theirs)

    return statistic


def envelope_gain(arm: str, base: str) -> Statistic:
    """As `frontier_gain`, each side with its best β in every bin: what is left when no β has to be chosen beforehand."""

    def path(outcome: Any) -> tuple[np.ndarray, np.ndarray]:
        runs = [name.removeprefix("tree_kl") for name in outcome.curves if name.startswith("tree_kl")]
        kl, gold = (np.concatenate([outcome.curve(metric + run)[1] for run in runs]) for metric in ("tree_kl", "tree_gold"))
        return kl, gold

    return lambda r: gain_at_equal_kl(path(r[arm]), path(r[base]))


def bins_shared(arm: str, base: str) -> Statistic:
    return lambda r: float(len(shared_bins(r[arm].curve("tree_kl")[1], r[base].curve("tree_kl")[1])))


def smaller_fall(arm: str, base: str) -> Statistic:
    """At the β of the grid at which the base falls furthest from its peak, if it does: how much less the arm falls."""

    def statistic(r: Any) -> float | None:
        falls = {beta: r[base].metrics[f"tree_drop@{beta:g}"] for beta in r.config.betas}
        beta = max(falls, key=lambda b: falls[b])
        return falls[beta] - r[arm].metrics[f"tree_drop@{beta:g}"] if falls[beta] >= OVER else None

    return statistic


def further(case: str, arm: str, base: str) -> Statistic:
    """Nats further from the SFT policy, at equal β, learning rate and steps."""
    return difference(DISTANCE[case], arm, base)


def difference(metric: str, arm: str, base: str) -> Statistic:
    """None where one of the two was not asked for this metric."""

    def statistic(r: Any) -> float | None:
        ours, theirs = (r[name].metrics.get(metric) for name in (arm, base))
        return None if ours is None or theirs is None else ours - theirs

    return statistic


def lower_beta_gain(r: Any) -> float | None:
    """The sceptic's baseline: a fixed reference that is held more loosely."""
    lower = [beta for beta in r.config.betas if beta <= EQUAL_BETA / 3]
    if not lower or EQUAL_BETA not in r.config.betas:
        return None
    best = max(r["dpo"].metrics[f"tree_peak@{beta:g}"] for beta in lower)
    return best - r["tr-dpo-soft"].metrics[f"tree_peak@{EQUAL_BETA:g}"]
