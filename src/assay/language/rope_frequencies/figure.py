"""The study's figure."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

_ARMS = ("rope", "p-rope-0.75", "p-rope-0.25", "p-rope-0.75-reversed", "nope", "theta-5e5", "partial-0.75")


def figure(results: list[Any]) -> Figure:
    """Usage by frequency; a previous-token head without each quarter of its pairs; perplexity of what was trained."""
    shown = Figure(figsize=(13, 4), layout="constrained")
    usage, heads, trained = shown.subplots(1, 3)
    audited = {name: mine for name, mine in _by_case(results).items() if "rope" in mine[0] and _curve(mine[0], "usage")}
    for number, (name, mine) in enumerate(audited.items()):
        for metric, style in (("usage", "-"), ("usage_untrained", ":")):
            values = np.mean([_curve(r, metric)[1] for r in mine], 0)
            at = (np.arange(len(values)) + 0.5) / len(values)
            label = name if metric == "usage" else f"{name}, untrained"
            usage.plot(at, values * len(values), style, color=f"C{number}", label=label)
        left = [_curve(r, "prev_left")[1] for r in mine if _curve(r, "prev_left")]
        if left:
            heads.plot(range(4), np.mean(left, 0), "o-", color=f"C{number}", label=name)
    usage.set(xlabel="pairs, from the highest frequency to the lowest", ylabel="usage, 1 = even", ylim=(0, None))
    heads.set(
        xlabel="quarter of the frequencies that stands still", ylabel="left of the best previous-token head", ylim=(0, 1.1)
    )
    heads.set_xticks(range(4), ["highest", "second", "third", "lowest"])
    _bars(trained, _by_case(results).get("train", []))
    for axis in (usage, heads, trained):
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, fontsize=8)
    return shown


def _bars(axis: Any, results: list[Any]) -> None:
    arms = [arm for arm in _ARMS if any(arm in r for r in results)]
    for offset, (metric, label) in ((-0.2, ("train_ppl", "within the context")), (0.2, ("train_ppl_long", "far beyond it"))):
        means = [np.mean([r[arm].metrics[metric] for r in results if arm in r]) for arm in arms]
        axis.bar(np.arange(len(arms)) + offset, means, 0.4, label=label)
    axis.set_xticks(range(len(arms)), arms, rotation=40, ha="right")
    axis.set(ylabel="perplexity of bytes, trained from scratch")


def _by_case(results: list[Any]) -> dict[str, list[Any]]:
    cases: dict[str, list[Any]] = {}
    for r in results:
        cases.setdefault(r.name.rpartition("/")[0], []).append(r)
    return cases


def _curve(result: Any, name: str) -> Any:
    """Steps and values, or None where the trial drew no such curve."""
    return result["rope"].curves.get(name)
