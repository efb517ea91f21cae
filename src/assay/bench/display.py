"""What a person sees while a study runs: a live table on a terminal, a line a trial elsewhere."""

import math
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .trial import Status, Task, TrialResult

_MARKS = {
    Status.FINISHED: ("✓", "green"),
    Status.FAILED: ("✗", "bold red"),
    Status.DIVERGED: ("∞", "yellow"),
    Status.SKIPPED: ("–", "dim"),
}


class Quiet:
    """Shows nothing; for tests and for ``--json``."""

    def plan(self, title: str, arms: list[str], total: int) -> None: ...

    def started(self, task: Task) -> None: ...

    def progress(self, label: str, share: float, latest: str) -> None: ...

    def finished(self, task: Task, result: TrialResult, *, reused: bool) -> None: ...

    def message(self, text: str) -> None: ...


class Screen:
    """A Rich display: trials done and left, the arm at work, its latest metric, the time left.

    Args:
        console: Where to print. On anything but a terminal each finished trial is one line.
    """

    def __init__(self, console: Console):
        self.console = console
        self._live: Live | None = None
        self._title, self._total, self._done = "", 0, 0
        self._counts: dict[str, Counter[Status]] = {}
        self._latest: dict[str, str] = {}
        self._current: tuple[str, str, float, str] = ("", "", math.nan, "")
        self._began = time.monotonic()
        self._spent: list[float] = []

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def plan(self, title: str, arms: list[str], total: int) -> None:
        self._title, self._total = title, total
        self._counts = {arm: Counter() for arm in arms}
        if self.console.is_terminal and not self._live:
            self._live = Live(self, console=self.console, refresh_per_second=5, transient=True)
            self._live.start()
        elif not self.console.is_terminal:
            self.console.print(f"{title}: {total} trials of {len(arms)} arms")

    def started(self, task: Task) -> None:
        self._current = (task.arm, task.replicate + (" (tuning)" if task.tuning else ""), math.nan, "")

    def progress(self, label: str, share: float, latest: str) -> None:
        arm, replicate, *_ = self._current
        self._current = (arm, replicate, share, label)
        if latest and arm:
            self._latest[arm] = latest

    def finished(self, task: Task, result: TrialResult, *, reused: bool) -> None:
        self._done += 1
        self._counts.setdefault(task.arm, Counter())[result.status] += 1
        if not reused:
            self._spent.append(result.seconds)
        shown = ", ".join(f"{name} {value:.4g}" for name, value in list(result.metrics.items())[:2])
        self._latest[task.arm] = shown or result.error
        if not self._live:
            mark, _ = _MARKS[result.status]
            where = f"{task.arm} · {task.replicate}" + (" · tuning" if task.tuning else "")
            spent = "stored" if reused else f"{result.seconds:.1f} s"
            self.console.print(
                Text(f"[{self._done}/{self._total}] {mark} {where}  {spent}  {shown or result.error}{self._left()}")
            )

    def message(self, text: str) -> None:
        self.console.print(Text(text, style="yellow"))

    def __rich__(self) -> Group:
        table = Table(box=None, padding=(0, 2), header_style="dim")
        for heading in ("arm", "trials", "latest"):
            table.add_column(heading)
        for arm, counts in self._counts.items():
            marks = Text()
            for status, (mark, style) in _MARKS.items():
                marks.append(mark * min(counts[status], 24), style=style)
            here = arm == self._current[0]
            table.add_row(Text(arm, style="bold" if here else ""), marks, Text(self._latest.get(arm, ""), style="cyan"))
        arm, replicate, share, label = self._current
        bar = ProgressBar(total=max(self._total, 1), completed=self._done, width=40)
        part = "" if math.isnan(share) else f" {share:4.0%}"
        head = Text.assemble((self._title, "bold"), f"  {self._done}/{self._total} trials", (self._left(), "dim"))
        now = Text.assemble(("now ", "dim"), f"{arm} · {replicate}  {label}{part}" if arm else "")
        return Group(head, bar, now, table)

    def _left(self) -> str:
        remaining = self._total - self._done
        if not self._spent or remaining <= 0:
            return ""
        elapsed = time.monotonic() - self._began
        return f"  · about {duration(remaining * elapsed / len(self._spent))} left"


