"""Drawings: a metric's curves as SVG that follows the reader's light or dark theme, and the strip beside a claim."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .numbers import Bounds, as_number, figures
from .pages import clean

# Eight hues that stay apart for colour-blind readers in both themes; further arms repeat them dashed, then dotted.
_HUES = ["#2a6fbb", "#c9581c", "#16805d", "#8a4fb0", "#b3871b", "#c23a6b", "#1b8aa5", "#6b6f2a"]
_HUES_DARK = ["#6da8ec", "#f0925a", "#4fc596", "#c294e8", "#e0b94f", "#f07fa8", "#5cc3dd", "#b5ba62"]
_DASHES = ["solid", (0, (5, 2)), (0, (1, 1.6))]
_INK, _MUTED, _RULE, _CARD = "#1c2026", "#5a606b", "#dcdcd6", "#fffffe"
_DARK = dict(zip([_INK, _MUTED, _RULE, _CARD, *_HUES], ["#e9e8e4", "#a6abb5", "#353a42", "#1b1e23", *_HUES_DARK], strict=True))
_FONTS = "system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_WIDTH, _HEIGHT, _FONT = 4.9, 3.0, 9.0  # inches of 72 units; small enough that its text can still be read on a telephone
_NAME = 20  # characters of an arm's name


@dataclass(frozen=True)
class Chart:
    """One metric's curves.

    Attributes:
        metric: Its name.
        svg: The drawing.
        text: What it shows, in words.
        log: Whether the vertical axis is logarithmic.
    """

    metric: str
    svg: bytes
    text: str
    log: bool


@dataclass(frozen=True)
class Strip:
    """Values of a claim on a line from 0 to 100: where they lie, the mean, its interval, and the bound's side."""

    points: tuple[tuple[float, bool], ...]
    mean: float | None
    interval: tuple[float, float] | None
    inside: tuple[float, float] | None


@dataclass(frozen=True)
class _Line:
    arm: str
    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def curve_charts(result: Mapping[str, Any]) -> list[Chart]:
    """A chart for every curve that finished trials logged: a line an arm, mean over replicates, band from min to max."""
    result = clean(result)
    bodies = {**_prepared(result), **result["arms"]}
    arms = list(bodies)
    charts = []
    for metric in _curve_names(bodies):
        lines = [line for arm in arms if (line := _line(arm, bodies[arm], metric)) is not None]
        if lines:
            log = _wants_log(lines)
            charts.append(Chart(metric, _draw(lines, arms, log), _in_words(metric, lines), log))
    return charts


def strip(numbers: Sequence[float], bounds: Bounds | None, ends: tuple[float, float] | None) -> Strip | None:
    """Places a claim's values on a line; infinite ones at its ends. None when there is nothing finite to place.

    Example:
        >>> strip([1.0, 3.0], Bounds(-math.inf, 2.0, False), None).inside
        (0.0, 50.0)
    """
    marks = [x for x in (*numbers, *(bounds[:2] if bounds else ())) if math.isfinite(x)]
    if not any(math.isfinite(x) for x in numbers) or not marks:
        return None
    low, high = min(marks), max(marks)
    width = high - low or abs(low) or 1.0
    if ends:  # an interval from two or three values can be very wide: it may take half as much again, then it is cut
        low, high = max(min(low, ends[0]), low - width / 2), min(max(high, ends[1]), high + width / 2)
    pad = 0.08 * (high - low) or width / 2
    low, high = low - pad, high + pad

    def place(x: float) -> float:
        return round(100 * min(max((x - low) / (high - low), 0.0), 1.0), 2)

    mean = math.fsum(numbers) / len(numbers) if all(map(math.isfinite, numbers)) else None
    return Strip(
        points=tuple((place(x), bounds is None or x in bounds) for x in numbers),
        mean=None if mean is None else place(mean),
        interval=(place(ends[0]), place(ends[1])) if ends else None,
        inside=(place(bounds.low), place(bounds.high)) if bounds else None,
    )


def _prepared(result: Mapping[str, Any]) -> dict[str, Any]:
    """What the arms share, drawn like one of them: how a base model trained, for one."""
    noted = result.get("prepare") or {}
    if not any(record.get("curves") for record in noted.values()):
        return {}
    return {"prepare": {"replicates": {name: {"status": "finished", **record} for name, record in noted.items()}}}


