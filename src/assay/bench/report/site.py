"""The static site: an index, a page a method, a page a question that several methods answer. Needs no network to read."""

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from assay.bench.result import by_case

from . import tables
from .charts import Strip, curve_charts, strip
from .compare import Comparison, compared_columns, comparison
from .numbers import figures
from .pages import Page, clean

_SVG = re.compile(rb"\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*(<!DOCTYPE[^>]*>\s*)?(<!--.*?-->\s*)*<svg[\s>]", re.DOTALL)

_VIEW = re.compile(rb"""viewBox=["'][-\d.]+[ ,]+[-\d.]+[ ,]+([\d.]+)[ ,]+([\d.]+)["']""")


@dataclass(frozen=True)
class Picture:
    """A figure of the study, as an image that cannot run anything."""

    title: str
    file: str
    source: str
    whole: bool
    """Of the whole study, not of one trial."""
    broad: bool
    """Much wider than high: it gets a row of its own."""


@dataclass(frozen=True)
class Entry:
    """A page on the index."""

    page: Page
    file: str
    counts: list[tuple[str, int]]
    words: str
    lost: int
    changed: bool


def write_site(pages: Sequence[Page], out: Path) -> Path:
    """Writes the site.

    Args:
        pages: What :func:`collect` found.
        out: Folder to write to; made when it is not there. Files of the same names are replaced, others left alone.

    Returns:
        Its ``index.html``.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    pages = [replace(page, result=clean(page.result) if page.result else None, problem=clean(page.problem)) for page in pages]
    views = [_laid_out(page) for page in pages]
    entries = [view["entry"] for view in views]
    groups = _problems(entries)
    links = {problem: _file(f"compare-{problem}", reserved=False) for problem in groups}
    for entry, view in zip(entries, views, strict=True):
        _write(out / entry.file, "method.html.j2", comparison=links.get(entry.page.method.problem, ""), **view)
        if entry.page.result:
            data = json.dumps(entry.page.result, indent=1, ensure_ascii=False)
            (out / Path(entry.file).with_suffix(".json")).write_text(data, encoding="utf-8")
    for problem, members in groups.items():
        _write(out / links[problem], "compare.html.j2", **_compare_view(problem, members))
    return _write(out / "index.html", "index.html.j2", **_index_view(entries, groups, links))


def _laid_out(page: Page) -> dict[str, Any]:
    """What a method's page shows; without its result where that, out of a store that others write to, makes no sense."""
    try:
        return _method_view(_entry(page))
    except Exception as error:
        if page.result is None:
            raise
        problem = f"the {page.source or 'given'} result makes no sense: {type(error).__name__}: {error}"
        return _method_view(_entry(Page(page.method, problem=clean(problem))))


def _entry(page: Page) -> Entry:
    method, result = page.method, page.result
    words = (method.slug, method.name, method.summary, method.area, method.problem, method.paper)
    return Entry(
        page=page,
        file=_file(method.slug),
        counts=tables.verdict_counts(result),
        words=" ".join(words).lower(),
        lost=sum(len(loss.replicates) for loss in tables.losses(result) if loss.status != "skipped") if result else 0,
        changed=bool(result and tables.changes(result)),
    )


def _index_view(entries: list[Entry], groups: Mapping[str, list[Entry]], links: Mapping[str, str]) -> dict[str, Any]:
    areas: dict[str, list[Entry]] = {}
    for entry in entries:
        areas.setdefault(entry.page.method.area, []).append(entry)
    totals = Counter(dict.fromkeys(tables.VERDICTS, 0))
    for entry in entries:
        totals.update(dict(entry.counts))
    dates = [str(entry.page.result["date"]) for entry in entries if entry.page.result and entry.page.result.get("date")]
    return {
        "areas": areas,
        "total": len(entries),
        "run": sum(entry.page.result is not None for entry in entries),
        "totals": [(verdict, totals[verdict]) for verdict in tables.VERDICTS],
        "claims": sum(totals.values()),
        "newest": max(dates, default=""),
        "comparisons": [(problem, links[problem], members) for problem, members in groups.items()],
    }


def _method_view(entry: Entry) -> dict[str, Any]:
    page, result = entry.page, entry.page.result
    view: dict[str, Any] = {
        "page": page,
        "method": page.method,
        "result": result,
        "entry": entry,
        "rerun": tables.rerun_command(page.method.slug, result),
    }
    if result is None:
        return view
    gates = tables.finding_rows(result["gates"])
    pictures = _pictures(page)
    return view | {
        "claims": [(row, _strip(row)) for row in tables.finding_rows(result["claims"])],
        "gates": [(row, _strip(row)) for row in gates],
        "closed": [row for row in gates if row.verdict != "holds" and not row.decides],
        "closed_to_some": [row for row in gates if row.verdict != "holds" and row.decides],
        "cases": [
            (case, arms, _widths([row.texts for row in arms.rows]))
            for case, part in by_case(result).items()
            for arms in [tables.arms_table(part)]
        ],
        "losses": tables.losses(result),
        "tuning": tables.tuning_table(result),
        "charts": [(case, chart, _data(chart.svg)) for case, part in by_case(result).items() for chart in curve_charts(part)],
        "pictures": [p for p in pictures if p.whole],
        "trial_pictures": [p for p in pictures if not p.whole],
        "notes": [str(note) for note in result.get("notes") or []],
        "config": _config(result),
        "changes": tables.changes(result),
        "facts": _facts(result),
        "data_file": Path(entry.file).with_suffix(".json").name,
    }


