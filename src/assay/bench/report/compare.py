"""Arms of several studies side by side, over the metrics that they share, with every difference in how they ran."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from assay.bench.result import by_case

from .numbers import Measured, as_number, column, joined
from .tables import Result, arms_table, machine_line, setting

if TYPE_CHECKING:
    from rich.table import Table

_NOT_DATA = {"seeds", "num_cpus", "num_gpus"}  # seeds show as replicates; the others change times only


class ComparedArm(TypedDict):
    """One arm of one study on one case. ``metrics``: ``{name: {"mean", "spread", "n"}}``, absent where it was not measured."""

    study: str
    case: str
    arm: str
    tuned: str
    metrics: dict[str, dict[str, Any]]
    trials: str


class Difference(TypedDict):
    """One way in which the studies did not run alike: its name, and what each study has."""

    what: str
    values: dict[str, str]


class Comparison(TypedDict):
    """Arms of several studies, ready for JSON.

    Attributes:
        studies: Their names.
        metrics: Those that at least two of them measured, the most common first; all of them for a single study.
        rows: Arms in the order of the studies; where a study has several cases, those that measured one of the metrics.
        differences: Data, settings, replicates or machines that differ: the numbers do not compare as they stand.
        only_in: Settings that some of the studies do not have.
        disagreements: Arms of the same name whose numbers lie apart, in words.
    """

    studies: list[str]
    metrics: list[str]
    rows: list[ComparedArm]
    differences: list[Difference]
    only_in: list[Difference]
    disagreements: list[str]


def comparison(results: Mapping[str, Result]) -> Comparison:
    """Sets the arms of several studies side by side.

    Args:
        results: Study name to result, as in ``result.json``.
    """
    rows: list[ComparedArm] = []
    tables = {(study, case): arms_table(part) for study, result in results.items() for case, part in by_case(result).items()}
    having = {(study, metric) for (study, _), table in tables.items() for metric in table.metrics}
    count = Counter(metric for _, metric in having)
    order = list(dict.fromkeys(metric for table in tables.values() for metric in table.metrics))
    shared = [metric for metric in order if count[metric] >= min(2, len(results))]
    shared.sort(key=lambda metric: -count[metric])
    for (study, case), table in tables.items():
        if case and not set(shared) & set(table.metrics):
            continue
        for row in table.rows:
            found = dict(zip(table.metrics, row.cells, strict=True))
            cells = {metric: found.get(metric) for metric in shared}
            rows.append(
                {
                    "study": study,
                    "case": case,
                    "arm": row.arm,
                    "tuned": f"{table.tuned} {row.tuned}" if row.tuned else "",
                    "metrics": {metric: _plain(cell) for metric, cell in cells.items() if cell},
                    "trials": row.trials,
                }
            )
    differences, only_in = _differences(results)
    return {
        "studies": list(results),
        "metrics": shared,
        "rows": rows,
        "differences": differences,
        "only_in": only_in,
        "disagreements": _disagreements(rows, shared),
    }


def compared_columns(compared: Comparison) -> list[list[tuple[str, str]]]:
    """For each metric, mean and spread of every row as aligned text."""
    return [column(_cell(row, metric) for row in compared["rows"]) for metric in compared["metrics"]]


def comparison_tables(compared: Comparison) -> "list[Table]":
    """The comparison for a terminal: the arms, then what the studies did not have in common."""
    from rich.table import Table
    from rich.text import Text

    arms = Table(title=f"{' · '.join(compared['studies'])}: {len(compared['rows'])} arms", title_justify="left")
    arms.add_column("study", style="dim")
    arms.add_column("arm", no_wrap=True)
    for metric in compared["metrics"]:
        arms.add_column(Text(metric), justify="right")
    arms.add_column("trials", style="dim")
    columns = compared_columns(compared)
    previous = ""
    for i, row in enumerate(compared["rows"]):
        where = " · ".join(filter(None, (row["study"], row["case"])))
        if previous and where != previous:
            arms.add_section()
        name = row["arm"] + (f" ({row['tuned']})" if row["tuned"] else "")
        cells = [Text(joined(texts[i])) for texts in columns]
        arms.add_row(Text(where if where != previous else ""), Text(name), *cells, Text(row["trials"]))
        previous = where
    if not compared["metrics"]:
        arms.caption = "these studies share no metric"
    tables = [arms]
    if compared["differences"]:
        apart = Table(title="not alike: compare with care", title_justify="left", title_style="yellow")
        apart.add_column("what")
        for study in compared["studies"]:
            apart.add_column(Text(study))
        for difference in compared["differences"]:
            apart.add_row(Text(difference["what"]), *(Text(difference["values"].get(s, "–")) for s in compared["studies"]))
        tables.append(apart)
    if compared["disagreements"]:
        same = Table(title="same name, other numbers", title_justify="left", title_style="yellow", show_header=False)
        for line in compared["disagreements"]:
            same.add_row(Text(line))
        tables.append(same)
    return tables


def _differences(results: Mapping[str, Result]) -> tuple[list[Difference], list[Difference]]:
    facts = {study: _facts(result) for study, result in results.items()}
    names = dict.fromkeys(name for known in facts.values() for name in known)
    differences: list[Difference] = []
    only_in: list[Difference] = []
    for name in names:
        values = {study: known[name] for study, known in facts.items() if name in known}
        if len(set(values.values())) > 1:
            differences.append({"what": name, "values": values})
        elif len(values) < len(results):
            only_in.append({"what": name, "values": values})
    return differences, only_in


def _facts(result: Result) -> dict[str, str]:
    """What has to agree between two studies before their numbers compare."""
    tuned = (result.get("tune") or {}).get("field")
    facts = {
        "scale": str(result.get("scale", "")),
        "case": str(result.get("case") or "the study's own"),
        "replicates": ", ".join(str(name) for name in result["replicates"]),
        "device": str(result.get("device", "")),
    }
    facts |= {name: setting(value) for name, value in result["config"].items() if name not in _NOT_DATA and name != tuned}
    facts["machine (for times)"] = machine_line(result)
    facts["torch"] = str(result["machine"].get("torch", ""))
    return facts


def _disagreements(rows: Iterable[ComparedArm], metrics: list[str]) -> list[str]:
    """Arms of one name in two studies that lie apart by more than their spreads and one per cent."""
    by_arm: dict[tuple[str, str], list[ComparedArm]] = {}
    for row in rows:
        by_arm.setdefault((row["arm"], row["case"]), []).append(row)
    said = []
    for (arm, case), twins in by_arm.items():
        for metric in metrics:
            cells = [(row["study"], cell) for row in twins if (cell := _cell(row, metric))]
            if len(cells) > 1 and _apart([cell for _, cell in cells]):
                texts = column([cell for _, cell in cells])
                listed = ", ".join(f"{joined(text)} in {study}" for (study, _), text in zip(cells, texts, strict=True))
                said.append(f"{arm}{f' ({case})' if case else ''}: {metric} is {listed}")
    return said


def _apart(cells: list[Measured]) -> bool:
    low, high = min(cells, key=lambda cell: cell.mean), max(cells, key=lambda cell: cell.mean)
    if low.mean == high.mean:
        return False
    gap = high.mean - low.mean
    return gap > (low.spread or 0) + (high.spread or 0) and gap > 0.01 * max(abs(low.mean), abs(high.mean))


def _plain(cell: Measured) -> dict[str, Any]:
    mean = cell.mean if abs(cell.mean) != float("inf") else str(cell.mean)  # JSON knows no infinity
    return {"mean": mean, "spread": cell.spread, "n": cell.n}


def _cell(row: ComparedArm, metric: str) -> Measured | None:
    found = row["metrics"].get(metric)
    mean = as_number(found["mean"]) if found else None
    return None if found is None or mean is None else Measured(mean, found["spread"], found["n"])
