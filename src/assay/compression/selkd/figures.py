"""The study's figure: what students reach as labelled samples become more, closed and open."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

STYLES = {
    "ce": "k:", "kd": "C7-", "kd-full": "C2--", "dkd": "C6--", "selkd": "C1-", "selkd-uniform": "C1:",
    "open-ce": "k:", "open-merged": "C7-", "open-selkd": "C1-", "open-alternate-raw": "C6--",
}  # fmt: skip
ROWS = (
    ("accuracy", "accuracy on selected classes", ("ce", "kd", "kd-full", "dkd", "selkd", "selkd-uniform")),
    ("auroc", "AUROC of selected or not", ("open-ce", "open-merged", "open-selkd", "open-alternate-raw")),
)


def figure(results: list[Any]) -> Figure:
    """One column a case; a line for the mean, a band from the least to the largest replicate."""
    results = [r for r in results if r.outcomes]
    cases = list(dict.fromkeys(r.name.rpartition("/")[0] for r in results))
    shown = Figure(figsize=(1 + 3.4 * max(1, len(cases)), 6.4), layout="constrained")
    if not cases:
        return shown
    grid = shown.subplots(2, len(cases), squeeze=False)
    for column, case in enumerate(cases):
        mine = [r for r in results if r.name.rpartition("/")[0] == case]
        for axes, (metric, label, arms) in zip(grid[:, column], ROWS, strict=True):
            _lines(axes, mine, metric, arms)
            axes.set_ylabel(label if column == 0 else "")
        grid[0, column].set_title(case)
        grid[1, column].set_xlabel("labelled samples of each selected class")
    for axes in grid[:, 0]:
        axes.legend(frameon=False, fontsize=8)
    return shown


def _lines(axes: Any, results: list[Any], metric: str, arms: tuple[str, ...]) -> None:
    shots = results[0].config.shots
    for arm in arms:
        values = np.array([r[arm].curve(metric)[1] for r in results if arm in r])
        if len(values):
            (line,) = axes.plot(values.mean(0), STYLES[arm], marker=".", label=arm)
            axes.fill_between(range(len(shots)), values.min(0), values.max(0), color=line.get_color(), alpha=0.08, lw=0)
    axes.set_xticks(range(len(shots)), [str(n or "all") for n in shots])
