"""What the tables of a result say, before HTML or Markdown: findings, arms × metrics, the tuning grid, lost trials."""

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.bench.display import duration
from assay.bench.result import metric_names

from .numbers import (
    ABSENT,
    Bounds,
    Measured,
    as_number,
    bound_text,
    column,
    decimals,
    fixed,
    joined,
    measured,
    parse_bound,
)

Result = Mapping[str, Any]
VERDICTS = {"holds": "✓", "mixed": "±", "fails": "✗", "inconclusive": "?", "reported": "·"}
STATUSES = {"finished": "✓", "failed": "✗", "diverged": "∞", "skipped": "–"}
_PLURAL = {"holds": "hold", "fails": "fail"}


@dataclass(frozen=True)
class FindingRow:
    """A claim or a gate, and what was found."""

    text: str
    verdict: str
    published: str
    bound: str
    bounds: Bounds | None
    mean: str
    interval: str
    ends: tuple[float, float] | None
    values: tuple[tuple[str, str], ...]
    numbers: tuple[float, ...]
    reason: str
    decides: int = 0
    """How many claims this is a gate of; 0 for a claim, and for a gate of all."""


@dataclass(frozen=True)
class ArmRow:
    """An arm: a mean and spread for every metric, as numbers and as text."""

    arm: str
    tuned: str
    cells: tuple[Measured | None, ...]
    texts: tuple[tuple[str, str], ...]
    seconds: Measured | None
    seconds_text: tuple[str, str]
    peak_mb: float | None
    peak_text: str
    trials: str
    whole: bool


@dataclass(frozen=True)
class ArmsTable:
    metrics: tuple[str, ...]
    rows: tuple[ArmRow, ...]
    tuned: str
    replicates: int


@dataclass(frozen=True)
class TuningTable:
    field: str
    select: str
    mode: str
    grid: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[str, bool], ...]], ...]
    """Arm, then for each grid value its score as text and whether it is the arm's best."""
    at_edge: tuple[str, ...]
    follow: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Loss:
    """Trials of one arm that ended alike, without a result."""

    arm: str
    replicates: tuple[str, ...]
    status: str
    error: str
    trace: str


def finding_rows(findings: Sequence[Mapping[str, Any]]) -> list[FindingRow]:
    """Claims or gates as rows."""
    return [_finding_row(finding) for finding in findings]


def arms_table(result: Result) -> ArmsTable:
    """Arms × metrics in the study's order, with trial times and memory."""
    metrics = metric_names(result)
    bodies = {arm: list(body["replicates"].values()) for arm, body in result["arms"].items()}
    cells = {arm: [measured(r["metrics"].get(m) for r in records) for m in metrics] for arm, records in bodies.items()}
    columns = [column(cells[arm][i] for arm in bodies) for i in range(len(metrics))]
    seconds = [measured(r.get("seconds") for r in records if r.get("status") == "finished") for records in bodies.values()]
    seconds_texts = column(seconds, digits=3)
    tuned_field = (result.get("tune") or {}).get("field", "")
    rows = []
    for i, (arm, records) in enumerate(bodies.items()):
        peaks = [p for p in (as_number(r.get("peak_mb")) for r in records if r.get("status") != "skipped") if p is not None]
        peak = max(peaks) if peaks else None
        states = Counter(str(r.get("status")) for r in records)
        tuned = result["arms"][arm].get("tuned") or {}
        rows.append(
            ArmRow(
                arm=arm,
                tuned=", ".join(setting(value) for value in tuned.values()),
                cells=tuple(cells[arm]),
                texts=tuple(texts[i] for texts in columns),
                seconds=seconds[i],
                seconds_text=seconds_texts[i],
                peak_mb=peak,
                peak_text=ABSENT if not peak else f"{peak:,.0f}",
                trials=", ".join(f"{count} {state}" for state, count in states.items()),
                whole=set(states) == {"finished"},
            )
        )
    return ArmsTable(tuple(metrics), tuple(rows), tuned_field, len(result["replicates"]))


def tuning_table(result: Result) -> TuningTable | None:
    """The whole grid, every arm's best marked; None for a study that tunes nothing."""
    tune = result.get("tune")
    if not tune:
        return None
    scores = {arm: [as_number(score) for score in listed] for arm, listed in tune["scores"].items()}
    places = decimals([score for listed in scores.values() for score in listed])
    rows = []
    for arm, listed in scores.items():
        best = [value == tune["best"].get(arm) for value in tune["grid"]]
        rows.append((arm, tuple((fixed(s, places), b) for s, b in zip(listed, best, strict=False))))
    return TuningTable(
        field=tune["field"],
        select=tune["select"],
        mode=tune["mode"],
        grid=tuple(setting(value) for value in tune["grid"]),
        rows=tuple(rows),
        at_edge=tuple(tune.get("at_edge") or ()),
        follow=tuple((tune.get("follow") or {}).items()),
    )


def losses(result: Result) -> list[Loss]:
    """Trials that did not finish, those of one arm that ended alike together; failures before skips."""
    grouped: dict[tuple[str, str, str, str], list[str]] = {}
    for arm, body in result["arms"].items():
        for name, record in body["replicates"].items():
            if record.get("status") != "finished":
                key = (arm, str(record.get("status")), record.get("error") or "", record.get("trace") or "")
                grouped.setdefault(key, []).append(name)
    found = [Loss(arm, tuple(names), status, error, trace) for (arm, status, error, trace), names in grouped.items()]
    return sorted(found, key=lambda loss: loss.status == "skipped")


