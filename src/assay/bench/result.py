"""The result of a study: everything a table, a page or a verdict is made from, as plain JSON."""

import io
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from .claims import Finding, Outcome, Replicate, closed_gates, confidence_interval, judge
from .study import seed_of
from .trial import Status, Task, TrialResult

if TYPE_CHECKING:
    from .runner import Job

FORMAT = 1
_CURVE_POINTS = 60
_LOST = (Status.FAILED, Status.DIVERGED)


def build_result(
    job: "Job",
    names: list[str],
    done: list[tuple[Task, TrialResult]],
    tuned: list[tuple[Task, TrialResult]],
    tuning: dict[str, Any],
    seconds: float,
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Judges the claims and gathers all that was measured.

    Returns:
        The result, and figures by file name. The result holds ``study, scale, config, overrides, replicates``;
        ``arms: {arm: {tuned, replicates: {name: {status, metrics, curves, seconds, peak_mb, error, trace, notes}}}}``;
        ``prepare: {replicate: {curves, notes, seconds}}``; ``tune``; ``gates`` and ``claims`` as
        ``{text, verdict, values, mean, interval, bound, published, reason}``, those that apply to some replicate;
        a gate of some claims only has their texts as ``decides``; ``not_applicable``: the texts of the others;
        ``machine``, ``date``, ``seconds`` of this run, ``work_seconds`` of all trials and preparations, ``peak_mb``.
    """
    from .runner import machine

    study = job.study
    replicates = [
        Replicate(
            name,
            seed_of(name),
            job.config,
            {
                task.arm: Outcome(result.metrics, result.curves, result.seconds)
                for task, result in done
                if task.replicate == name and result.status is Status.FINISHED
            },
        )
        for name in names
    ]
    gates = [judge(gate, replicates) for gate in study.gates]
    claims = [judge(claim, replicates, closed_gate=closed_gates(gates)) for claim in study.claims]
    narrow = [
        {**_finding_record(finding), "decides": [claim.text for claim in study.claims if gate in claim.gates]}
        for gate in dict.fromkeys(gate for claim in study.claims for gate in claim.gates)
        if (finding := judge(gate, replicates)).applies
    ]
    figures, notes = _figures(job, replicates, done)
    idle = [finding.text for finding in [*gates, *claims] if not finding.applies]
    if idle:
        notes.append(f"do not apply to these replicates: {'; '.join(idle)}")

    arms: dict[str, Any] = {}
    for task, result in done:
        arm = arms.setdefault(task.arm, {"replicates": {}})
        if tuning and study.tune:
            arm["tuned"] = {study.tune.field: getattr(task.config, study.tune.field)}
        arm["replicates"][task.replicate] = _trial_record(result)
    record = {
        "format": FORMAT,
        "study": job.name,
        "scale": job.scale,
        "config": job.config.model_dump(mode="json"),
        "overrides": dict(job.overrides),
        "only": list(job.only),
        "case": job.case_path,
        "extra_arms": dict(job.extra_arms),
        "replicates": names,
        "compare": list(study.compare),
        "arms": {name: arms[name] for name in job.arms if name in arms},
        "prepare": (prepared := _prepare_records(job, names)),
        "tune": _tuning_record(job, tuning),
        "gates": [*(_finding_record(finding) for finding in gates if finding.applies), *narrow],
        "claims": [_finding_record(finding) for finding in claims if finding.applies],
        "not_applicable": idle,
        "notes": notes,
        "figures": sorted(figures),
        "machine": machine(),
        "device": job.device,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "seconds": round(seconds, 1),
        "work_seconds": round(
            sum(result.seconds for _, result in done)
            + sum(result.seconds for _, result in tuned)
            + sum(record["seconds"] for record in prepared.values()),
            1,
        ),
        "peak_mb": round(max((result.peak_mb for _, result in done), default=0)),
    }
    return _plain(record), figures


def failed(result: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """Arm, replicate and record of every trial that did not finish, skipped ones left out."""
    return [
        (arm, name, record)
        for arm, body in result["arms"].items()
        for name, record in body["replicates"].items()
        if record["status"] in _LOST
    ]


def by_case(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """A result cut into one for each case of its study: numbers of different problems have no mean.

    The case is what stands before the first slash of a replicate's name, ``reviews/0``. A single replicate without a slash is a
    case of its name, several are ``others``, or ``""`` where there are no other ones. A result of a single case stays whole. Of
    several, an arm that measured nothing in one, and lost nothing there, is not in its result.
    """
    plain = [name for name in result["replicates"] if "/" not in name]
    cases: dict[str, list[str]] = {}
    for name in result["replicates"]:
        alone = name if len(plain) == 1 else "others"
        cases.setdefault(name.partition("/")[0] if "/" in name else alone, []).append(name)
    if len(cases) < 2:
        return {"" if plain else case: result for case in cases or [""]}

    def part(names: list[str]) -> Mapping[str, Any]:
        arms = {}
        for arm, body in result["arms"].items():
            records = {name: body["replicates"][name] for name in names if name in body["replicates"]}
            if any(record["metrics"] or record["status"] in _LOST for record in records.values()):
                arms[arm] = {**body, "replicates": records}
        return {**result, "replicates": names, "arms": arms}

    return {case: part(names) for case, names in cases.items()}


def metric_names(result: Mapping[str, Any]) -> list[str]:
    """All metrics that were measured: those the study names first, then in order of appearance."""
    seen = dict.fromkeys(
        name for body in result["arms"].values() for record in body["replicates"].values() for name in record["metrics"]
    )
    first = [name for name in result.get("compare", []) if name in seen]
    return [*first, *(name for name in seen if name not in first)]


def arm_summary(result: Mapping[str, Any], arm: str, metric: str) -> tuple[float, float, int] | None:
    """Mean, standard deviation and count of a metric over the replicates that have it."""
    values = [
        float(record["metrics"][metric]) for record in result["arms"][arm]["replicates"].values() if metric in record["metrics"]
    ]
    if not values:
        return None
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0, len(values)


def _trial_record(result: TrialResult) -> dict[str, Any]:
    record: dict[str, Any] = {
        "status": result.status.value,
        "metrics": {name: _short(value) for name, value in result.metrics.items()},
        "curves": {name: _thinned(*curve) for name, curve in result.curves.items()},
        "seconds": round(result.seconds, 2),
        "peak_mb": round(result.peak_mb),
    }
    if result.error:
        record |= {"error": result.error, "trace": result.trace}
    if result.notes:
        record["notes"] = result.notes
    return record


def _prepare_records(job: "Job", names: list[str]) -> dict[str, Any]:
    """What ``prepare`` noted on each replicate: how the shared model trained, for one."""
    if job.study.prepare is None:
        return {}
    noted = {name: job.prepared.about(job.prepared.name(job.study, name, job.scale, job.device), job.config) for name in names}
    return {
        name: {
            "curves": {label: _thinned(*curve) for label, curve in about["curves"].items()},
            "notes": about["notes"],
            "seconds": round(about["seconds"], 2),
        }
        for name, about in noted.items()
        if about
    }


def _finding_record(finding: Finding) -> dict[str, Any]:
    interval = finding.interval
    return {
        "text": finding.text,
        "verdict": finding.verdict.value,
        "values": {name: _short(value) for name, value in finding.values.items()},
        "mean": _short(finding.mean) if finding.values else None,
        "interval": [_short(end) for end in interval] if interval else None,
        "bound": finding.bound,
        "published": finding.published,
        "reason": finding.reason,
    }


def _tuning_record(job: "Job", tuning: dict[str, Any]) -> dict[str, Any] | None:
    tune = job.study.tune
    if not tuning or tune is None:
        return None
    edges = (tune.grid[0], tune.grid[-1])
    return {
        "field": tune.field,
        "grid": list(tune.grid),
        "select": tune.select,
        "mode": tune.mode,
        "follow": dict(tune.follow),
        "scores": {
            arm: [None if score is None else _short(score) for score in body["scores"].values()] for arm, body in tuning.items()
        },
        "best": {arm: body["best"] for arm, body in tuning.items()},
        "at_edge": [arm for arm, body in tuning.items() if len(tune.grid) > 2 and body["best"] in edges],
    }


def _figures(
    job: "Job", replicates: list[Replicate], done: list[tuple[Task, TrialResult]]
) -> tuple[dict[str, bytes], list[str]]:
    """The study's own figure(s) and those of its trials, as SVG."""
    files: dict[str, bytes] = {}
    notes: list[str] = []
    for task, result in done:
        for name, content in result.files.items():
            if name.endswith(".svg"):
                files[f"{file_stem(task.arm)}-{file_stem(task.replicate)}-{name}"] = content
        notes += [f"{task.arm}, {task.replicate}: {note}" for note in result.notes]
    if job.study.figure is None:
        return files, notes
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    try:
        with plt.rc_context({"svg.hashsalt": "assay", "svg.fonttype": "none"}):
            drawn = job.study.figure([r for r in replicates if r.outcomes])
            named = drawn if isinstance(drawn, dict) else {job.name: drawn} if drawn is not None else {}
            for name, figure in named.items():
                buffer = io.BytesIO()
                figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
                files[f"{file_stem(name)}.svg"] = buffer.getvalue()
                plt.close(figure)
    except Exception as error:  # a picture that cannot be drawn must not cost the numbers
        notes.append(f"the figure could not be drawn: {type(error).__name__}: {error}")
        job.display.message(notes[-1])
    return files, notes


def _thinned(steps: list[float], values: list[float]) -> list[list[float]]:
    """At most sixty points of a curve, first and last among them, to five digits."""
    keep = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _CURVE_POINTS)).round().astype(int))
    return [[_short(steps[i]) for i in keep], [_short(values[i]) for i in keep]]


def _short(value: float, digits: int = 6) -> float:
    return float(f"{value:.{digits}g}")


def file_stem(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name)


def _plain(value: Any) -> Any:
    """JSON knows no infinity: it becomes the text that ``float`` reads back."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


__all__ = ["arm_summary", "build_result", "by_case", "confidence_interval", "failed", "metric_names"]
