"""The study's figure: reward against distance, on the tree and on text."""

from typing import Any

import numpy as np

COLOURS = {
    "dpo": "#4b5563",
    "tr-dpo-soft": "#4338ca",
    "tr-dpo-hard": "#0f766e",
    "ipo": "#9ca3af",
    "tr-ipo-soft": "#a78bfa",
    "simpo": "#b45309",
}
PANELS = (
    ("tree", "tree_kl", "tree_gold", "tree, best beta: hidden reward"),
    ("reviews", "kl", "gold_win", "reviews: gold win rate"),
    ("harmless", "harmless_kl", "harmless_accuracy", "harmless: held-out accuracy"),
)


def frontiers(results: list[Any]) -> Any:
    """One panel a case, one line a replicate and arm, a dot at its end."""
    from matplotlib.figure import Figure

    shown = Figure(figsize=(12, 4), layout="constrained")
    for axis, (case, distance, quality, title) in zip(shown.subplots(1, len(PANELS)), PANELS, strict=True):
        for r in results:
            if not r.name.startswith(f"{case}/"):
                continue
            for arm, colour in COLOURS.items():
                if arm in r and distance in r[arm].curves:
                    x, y = np.asarray(r[arm].curve(distance)[1]), np.asarray(r[arm].curve(quality)[1])
                    label = arm if arm not in axis.get_legend_handles_labels()[1] else None
                    axis.plot(x, y, color=colour, lw=1.2, alpha=0.8, label=label)
                    axis.plot(x[-1:], y[-1:], "o", color=colour, ms=4)
        axis.set(xlabel="KL to the SFT policy (nats)", title=title)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(frameon=False, fontsize=8)
    return shown
