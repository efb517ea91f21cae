"""The study's figures: AUC by arm and group, one real series with its score, pruning curves."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

PRUNING = ("timeinf-linear", "self-influence", "leave-one-out", "knn-shapley", "data-oob", "random")


def draw(results: list[Any]) -> dict[str, Figure]:
    """``auc``: a dot for each arm and group. ``pruning``: error against the share dropped, the median over series."""
    figures = {}
    for metric in ("few_auc_m100", "few_auc_m25"):
        groups = [r for r in results if any(metric in o.metrics for o in r.outcomes.values())]
        if groups:
            figures[metric.removeprefix("few_")] = _dots(groups, metric)
    pruned = [r for r in results if any("most_area" in o.metrics for o in r.outcomes.values())]
    if pruned:
        figures["pruning"] = _curves(pruned)
    return figures


def _dots(groups: list[Any], metric: str) -> Figure:
    arms = [arm for arm in groups[0].outcomes if any(arm in r and metric in r[arm].metrics for r in groups)]
    values = {arm: [r[arm].metrics.get(metric, np.nan) if arm in r else np.nan for r in groups] for arm in arms}
    arms.sort(key=lambda arm: np.nanmean(values[arm]))
    figure = Figure(figsize=(7, 0.32 * len(arms) + 1.4))
    axes = figure.subplots()
    for i, r in enumerate(groups):
        axes.plot([values[arm][i] for arm in arms], range(len(arms)), "o", ms=5, alpha=0.75, label=r.name)
    axes.plot([np.nanmean(values[arm]) for arm in arms], range(len(arms)), "k|", ms=14, mew=2, label="mean")
    axes.axvline(0.5, color="0.8", lw=1, zorder=0)
    axes.set_yticks(range(len(arms)), arms)
    axes.set_xlabel(f"ROC-AUC, blocks of {metric.rpartition('m')[2]}, the files that every arm scored")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return figure


def _curves(pruned: list[Any]) -> Figure:
    figure = Figure(figsize=(8, 3.2))
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, curve, title in (
        (left, "relative_mse_most", "most valuable dropped first"),
        (right, "relative_mse_least", "least valuable dropped first"),
    ):
        for arm in PRUNING:
            found = [r[arm].curve(curve) for r in pruned if arm in r and curve in r[arm].curves]
            if found:
                axes.plot(found[0][0], np.median([values for _, values in found], axis=0), marker=".", label=arm)
        axes.axhline(1, color="0.8", lw=1, zorder=0)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("% of training blocks dropped")
    left.set_ylabel("test error / that of all data")
    left.legend(fontsize=7, frameon=False)
    return figure


def draw_series(name: str, values: np.ndarray, labels: np.ndarray, scores: np.ndarray, m: int) -> Figure:
    """A series with its labelled windows, and its TimeInf score below."""
    figure = Figure(figsize=(8, 3.4))
    top, bottom = figure.subplots(2, 1, sharex=True)
    top.plot(values, lw=0.6, color="0.3")
    bottom.plot(scores, lw=0.8, color="tab:red")
    for axes in (top, bottom):
        axes.fill_between(np.arange(len(labels)), 0, 1, where=labels, transform=axes.get_xaxis_transform(), alpha=0.2, lw=0)
    top.set_title(f"{name}: labelled windows shaded", fontsize=9)
    bottom.set_ylabel(f"TimeInf, m = {m}")
    bottom.set_xlabel("time point")
    return figure
