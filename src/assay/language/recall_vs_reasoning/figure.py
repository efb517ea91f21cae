"""The study's figure: training curves, what each removal leaves, and the prompts."""

from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.figure import Figure


def figure(results: Sequence[Any]) -> Figure:
    shown = Figure(figsize=(12, 3.8), layout="constrained")
    curves, bars, plane = shown.subplots(1, 3)
    by_case = {case: [r for r in results if r.name.startswith(f"{case}/")] for case in ("recall", "attention-only", "cities")}
    arms = list(dict.fromkeys(arm for r in results for arm in r.outcomes))
    for arm, style in (("full", "-"), ("drop_F2", "--")):
        for metric, colour in (("p_noise", "#be123c"), ("p_answer", "#0f766e")):
            seen = [r[arm].curve(metric) for r in by_case["recall"] if arm in r]
            if seen:
                values = torch.tensor([curve[1].tolist() for curve in seen]).mean(0)
                curves.plot(seen[0][0], values, style, color=colour, lw=2, label=f"{metric}, {arm}")
    curves.set(xlabel="step", ylabel="probability at recall positions", title="recall: whole and without F2", ylim=(0, 1))
    curves.legend(frameon=False, fontsize=8)
    drawn = [(case, arm) for case in ("recall", "attention-only") for arm in arms if any(arm in r for r in by_case[case])]
    for place, (case, arm) in enumerate(drawn):
        for offset, metric, colour in ((-0.2, "p_noise", "#be123c"), (0.2, "p_answer", "#0f766e")):
            mean = sum(r[arm].metrics[metric] for r in by_case[case] if arm in r) / sum(arm in r for r in by_case[case])
            bars.barh(place + offset, mean, 0.4, color=colour)
    bars.set_yticks(range(len(drawn)), [f"{arm}{' *' if case == 'attention-only' else ''}" for case, arm in drawn], fontsize=7)
    bars.invert_yaxis()
    bars.set(title="what is removed (* without feed-forward)", xlabel="P(noise) red, P(answer) green")
    for r in by_case["cities"]:
        for arm in arms:
            if arm in r:
                at = r[arm].metrics["p_distractor"], r[arm].metrics["p_answer"]
                plane.scatter(*at, color="#4338ca" if arm.startswith("mlp") else "#9ca3af", s=18)
                if r is by_case["cities"][0]:
                    plane.annotate(arm, at, fontsize=7, xytext=(3, 3), textcoords="offset points")
    plane.set(xlabel='P(" the")', ylabel="P(answer)", title="cities: the other half of the prompts")
    return shown