def _compare_view(problem: str, members: list[Entry]) -> dict[str, Any]:
    results = {entry.page.method.slug: entry.page.result for entry in members if entry.page.result}
    compared: Comparison = comparison(results)
    columns = compared_columns(compared)
    rows = [(row, [texts[i] for texts in columns]) for i, row in enumerate(compared["rows"])]
    return {
        "problem": problem,
        "members": {entry.page.method.slug: entry for entry in members},
        "compared": compared,
        "rows": rows,
        "widths": _widths([texts for _, texts in rows]),
    }


def _problems(entries: list[Entry]) -> dict[str, list[Entry]]:
    """Questions that at least two methods with a result answer."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.page.method.problem and entry.page.result:
            groups.setdefault(entry.page.method.problem, []).append(entry)
    return {problem: members for problem, members in sorted(groups.items()) if len(members) > 1}


def _widths(rows: Sequence[Sequence[tuple[str, str]]]) -> list[int]:
    """For each column the characters of its longest spread."""
    return [max(len(spread) for _, spread in cells) for cells in zip(*rows, strict=True)]


def _strip(row: tables.FindingRow) -> Strip | None:
    return strip(row.numbers, row.bounds, row.ends)


def _pictures(page: Page) -> list[Picture]:
    """The figures that came with a result, the study's own first."""
    from assay.bench.result import file_stem

    assert page.result
    stems = {
        f"{file_stem(arm)}-{file_stem(name)}-": f"{arm}, replicate {name}: "
        for arm, body in page.result["arms"].items()
        for name in body["replicates"]
    }
    found = []
    for name, svg in page.figures.items():
        if not _SVG.match(svg):
            continue
        stem = next((s for s in sorted(stems, key=len, reverse=True) if name.startswith(s)), "")
        plain = name.removeprefix(stem).removesuffix(".svg")
        if not stem:
            plain = plain.removeprefix("result").lstrip("-")
            if plain in ("", page.method.slug, page.result.get("study")):
                plain = "figure of the study"
        title = clean(stems.get(stem, "") + plain.replace("_", " ").replace("-", " "))
        found.append(Picture(title, clean(name), _data(svg), not stem, _broad(svg)))
    return sorted(found, key=lambda picture: not picture.whole)


def _broad(svg: bytes) -> bool:
    match = _VIEW.search(svg[:2000])
    width, height = (tables.as_number(side.decode()) for side in match.groups()) if match else (None, None)
    return bool(width and height and width / height > 1.9)


def _config(result: Mapping[str, Any]) -> list[tuple[str, str, bool]]:
    changed = set(result.get("overrides") or {})
    tuned = (result.get("tune") or {}).get("field")
    shown = {name: tables.setting(value) for name, value in result["config"].items()}
    if tuned in shown:
        shown[tuned] = "tuned for each arm"
    return [(name, value, name in changed) for name, value in shown.items()]


def _facts(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    machine = result["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("assay", "torch", "python") if machine.get(name))
    peak = tables.as_number(result.get("peak_mb"))
    facts = [
        ("machine", tables.machine_line(result)),
        ("system", str(machine.get("system") or "")),
        ("device", str(result.get("device") or "")),
        ("versions", versions),
        ("date", str(result.get("date") or "")),
        ("replicates", tables.replicates_line(result, most=40)),
        ("trials took", tables.took(result)),
        ("peak memory", f"{figures(peak)} MB" if peak else ""),
    ]
    return [(name, value) for name, value in facts if value]


def _data(svg: bytes) -> str:
    """An SVG as the source of an image: there, unlike inline, scripts in it never run and nothing is fetched."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def _file(stem: str, *, reserved: bool = True) -> str:
    """A plain file name; a method can take neither the index's place nor a comparison's."""
    plain = re.sub(r"[^\w-]", "-", stem) or "-"
    if reserved and (plain == "index" or plain.startswith("compare-")):
        plain += "-method"
    return f"{plain}.html"


def _write(path: Path, template: str, **view: Any) -> Path:
    path.write_text(_environment().get_template(template).render(view), encoding="utf-8")
    return path


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("assay.bench.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    folder = files("assay.bench.report") / "templates"
    script = (folder / "site.js").read_text(encoding="utf-8")
    # Only this very script may run: a browser refuses any other that might come with a result.
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.globals |= {
        "style": Markup((folder / "site.css").read_text(encoding="utf-8")),  # ours, and holds no markup
        "script": Markup(script),
        "script_hash": f"sha256-{allowed}",
        "marks": tables.VERDICTS,
        "states": tables.STATUSES,
        "phrase": tables.verdict_phrase,
        "machine_line": tables.machine_line,
        "replicates_line": tables.replicates_line,
        "took": tables.took,
    }
    environment.filters |= {
        "tied": lambda text: str(text).replace(" %", "\N{NO-BREAK SPACE}%"),
        "headline": _headline,
        "sentence": lambda text: f"{_headline(text).rstrip('.')}.",
    }
    return environment


def _headline(text: Any) -> str:
    """With a capital first letter, the others as they are: unlike Jinja's ``capitalize``, which spoils names."""
    return str(text)[:1].upper() + str(text)[1:]
