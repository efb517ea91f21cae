"""The study's figure."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

_COLOURS = {
    "zero": "#9ca3af", "ols_A": "#93c5fd", "gd_A": "#2563eb", "ols_B": "#fca5a5", "gd_B": "#dc2626", "icl": "#111827",
    "icl_AB": "#7c3aed",
}  # fmt: skip


def figure(results: list[Any]) -> Figure:
    """Errors by length of context on three sets of prompts, and the weights of the Bayesian learner."""
    shown = Figure(figsize=(11, 7), layout="constrained")
    axes = shown.subplots(2, 2)
    chosen = [r for r in results if r.name.startswith("regression/")]
    titles = {"A": "the class trained on", "B": "an unseen class", "diabetes": "real rows (diabetes)"}
    for axis, (name, title) in zip(axes.flat, titles.items(), strict=False):
        _errors(axis, chosen, name)
        axis.set(title=title, xlabel="examples seen", ylabel="squared error / d", ylim=(0, 3))
    axes[0][1].legend(frameon=False, fontsize=8, ncols=2)
    _weights(axes[1][1], [r for r in results if r.name.startswith("selection/") and "posterior" in r])
    return shown


def _errors(axis: Any, results: list[Any], name: str) -> None:
    for arm, colour in _COLOURS.items():
        curves = [r[arm].curve(f"error_{name}") for r in results if arm in r]
        if curves:
            values = np.array([curve[1] for curve in curves])
            axis.plot(curves[0][0], values.mean(0), color=colour, lw=2, marker=".", label=arm)
            axis.fill_between(curves[0][0], values.min(0), values.max(0), color=colour, alpha=0.12, lw=0)


def _weights(axis: Any, results: list[Any]) -> None:
    deltas = {"tight": "1/81", "even": "1", "wide": "81"}
    for offset, when, colour in ((-0.2, "first", "#c7d2fe"), (0.2, "last", "#4338ca")):
        means = [float(np.mean([r["posterior"].metrics[f"{name}_weight_{when}"] for r in results] or [0])) for name in deltas]
        axis.bar(np.arange(len(deltas)) + offset, means, 0.4, color=colour, label=f"{when} k")
    axis.axhline(0.25, color="#9ca3af", ls=":", lw=1)
    axis.set_xticks(range(len(deltas)), deltas.values())
    axis.set(title="Bayesian learner", xlabel="δ", ylabel="weight of the component of lowest error", ylim=(0, 1))
    axis.legend(frameon=False, fontsize=8)
