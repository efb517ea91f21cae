"""The study's figures: what each arm reached, and where each rule puts its boundaries."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .angles import boundary_angles, simplex_angle


def arms_figure(results: Sequence[Any]) -> Any:
    """Balanced accuracy by arm, one panel a regime: a bar for the mean, a dot for each seed."""
    from matplotlib.figure import Figure

    results = [r for r in results if r.outcomes]
    regimes = list(dict.fromkeys(r.name.rpartition("/")[0] for r in results))
    if not regimes:
        return Figure()
    figure = Figure(figsize=(1 + 3.2 * len(regimes), 4.2), layout="constrained")
    for axes, regime in zip(figure.subplots(1, len(regimes), squeeze=False)[0], regimes, strict=True):
        mine = [r for r in results if r.name.rpartition("/")[0] == regime]
        arms = list(dict.fromkeys(a for r in mine for a in r.outcomes))
        for row, arm in enumerate(arms):
            values = [r[arm].balanced for r in mine if arm in r]
            axes.barh(row, np.mean(values), color="C1" if arm.startswith("mla") else "0.75")
            axes.plot(values, [row] * len(values), "k.", markersize=4)
        axes.set(title=regime, xlabel="balanced accuracy, %", yticks=range(len(arms)), yticklabels=arms)
        axes.invert_yaxis()
        lowest = min(r[arm].balanced for r in mine for arm in arms if arm in r)
        axes.set_xlim(left=0.8 * lowest)
    return figure


def angle_figure() -> Any:
    """Angle from the frequent class to its boundary with a rarer one, as the counts draw apart."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    for axes, classes in zip(figure.subplots(1, 2), (10, 100), strict=True):
        n = 100.0 ** (-torch.arange(classes, dtype=torch.float64) / (classes - 1))
        ratio = (n[0] / n).numpy()

        def curve(kind: str, n: torch.Tensor = n, **options: Any) -> np.ndarray:
            return np.degrees(boundary_angles(n, kind, **options)[0].numpy())  # type: ignore[arg-type]

        axes.plot(ratio, curve("optimal"), "k", linewidth=3, alpha=0.6, label="optimal, τ = ½")
        axes.plot(ratio, curve("mla", strength=0.45), "C1", label="MLA, γ = 0.45")
        for style, m in (("C0:", 3.0), ("C0--", 5.0), ("C0-.", 10.0)):
            axes.plot(ratio, curve("ala", feature_norms=m), style, label=f"ALA, τ = 1, feature length {m:g}")
        axes.axhline(np.degrees(simplex_angle(classes)) / 2, color="0.8", zorder=0)
        axes.set(xscale="log", title=f"K = {classes}", xlabel="rows of the frequent class / rows of the rare one")
    figure.axes[0].set_ylabel("the frequent class's share, degrees")
    figure.axes[0].legend(fontsize=8)
    return figure
