"""The study's figure."""

import math
from typing import Any

from matplotlib.figure import Figure


def figure(results: list[Any]) -> Figure:
    """Errors by layer, and perplexities of every arm that rounds activations to 4 bits."""
    fig = Figure(figsize=(10, 4), layout="constrained")
    depth, bars = fig.subplots(1, 2)
    _layers(depth, results)
    _perplexities(bars, results)
    return fig


def _layers(axes: Any, results: list[Any]) -> None:
    for arm in ("rtn", "rotation", "rrs", "rrs-sink-out"):
        curves = [r[arm].curve("layer_error") for r in results]
        curves = [(steps, values) for steps, values in curves if len(steps)]
        if curves:
            axes.plot(curves[0][0], sum(values for _, values in curves) / len(curves), marker=".", label=arm)
    axes.set(
        xlabel="layer",
        ylabel="relative output error, mean of 7 linears",
        title="4-bit activations, exact weights",
        ylim=(0, None),
    )
    axes.legend()


def _perplexities(axes: Any, results: list[Any]) -> None:
    arms = ("rtn", "smoothquant", "rs-g1", "rs-grouped", "rotation", "rrs", "rrs-all", "rrs-sink-out")
    for offset, color, setting in ((-0.2, "C0", "a4w16"), (0.2, "C1", "w4a4")):
        for i, arm in enumerate(arms):
            values = [v for r in results if arm in r and (v := r[arm].metrics.get(f"ppl_{setting}"))]
            if values:
                axes.bar(i + offset, _mean(values), 0.4, color=color, label=setting.upper() if i == 0 else None)
    full = [v for r in results if "fp" in r and (v := r["fp"].metrics.get("ppl_fp"))]
    if full:
        axes.axhline(_mean(full), color="black", linestyle=":", label="full precision")
        axes.set_yscale("log")
        axes.legend()
    axes.set_xticks(range(len(arms)), arms, rotation=40, ha="right")
    axes.set(ylabel="perplexity", title="geometric mean over windows")


def _mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
