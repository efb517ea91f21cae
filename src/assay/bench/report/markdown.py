"""The tables of a result as Markdown: for a method's page and for the page of all results."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.bench.config import UsageError
from assay.bench.result import by_case

from .numbers import joined
from .pages import Page, clean
from .tables import (
    VERDICTS,
    arms_table,
    changes,
    finding_rows,
    losses,
    machine_line,
    replicates_line,
    rerun_command,
    took,
    verdict_counts,
    verdict_phrase,
)

BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"
_MOST = 12  # metrics in a table of a page
_SPECIAL = re.compile(r"([\\`*_\[\]|$~#])")


def markdown_tables(result: Mapping[str, Any]) -> str:
    """Claims, gates and arms × metrics of a result as Markdown, with where and when it was measured."""
    result = clean(result)
    parts = [_provenance(result)]
    if said := changes(result):
        parts.append(f"Not the study as it stands: {'; '.join(_text(line) for line in said)}.")
    if result["gates"]:
        parts.append(_findings("gate", result["gates"]))
    if result["claims"]:
        parts.append(_findings("claim", result["claims"]))
    if result["arms"]:
        parts += [_arms(part, case) for case, part in by_case(result).items()]
    lost = losses(result)
    if lost:
        lines = [f"- {_code(x.arm)} ({_text(', '.join(x.replicates))}) {x.status}: {_text(x.error)}" for x in lost]
        parts.append("Trials without a result:\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def fill_readme(readme: Path, result: Mapping[str, Any]) -> None:
    """Puts the tables of a result, and the study's figures beside the page, between its two marker lines.

    Args:
        readme: The method's page. What stands between ``<!-- measured:begin -->`` and ``<!-- measured:end -->`` is replaced.
        result: The result, as in ``result.json``.

    Raises:
        UsageError: the page is not there, or has not exactly one of each marker in this order.
    """
    try:
        page = readme.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"there is no page {readme}; write one with the lines {BEGIN} and {END}") from None
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        found = f"found {page.count(BEGIN)} of the first and {page.count(END)} of the second"
        raise UsageError(f"{readme} needs the line {BEGIN} once and, after it, the line {END} once; {found}")
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    pictures = [f"![{_caption(path, result)}]({path.name})" for path in sorted(readme.parent.glob("result*.svg"))]
    body = "\n\n".join([markdown_tables(result), *pictures])
    readme.write_text(f"{before}{BEGIN}\n{body}\n{END}{after}", encoding="utf-8")


def results_markdown(pages: Sequence[Page]) -> str:
    """All results on one page: an overview, then every method's tables under its area."""
    run = [page for page in pages if page.result]
    total = sum(count for page in run for _, count in verdict_counts(page.result))
    counts = {verdict: sum(dict(verdict_counts(page.result)).get(verdict, 0) for page in run) for verdict in VERDICTS}
    said = ", ".join(verdict_phrase(verdict, count) for verdict, count in counts.items() if count)
    lines = [
        "# Results",
        "",
        "Written from stored runs; every number is a mean over replicates with its standard deviation. A claim *holds* when "
        "every replicate lies within its bound, *fails* when none does, and is *mixed* otherwise; it is *inconclusive* when a "
        "gate was not met or a replicate could not be measured, and only *reported* when it has no bound.",
        "",
        f"{len(run)} of {len(pages)} methods have a result" + (f"; of their {total} claims, {said}." if total else "."),
        "",
        "| area | method | verdicts | scale | date |",
        "|---|---|---|---|---|",
    ]
    for page in pages:
        method, result = page.method, page.result
        name = f"[{_text(method.name)}](#results-{method.slug})" if result else _text(method.name)
        lines.append(
            f"| {_text(method.area)} | {name} | {_verdicts(result)} | {_text(result['scale']) if result else ''} "
            f"| {_text(result['date']) if result else ''} |"
        )
    area = ""
    for page in run:
        if page.method.area != area:
            area = page.method.area
            lines += ["", f"## {_text(area)}"]
        assert page.result
        summary = _text(page.method.summary)
        lines += ["", f"(results-{page.method.slug})=", f"### {_text(page.method.name)}", "", f"{summary}.".replace("..", ".")]
        lines += ["", markdown_tables(page.result)]
    return "\n".join(lines) + "\n"


def _provenance(result: Mapping[str, Any]) -> str:
    torch = result["machine"].get("torch")
    facts = [
        f"{str(result.get('scale', '')).capitalize()} scale",
        replicates_line(result),
        str(result.get("date", "")),
        machine_line(result),
        f"trials took {took(result)}",
        f"torch {torch}" if torch else "",
    ]
    text = "; ".join(_text(fact) for fact in facts if fact)
    return f"{text}. Again with {_code(rerun_command(str(result.get('study', '')), result))}."


def _findings(kind: str, findings: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"| verdict | {kind} | published | bound | mean [95 % interval] | each replicate |", "|---|---|---|---|---|---|"]
    for row in finding_rows(findings):
        text = _text(row.text) + (f" *({_text(row.reason)})*" if row.reason else "")
        mean = _text(row.mean) + (f" \\[{row.interval}\\]" if row.interval else "")
        each = ", ".join(value for _, value in row.values[:8]) + (", …" if len(row.values) > 8 else "")
        mark = f"{VERDICTS.get(row.verdict, '')} {_text(row.verdict)}".strip()
        lines.append(f"| {mark} | {text} | {_text(row.published)} | {_text(row.bound)} | {mean} | {_text(each)} |")
    return "\n".join(lines)


def _arms(result: Mapping[str, Any], case: str) -> str:
    """Arms × metrics of one case; of many metrics the first."""
    table = arms_table(result)
    shown, more = table.metrics[:_MOST], len(table.metrics[_MOST:])
    headings = ["arm", *([table.tuned] if table.tuned else []), *shown, "s / trial", "trials"]
    lines = [f"Arms, {_code(case)}:", ""] if case else []
    lines.append("| " + " | ".join(_code(h) if h in shown else _text(h) for h in headings) + " |")
    lines.append("|---|" + "---:|" * (len(headings) - 2) + "---|")
    for row in table.rows:
        cells = [_code(row.arm), *([_text(row.tuned)] if table.tuned else []), *map(joined, row.texts[:_MOST])]
        lines.append("| " + " | ".join([*cells, row.seconds_text[0], _text(row.trials)]) + " |")
    if more:
        lines += ["", f"{more} more metric{'s are' if more > 1 else ' is'} in `assay report`."]
    return "\n".join(lines)


def _verdicts(result: Mapping[str, Any] | None) -> str:
    if not result:
        return "not run yet"
    return ", ".join(f"{VERDICTS[v]} {verdict_phrase(v, n)}" for v, n in verdict_counts(result)) or "no claims"


def _caption(path: Path, result: Mapping[str, Any]) -> str:
    name = path.stem.removeprefix("result").lstrip("-").replace("-", " ").replace("_", " ")
    return _text(f"{result.get('study', '')}: {name or 'figure of the study'}")


def _text(text: str) -> str:
    """Text that Markdown shows as it is, in a table too."""
    plain = " ".join(str(text).split())
    return _SPECIAL.sub(r"\\\1", plain).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _code(text: str) -> str:
    """A name in code type, where it has no character that code type cannot show in a table."""
    plain = " ".join(str(text).split())
    return _text(plain) if set(plain) & set("`|<>") or not plain else f"`{plain}`"
