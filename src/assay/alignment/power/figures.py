"""The study's picture: what each loss does to three bandits, and gold against KL on reviews."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

SHOWN = (
    ("sft", ""), ("dpo", ""), ("ipo", ""), ("simpo", ""), ("power", ""), ("power", "_eta1"), ("dl", ""), ("power-dl", ""),
    ("power-initial", ""),
)  # fmt: skip
PANELS = (
    ("A1_C", "A1, lucky once: P(C), low is right"),
    ("A2_A", "A2, unlucky once: P(A), high is right"),
    ("A3_C", "A3: P(C), low is right"),
)


def draw(results: list[Any]) -> Figure | None:
    """None without any result."""
    bandits = next((r for r in results if r.name == "bandits"), None)
    reviews = [r for r in results if r.name.startswith("reviews/")]
    if bandits is None:
        return None
    shown = Figure(figsize=(13, 3.8), layout="constrained")
    axes = shown.subplots(1, 4)
    bars = [(arm, end) for arm, end in SHOWN if arm in bandits.outcomes and f"A1_C{end}" in bandits[arm].metrics]
    for axis, (metric, title) in zip(axes, PANELS, strict=False):
        for step, colour, height in (("_early", "#9ca3af", 0.4), ("", "#4338ca", -0.4)):
            values = [bandits[arm].metrics[f"{metric}{end}{step}"] for arm, end in bars]
            axis.barh(
                np.arange(len(bars)), values, height=height, align="edge", color=colour, label="early" if step else "at the end"
            )
        axis.set_yticks(range(len(bars)), [f"{arm}{end.replace('_', ' ')}" for arm, end in bars], fontsize=7)
        axis.invert_yaxis()
        axis.set_title(title, fontsize=9)
    axes[0].legend(frameon=False, fontsize=7)
    for arm, colour in (("simpo", "#b45309"), ("power-dl", "#4338ca")):
        for i, r in enumerate(r for r in reviews if arm in r.outcomes and "gold_win" in r[arm].metrics):
            kl, gold = (np.array([start, *r[arm].curve(name)[1]]) for name, start in (("kl", 0.0), ("gold_win", 0.5)))
            axes[3].plot(kl, gold, color=colour, marker="o", ms=3, label=arm if i == 0 else None)
    axes[3].set(xlabel="KL to the initial policy (nats)", ylabel="gold win rate")
    axes[3].set_title("Reviews", fontsize=9)
    if axes[3].lines:
        axes[3].legend(frameon=False, fontsize=7)
    return shown