def verdict_counts(result: Result | None) -> list[tuple[str, int]]:
    """Verdict and how many claims have it, in the order of ``VERDICTS``."""
    counts = Counter(str(claim.get("verdict")) for claim in result["claims"]) if result else Counter()
    return [(verdict, counts[verdict]) for verdict in VERDICTS if counts[verdict]]


def verdict_phrase(verdict: str, count: int) -> str:
    """``3 hold``, ``1 holds``, ``2 mixed``."""
    return f"{count} {verdict if count == 1 else _PLURAL.get(verdict, verdict)}"


def machine_line(result: Result) -> str:
    """``4 cores, Xeon Platinum 8481C, 16 GB``."""
    machine = result["machine"]
    processor = re.sub(r"\((R|TM|C)\)", "", str(machine.get("processor") or "")).split(" @ ")[0]
    processor = " ".join(word for word in processor.split() if word not in ("CPU", "Processor"))
    cores, memory, gpu = machine.get("cores"), machine.get("memory_gb"), machine.get("gpu")
    parts = [f"{cores} core{'s' if cores != 1 else ''}" if cores else "", processor]
    parts += [f"{memory} GB" if memory else "", str(gpu) if gpu and str(result.get("device", "")).startswith("cuda") else ""]
    return ", ".join(part for part in parts if part)


def replicates_line(result: Result, most: int = 8) -> str:
    """``3 replicates (seeds 0, 1, 2)``."""
    names = [str(name) for name in result["replicates"]]
    what = "replicate" if len(names) == 1 else "replicates"
    shown = ", ".join(names[:most]) + (", …" if len(names) > most else "")
    if names and all(name.isdecimal() for name in names):
        shown = f"seed{'s' if len(names) > 1 else ''} {shown}"
    return f"{len(names)} {what} ({shown})" if names else "no replicates"


def took(result: Result) -> str:
    """How long trials and preparations took together, reused ones included."""
    seconds = as_number(result.get("work_seconds")) or as_number(result.get("seconds"))
    return ABSENT if seconds is None else duration(seconds)


def rerun_command(slug: str, result: Result | None) -> str:
    """The command that runs this again, as it was run.

    Example:
        >>> rerun_command("soap", {"scale": "smoke", "overrides": {"corpus": "my notes.txt"}, "machine": {}})
        "assay run soap --scale smoke --set 'corpus=my notes.txt'"
    """
    words = ["assay", "run", slug]
    if result:
        if result.get("scale", "desk") != "desk":
            words += ["--scale", str(result["scale"])]
        for name, value in (result.get("overrides") or {}).items():
            words += ["--set", f"{name}={value}"]
        for name, path in (result.get("extra_arms") or {}).items():
            words += ["--arm", f"{name}={path}"]
        if result.get("only"):
            words += ["--only", ",".join(map(str, result["only"]))]
        if result.get("case"):
            words += ["--case", str(result["case"])]
        usual = "cuda" if result["machine"].get("gpu") else "cpu"
        if result.get("device", usual) != usual:
            words += ["--device", str(result["device"])]
    return shlex.join(words)


def changes(result: Result) -> list[str]:
    """In words, how this run departs from the study as its authors defined it."""
    said = [f"{name} = {value}" for name, value in (result.get("overrides") or {}).items()]
    said = [f"changed settings: {', '.join(said)}"] if said else []
    if result.get("case"):
        said.append(f"your own case: {result['case']}")
    if result.get("extra_arms"):
        said.append(f"your own arms: {', '.join(result['extra_arms'])}")
    if result.get("only"):
        said.append(f"only the arms {', '.join(result['only'])}")
    return said


def setting(value: Any) -> str:
    """A configuration value as one would write it."""
    if isinstance(value, bool) or value is None:
        return str(value).lower() if isinstance(value, bool) else "none"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(setting(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {setting(item)}" for name, item in value.items())
    return str(value)


def cell_text(cell: Measured | None) -> str:
    """One cell by itself: ``0.714 ± 0.012``."""
    return joined(column([cell])[0])


def _finding_row(finding: Mapping[str, Any]) -> FindingRow:
    pairs = [(str(name), as_number(value)) for name, value in finding["values"].items()]
    numbers = [value for _, value in pairs if value is not None]
    mean = as_number(finding.get("mean"))
    listed = finding.get("interval")
    low, high = (as_number(end) for end in listed) if isinstance(listed, list) and len(listed) == 2 else (None, None)
    spread = (high - low) / 2 if low is not None and high is not None else None
    places = decimals([*numbers, mean], [spread], digits=3)
    bound = str(finding.get("bound") or "")
    decides = len(finding.get("decides") or ())
    return FindingRow(
        text=str(finding.get("text", "")) + (f" (of {decides} claim{'s' if decides > 1 else ''})" if decides else ""),
        verdict=str(finding.get("verdict", "")),
        published=str(finding.get("published") or ""),
        bound=bound_text(bound),
        bounds=parse_bound(bound),
        mean=fixed(mean, places, 3) if numbers else ABSENT,
        interval="" if low is None or high is None else f"{fixed(low, places, 3)}, {fixed(high, places, 3)}",
        ends=None if low is None or high is None else (low, high),
        values=tuple((name, fixed(value, places, 3)) for name, value in pairs),
        numbers=tuple(numbers),
        reason=str(finding.get("reason") or ""),
        decides=decides,
    )
