"""Runs a study: tunes its arms, runs every arm on every replicate, keeps each trial as it ends, and judges the claims."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from .config import Config, UsageError, nearest
from .fingerprint import arm_fingerprint, case_fingerprint, digest, files_fingerprint, module_of, source_of, study_source
from .prepared import PreparedStore
from .records import Records
from .result import build_result
from .study import Study, as_case
from .trial import Status, Task, TrialResult, run_prepare, run_trial

ENGINE = 1  # part of every key: raise it when the bench itself changes what a trial computes


class Display(Protocol):
    """Where progress is shown."""

    def plan(self, title: str, arms: list[str], total: int) -> None: ...
    def started(self, task: Task) -> None: ...
    def progress(self, label: str, share: float, latest: str) -> None: ...
    def finished(self, task: Task, result: TrialResult, *, reused: bool) -> None: ...
    def message(self, text: str) -> None: ...


class Executor(Protocol):
    """Runs tasks and yields each with its result as it ends."""

    def run(self, tasks: list[Task], job: "Job") -> Iterator[tuple[Task, TrialResult]]: ...


@dataclass
class Job:
    """A study about to be run, with everything that was asked for.

    Attributes:
        name: The study's name in the records.
        study: The study.
        scale: ``smoke``, ``desk`` or ``paper``.
        config: The scale's configuration with the user's settings.
        overrides: Those settings, for the record.
        device: Torch device, as text.
        only: The arms to run; all when empty.
        case: The user's own ``(config, log) -> shared``, or the shared object itself, in place of ``prepare``.
    """

    name: str
    study: Study
    scale: str
    config: Config
    records: Records
    display: Display
    overrides: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"
    only: tuple[str, ...] = ()
    case: Any = None
    case_path: str = ""
    extra_arms: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        case = case_fingerprint(self.case, self.case_path) if self.case is not None else ""
        files = files_fingerprint(self.config.model_dump())
        self._own = digest(case, files) if case or files else ""  # what of a key is the user's own
        for arm in self.only:
            if arm not in self.study.arms:
                raise UsageError(f"no arm is called {arm!r}{nearest(arm, self.study.arms)}; arms: {', '.join(self.study.arms)}")
        if self.case is not None:
            self.study = replace(self.study, prepare=_as_prepare(self.case, self.study))
        self.prepared = PreparedStore(self.records.folder / "prepared", self._own)
        self._source = study_source(self.study)

    @property
    def arms(self) -> dict[str, Any]:
        return {name: arm for name, arm in self.study.arms.items() if not self.only or name in self.only}

    def task(self, arm: str, replicate: str, config: Config, *, tuning: bool = False) -> Task:
        thing = self.study.arms[arm]
        own = source_of(module_of(thing)) if arm in self.extra_arms else ""
        key = digest(
            ENGINE, self.name, self._source, config.model_dump(mode="json", exclude={"seeds"}), arm, arm_fingerprint(thing),
            own, self._own, replicate, self.scale, self.device,
        )  # fmt: skip
        return Task(arm, replicate, config, key, tuning)


class InProcess:
    """One trial after the other, here."""

    def run(self, tasks: list[Task], job: Job) -> Iterator[tuple[Task, TrialResult]]:
        for replicate in dict.fromkeys(task.replicate for task in tasks):
            mine = [task for task in tasks if task.replicate == replicate]
            for config in _distinct_configs(mine):
                yield from self._group([task for task in mine if task.config == config], config, replicate, job)

    def _group(self, tasks: list[Task], config: Config, replicate: str, job: Job) -> Iterator[tuple[Task, TrialResult]]:
        shared, failure = None, None
        if job.study.prepare:
            job.display.started(replace(tasks[0], arm="prepare"))
            shared, failure = prepare_here(job, replicate, config)
        for task in tasks:
            job.display.started(task)
            if failure is not None:
                yield task, replace(failure)
                continue
            arm = job.study.arms[task.arm]
            own = own_copy(shared)
            yield task, run_trial(job.study, arm, task, own, scale=job.scale, device=job.device, progress=job.display.progress)


def prepare_here(job: Job, replicate: str, config: Config) -> tuple[Any, TrialResult | None]:
    """What the arms of a replicate share: stored or made now; or the failure that all of them share."""
    import traceback

    from .study import NotApplicable

    def make(recorded: Config) -> tuple[Any, dict[str, Any]]:
        return run_prepare(job.study, replicate, recorded, scale=job.scale, device=job.device, progress=job.display.progress)

    name = job.prepared.name(job.study, replicate, job.scale, job.device)
    started = time.perf_counter()
    try:
        shared, note = job.prepared.get(name, config, make)
    except UsageError:
        raise
    except NotApplicable as gap:
        return None, TrialResult(Status.SKIPPED, error=str(gap))
    except Exception as error:
        return None, TrialResult(
            Status.FAILED,
            seconds=time.perf_counter() - started,
            error=f"prepare failed: {type(error).__name__}: {error}",
            trace=traceback.format_exc(),
        )
    if note:
        job.display.message(note)
    return shared, None


def own_copy(shared: Any) -> Any:
    """A copy for one trial, so that what an arm does to it reaches no other arm; the thing itself where Python cannot."""
    import copy

    try:
        return copy.deepcopy(shared)
    except Exception:  # tensors inside a graph, open handles …: the study's contract (do not mutate) has to do
        return shared


def run(job: Job, executor: Executor | None = None) -> dict[str, Any]:
    """Runs a job and returns its result, which is also kept in the records.

    Finished trials with the same key are reused. A trial that fails takes no other with it; it is tried again the next
    time the job is run.

    Returns:
        The result as in ``result.json``; see :func:`assay.bench.result.build_result`.
    """
    executor = executor or InProcess()
    stored = job.records.finished(job.name)
    names = job.study.replicate_names(job.config)
    started = time.perf_counter()

    arms = list(job.arms)
    tune = job.study.tune
    if tune and (job.scale == "smoke" or len(tune.grid) < 2 or tune.field in job.overrides):
        tune = None  # smoke only checks that it runs; a value the user has set is the value to use
    leaders = [arm for arm in job.study.arms if tune and arm not in tune.follow and _needed(arm, arms, tune.follow)]
    grid_tasks = (
        [
            job.task(arm, tune.replicate, job.config.model_copy(update={tune.field: value}), tuning=True)
            for value in (tune.grid if tune else ())
            for arm in leaders
        ]
        if tune
        else []
    )
    job.display.plan(f"{job.name} · {job.scale}", arms, len(grid_tasks) + len(arms) * len(names))

    tuning: dict[str, Any] = {}
    tuned = _run_all(grid_tasks, job, executor, stored)
    if tune:
        for arm in leaders:
            results = {task.config: result for task, result in tuned if task.arm == arm}
            scores = {
                value: results[job.config.model_copy(update={tune.field: value})].metrics.get(tune.select)
                for value in tune.grid
            }
            tuning[arm] = {"scores": scores, "best": tune.best(scores)}
            failed = [r for r in results.values() if r.status in (Status.FAILED, Status.SKIPPED)]
            tuning[arm]["failure"] = failed[0] if len(failed) == len(results) else None

    tasks, lost = [], []
    for replicate in names:
        for arm in arms:
            config = job.config
            if tune:
                leader = tuning[tune.follow.get(arm, arm)]
                if leader["best"] is None:
                    failure = leader["failure"] or TrialResult(
                        Status.FAILED, error=f"every {tune.field} of the grid failed or diverged"
                    )
                    lost.append((job.task(arm, replicate, config), failure))
                    continue
                config = config.model_copy(update={tune.field: leader["best"]})
            tasks.append(job.task(arm, replicate, config))
    for task, failure in lost:
        job.display.finished(task, failure, reused=False)
    done = lost + _run_all(tasks, job, executor, stored)
    result, figures = build_result(job, names, done, tuned, tuning, time.perf_counter() - started)
    job.records.save_result(job.name, result, figures)
    return result


def _needed(arm: str, arms: list[str], follow: Mapping[str, str]) -> bool:
    return arm in arms or any(follow.get(other) == arm for other in arms)


def _run_all(tasks: list[Task], job: Job, executor: Executor, stored: dict[str, str]) -> list[tuple[Task, TrialResult]]:
    done: dict[str, tuple[Task, TrialResult]] = {}
    missing = []
    for task in tasks:
        if task.key in stored:
            result = job.records.trial(stored[task.key])
            done[task.key] = (task, result)
            job.display.finished(task, result, reused=True)
        else:
            missing.append(task)
    for task, result in executor.run(missing, job):
        job.records.save_trial(job.name, job.scale, task, result)
        done[task.key] = (task, result)
        job.display.finished(task, result, reused=False)
    return [done[task.key] for task in tasks]


def _distinct_configs(tasks: list[Task]) -> list[Config]:
    distinct: list[Config] = []
    for task in tasks:
        if task.config not in distinct:
            distinct.append(task.config)
    return distinct


def _as_prepare(case: Any, study: Study) -> Any:
    """A user's case as a ``prepare``: called if it is callable, checked against what the study's own promises."""

    def prepare(config: Config, log: Any) -> Any:
        return as_case(study, case(config, log) if callable(case) else case)

    if module := module_of(case):
        prepare.__module__ = module.__name__
    return prepare


def machine() -> dict[str, Any]:
    """What this ran on, for the record."""
    import os
    import platform
    from importlib.metadata import version

    import psutil
    import torch

    from .estimate import speed

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "",
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "assay": version("assay"),
        "speed": round(speed(), 2),
    }


def _processor() -> str:
    import platform

    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