def _curve_names(bodies: Mapping[str, Any]) -> list[str]:
    names: dict[str, None] = {}
    for body in bodies.values():
        for record in body["replicates"].values():
            names.update(dict.fromkeys(record.get("curves") or {}))
    return list(names)


def _line(arm: str, body: Mapping[str, Any], metric: str) -> _Line | None:
    curves = []
    for record in body["replicates"].values():
        points = _points((record.get("curves") or {}).get(metric)) if record.get("status") == "finished" else {}
        if points:
            steps = np.array(sorted(points))
            curves.append((steps, np.array([points[step] for step in steps])))
    if not curves:
        return None
    # Replicates may have logged at other steps: they meet on all steps that lie where every one of them has values.
    first, last = max(steps[0] for steps, _ in curves), min(steps[-1] for steps, _ in curves)
    if first > last:
        curves = curves[:1]
        first, last = curves[0][0][0], curves[0][0][-1]
    grid = np.unique(np.concatenate([steps[(steps >= first) & (steps <= last)] for steps, _ in curves]))
    values = np.stack([np.interp(grid, steps, ys) for steps, ys in curves])
    return _Line(arm, grid, values.mean(0), values.min(0), values.max(0))


def _points(curve: Any) -> dict[float, float]:
    """Step to value, where both are finite; of several values at one step the last."""
    if not isinstance(curve, (list, tuple)) or len(curve) != 2 or not all(isinstance(part, (list, tuple)) for part in curve):
        return {}
    pairs = [(as_number(x), as_number(y)) for x, y in zip(*curve, strict=False)]
    return {x: y for x, y in pairs if x is not None and y is not None and math.isfinite(x) and math.isfinite(y)}


def _wants_log(lines: Sequence[_Line]) -> bool:
    low, high = min(line.low.min() for line in lines), max(line.high.max() for line in lines)
    return bool(low > 0 and high / low > 100)


def _draw(lines: Sequence[_Line], arms: Sequence[str], log: bool) -> bytes:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "assay", "font.size": _FONT}):
        figure = Figure(figsize=(_WIDTH, max(_HEIGHT, 0.5 + 0.18 * len(lines))), facecolor=_CARD, layout=None)
        FigureCanvasSVG(figure)
        names = 0.48 + max(_text_width(_short(line.arm)) for line in lines)  # inches: a sample of the line, the name
        height = figure.get_figheight()
        axes = figure.add_axes((0.55 / _WIDTH, 0.3 / height, 1 - (0.55 + names) / _WIDTH, 1 - 0.4 / height), facecolor=_CARD)
        if log:
            axes.set_yscale("log")
        for line in lines:
            hue, dash = _style(arms.index(line.arm))
            if len(line.steps) > 1:
                axes.fill_between(line.steps, line.low, line.high, color=hue, alpha=0.13, linewidth=0)
            axes.plot(
                line.steps, line.mean, color=hue, linestyle=dash, linewidth=1.7, marker="o" if len(line.steps) < 2 else ""
            )
        _dress(axes)
        figure.canvas.draw()  # fixes the limits, which the labels need
        _label_ends(axes, lines, arms)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", facecolor=_CARD, metadata={"Date": None, "Creator": None})
    return _themed(buffer.getvalue().decode()).encode()


def _dress(axes: Any) -> None:
    axes.margins(x=0)
    axes.grid(axis="y", color=_RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_MUTED)
    axes.tick_params(axis="both", which="both", colors=_MUTED, length=0, labelsize=_FONT, pad=4)
    axes.tick_params(axis="x", which="major", length=3, width=0.8)
    if axes.get_yscale() == "linear":
        axes.ticklabel_format(style="plain", useOffset=False)
        axes.locator_params(axis="y", nbins=6)
        low, high = axes.get_ylim()
        if max(abs(low), abs(high)) >= 1e6 or max(abs(low), abs(high)) < 1e-3:
            axes.yaxis.set_major_formatter(lambda value, _: figures(value, 3))
    else:
        axes.yaxis.set_major_formatter(lambda value, _: figures(value, 2))
        axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter(lambda value, _: figures(value, 4))


