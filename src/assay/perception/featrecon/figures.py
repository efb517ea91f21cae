"""The study's figures: what each arm reached, and where theory puts the tail centres."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .theory import tail_cosines

_RATIOS = (1, 2, 3, 5, 10, 20, 30, 50, 100, 300, 1000)


def arms_figure(results: Sequence[Any]) -> Any:
    """Balanced accuracy and that of the rare classes by arm: a bar for the mean, a dot for each replicate."""
    from matplotlib.figure import Figure

    results = [r for r in results if r.outcomes]
    figure = Figure(figsize=(8.5, 4.2), layout="constrained")
    if not results:
        return figure
    arms = list(dict.fromkeys(a for r in results for a in r.outcomes))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, metric, title in zip(panels, ("balanced", "few"), ("all classes", "the rare third"), strict=True):
        for row, arm in enumerate(arms):
            values = [r[arm].metrics[metric] for r in results if arm in r]
            axes.barh(row, np.mean(values), color="C1" if arm.startswith("featrecon") else "0.75")
            axes.plot(values, [row] * len(values), "k.", markersize=4)
        axes.set(title=title, xlabel="balanced accuracy, %", yticks=range(len(arms)), yticklabels=arms)
    panels[0].invert_yaxis()
    return figure


def theory_figure() -> Any:
    """Mean cosine between tail centres at the optimum of the contrast, as the head grows; one line a temperature."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.6), layout="constrained")
    axes = figure.subplots()
    for tau, style in ((1.0, "C1o-"), (0.5, "C0s-"), (0.1, "C2^-")):
        axes.plot(_RATIOS, tail_cosines(_RATIOS, tau), style, markersize=4, label=f"τ = {tau:g}")
    axes.axhline(-1 / 3, color="0.8", zorder=0)
    axes.set(xscale="log", xlabel="rows of the head class / rows of a tail class", ylabel="cosine between tail centres")
    axes.legend()
    return figure