def duration(seconds: float) -> str:
    """``45 s``, ``3 min``, ``1 h 20 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


_VERDICT_STYLE = {
    "holds": ("✓", "green"),
    "mixed": ("±", "yellow"),
    "fails": ("✗", "red"),
    "inconclusive": ("?", "magenta"),
    "reported": ("·", "cyan"),
}


def verdict_text(verdict: str) -> Text:
    mark, style = _VERDICT_STYLE[verdict]
    return Text(f"{mark} {verdict}", style=style)


def number(value: Any, digits: int = 4) -> str:
    """A number in at most ``digits`` significant digits; infinity and absence in words."""
    if value is None:
        return "–"
    return f"{float(value):.{digits}g}".replace("-", "−")


def arms_tables(result: dict[str, Any]) -> list[Table]:
    """For each case a table of arms × metrics."""
    from .result import by_case

    return [_arms_table(part, case) for case, part in by_case(result).items()]


def _arms_table(result: Mapping[str, Any], case: str, most: int = 6) -> Table:
    """Mean ± standard deviation over the replicates."""
    from .result import arm_summary, metric_names

    names = metric_names(result)
    shown = names[:most]
    several = len(result["replicates"]) > 1
    facts = (result["study"], case, result["scale"], f"{len(result['replicates'])} replicate{'s' if several else ''}")
    table = Table(title=" · ".join(fact for fact in facts if fact), title_justify="left")
    table.add_column("arm", no_wrap=True)
    for name in shown:
        table.add_column(name, justify="right")
    table.add_column("trials", justify="right")
    for arm, body in result["arms"].items():
        cells = []
        for name in shown:
            summary = arm_summary(result, arm, name)
            cells.append("–" if summary is None else number(summary[0]) + (f" ± {number(summary[1], 2)}" if several else ""))
        states = Counter(record["status"] for record in body["replicates"].values())
        tuned = "".join(f" ({k} {v})" for k, v in body.get("tuned", {}).items())
        table.add_row(arm + tuned, *cells, ", ".join(f"{n} {s}" for s, n in states.items()))
    if len(names) > most:
        table.caption = f"and {len(names) - most} more metrics: assay report shows all"
    return table


def claims_table(result: dict[str, Any]) -> Table:
    """The claims and what became of them."""
    table = Table(title="claims", title_justify="left")
    for heading in ("claim", "published", "bound", "measured", "verdict"):
        table.add_column(heading)
    for finding in result["claims"]:
        low_high = finding["interval"]
        interval = f" [{number(low_high[0], 3)}, {number(low_high[1], 3)}]" if low_high else ""
        text = Text(finding["text"])
        if finding["reason"]:
            text.append(f"\n{finding['reason']}", style="dim")
        table.add_row(
            text, finding["published"], finding["bound"], number(finding["mean"]) + interval, verdict_text(finding["verdict"])
        )
    return table


def speed_table(name: str, outcomes: list[dict[str, Any]]) -> Table:
    """Contests as a table: medians, the ratio with its quartiles, the target."""
    table = Table(title=f"{name}: ours beside the peer", title_justify="left")
    for heading in ("what", "peer", "ours", "peer's", "ratio", "target", ""):
        table.add_column(heading, justify="right" if heading in ("ours", "peer's", "ratio", "target") else "left")

    def met(outcome: dict[str, Any]) -> Text:
        if outcome["met"] is None:
            return Text("reported", style="cyan")
        return Text("✓ met", style="green") if outcome["met"] else Text("✗ missed", style="red")

    def target(value: float | None) -> str:
        return "" if value is None else f"≤ {value:g}"

    for o in outcomes:
        low, high = o["spread"]
        ratio = f"{o['ratio']:.3g} [{low:.3g}, {high:.3g}]"
        ours, peers = (f"{o[k]:.3g} ms" for k in ("ours_ms", "peer_ms"))
        table.add_row(o["name"], o["peer"], ours, peers, ratio, target(o["target"]), met(o))
        if memory := o.get("memory"):
            ours, peers = (f"{memory[k]:.3g} MB" for k in ("ours_mb", "peer_mb"))
            table.add_row("  peak memory", "", ours, peers, f"{memory['ratio']:.3g}", target(memory["target"]), met(memory))
    table.caption = (
        f"{outcomes[0]['threads']} threads, {outcomes[0]['rounds']} rounds; ratio = median of ours / peer [quartiles]"
    )
    return table