def _label_ends(axes: Any, lines: Sequence[_Line], arms: Sequence[str]) -> None:
    """Each arm's name where its line ends, moved apart where they would touch, tied to the line's end by a hair."""
    box = axes.get_window_extent()
    ends = [float(axes.transData.transform((line.steps[-1], line.mean[-1]))[1] - box.y0) / box.height for line in lines]
    inch = axes.figure.dpi / box.width
    heights = spread_apart(ends, 0.165 * axes.figure.dpi / box.height)  # a line of text
    for line, end, height in zip(lines, ends, heights, strict=True):
        hue, dash = _style(arms.index(line.arm))
        last = (
            float(axes.transData.transform((line.steps[-1], 0 if axes.get_yscale() == "linear" else 1))[0] - box.x0) / box.width
        )
        for xs, ys, style, width in (
            ([last, 1.0], [end, end], "solid", 0.5),
            ([1.0, 1 + 0.1 * inch], [end, height], "solid", 0.5),
            ([1 + 0.1 * inch, 1 + 0.36 * inch], [height, height], dash, 1.7),
        ):
            axes.plot(xs, ys, color=hue, linestyle=style, linewidth=width, transform=axes.transAxes, clip_on=False)
        text = axes.text(
            1 + 0.43 * inch, height, _short(line.arm), transform=axes.transAxes, va="center", color=_INK, clip_on=False
        )
        text.set_parse_math(False)  # a dollar in a name is a dollar


def _short(name: str) -> str:
    return name if len(name) <= _NAME else name[: _NAME - 1] + "…"


def _text_width(text: str) -> float:
    """In inches, in Matplotlib's own font, which is wider than those that a reader is likely to have."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    return float(text_to_path.get_text_width_height_descent(text, FontProperties(size=_FONT), ismath=False)[0]) / 72


def spread_apart(positions: Sequence[float], gap: float) -> list[float]:
    """Positions moved as little as needed so that neighbours are ``gap`` apart, within 0 to 1 where there is room.

    Example:
        >>> spread_apart([0.5, 0.5], 0.2)
        [0.4, 0.6]
    """
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    clusters: list[tuple[float, list[int]]] = []  # centre, members; overlapping clusters merge about their common mean
    for i in order:
        clusters.append((positions[i], [i]))
        while len(clusters) > 1 and _reach(clusters[-1], gap, -1) < _reach(clusters[-2], gap, 1) + gap - 1e-12:
            (above, uppers), (below, lowers) = clusters.pop(), clusters.pop()
            members = lowers + uppers
            centre = (below * len(lowers) + above * len(uppers)) / len(members)
            half = (len(members) - 1) * gap / 2
            clusters.append((min(max(centre, half), max(1 - half, half)), members))
    moved = [0.0] * len(positions)
    for centre, members in clusters:
        for place, i in enumerate(members):
            moved[i] = round(centre + (place - (len(members) - 1) / 2) * gap, 6)
    return moved


def _reach(cluster: tuple[float, list[int]], gap: float, side: int) -> float:
    centre, members = cluster
    return centre + side * (len(members) - 1) * gap / 2


def _style(index: int) -> tuple[str, Any]:
    return _HUES[index % len(_HUES)], _DASHES[index // len(_HUES) % len(_DASHES)]


def _themed(svg: str) -> str:
    """Colours as variables that a dark theme replaces; a reader without themes sees the light card."""
    svg = re.sub(r"#[0-9a-f]{6}", lambda m: f"var(--c{m[0][1:]}, {m[0]})" if m[0] in _DARK else m[0], svg)
    svg = re.sub(r"(font: [\d.]+px )[^;\"]*", rf"\1{_FONTS}", svg)
    dark = "".join(f"--c{light[1:]}:{dark};" for light, dark in _DARK.items())
    style = f"<style>@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}</style>"
    head, opening, rest = svg.partition("<svg ")
    tag, close, body = rest.partition(">")
    return f"{head}{opening}{tag}{close}\n {style}{body}"


def _in_words(metric: str, lines: Sequence[_Line]) -> str:
    ordered = sorted(lines, key=lambda line: float(line.mean[-1]))
    ends = ", ".join(f"{line.arm} {figures(float(line.mean[-1]))}" for line in ordered)
    last = max(float(line.steps[-1]) for line in lines)
    return f"{metric} up to step {figures(last)}. At each arm's last step, lowest first: {ends}."
