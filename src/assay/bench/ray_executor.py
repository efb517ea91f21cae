"""Trials on a Ray cluster, or on a local Ray: the same work as in this process, with the same numbers.

Everything crosses as a pickle made here, so that what a user's own file defines travels by value and each trial unpacks a
copy of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle

from .config import Config
from .prepared import recording
from .runner import Job
from .study import Study, require
from .trial import Status, Task, TrialResult, run_prepare, run_trial

_RETRIES = 1


@dataclass(frozen=True)
class _Shipment:
    """What a worker needs of a study: claims and figures stay here."""

    study: Study
    scale: str
    device: str


class OnRay:
    """Runs tasks on Ray.

    Args:
        address: A cluster's address; by default the one ``RAY_ADDRESS`` names, else a local Ray on this machine.
        num_cpus: Cores of a local Ray; by default all.
    """

    def __init__(self, address: str | None = None, num_cpus: int | None = None):
        self.address = address
        self.num_cpus = num_cpus

    def run(self, tasks: list[Task], job: Job) -> Iterator[tuple[Task, TrialResult]]:
        if not tasks:
            return
        ray = require("ray", extra="ray")
        started_here = not ray.is_initialized()
        if started_here:
            _init(ray, self.address, self.num_cpus)
        try:
            yield from self._run(ray, tasks, job)
        finally:
            if started_here:
                ray.shutdown()

    def _run(self, ray: Any, tasks: list[Task], job: Job) -> Iterator[tuple[Task, TrialResult]]:
        lean = replace(job.study, claims=(), gates=(), figure=None)
        shipment = ray.put(cloudpickle.dumps(_Shipment(lean, job.scale, job.device)))
        prepare = ray.remote(max_retries=0, num_returns=2)(_remote_prepare)
        trial = ray.remote(max_retries=0)(_remote_trial)

        pending: dict[Any, tuple[str, Any, int]] = {}  # ref -> (kind, payload, attempt)

        def resources(config: Config) -> dict[str, float]:
            return {"num_cpus": config.num_cpus, "num_gpus": config.num_gpus}

        def submit_trial(task: Task, shared: Any, attempt: int = 0) -> None:
            arm = job.study.arms[task.arm]
            ref = trial.options(**resources(task.config)).remote(shipment, cloudpickle.dumps((arm, task)), shared)
            pending[ref] = ("trial", (task, shared), attempt)

        def submit_prepare(groups: list[list[Task]], attempt: int = 0) -> None:
            """Prepares the first group; the others of the replicate wait, since what it makes may serve them too."""
            first = groups[0][0]
            value, outcome = prepare.options(**resources(first.config)).remote(shipment, cloudpickle.dumps(first))
            pending[outcome] = ("prepare", (groups, value), attempt)

        def begin(groups: list[list[Task]]) -> None:
            while groups:
                if job.study.prepare is None:
                    shared = None
                else:
                    stored = job.prepared.find(store_name(groups[0]), groups[0][0].config)
                    if stored is None:
                        return submit_prepare(groups)
                    shared = ray.put(stored)
                for task in groups[0]:
                    submit_trial(task, shared)
                groups = groups[1:]

        def store_name(group: list[Task]) -> str:
            return job.prepared.name(job.study, group[0].replicate, job.scale, job.device)

        grouped = _groups(tasks)
        for replicate in dict.fromkeys(group[0].replicate for group in grouped):
            begin([group for group in grouped if group[0].replicate == replicate])

        while pending:
            (ref,), _ = ray.wait(list(pending), num_returns=1)
            kind, payload, attempt = pending.pop(ref)
            try:
                outcome = cloudpickle.loads(ray.get(ref))
            except (ray.exceptions.RayTaskError, ray.exceptions.RayError) as error:
                if _died(ray, error) and attempt < _RETRIES:
                    what = payload[0] if kind == "trial" else payload[0][0][0]
                    job.display.message(f"{_name(kind, what)}: its worker died; it is tried once more")
                    if kind == "trial":
                        submit_trial(payload[0], payload[1], attempt + 1)
                    else:
                        submit_prepare(payload[0], attempt + 1)
                    continue
                outcome = _lost(error, attempt)
            if kind == "trial":
                task, _shared = payload
                if attempt and isinstance(outcome, TrialResult):
                    outcome.notes.append("its worker died once; this is the second try")
                yield task, outcome
                continue
            groups, value = payload
            group = groups[0]
            if isinstance(outcome, TrialResult):
                for task in group:
                    yield task, replace(outcome)
            else:
                read, about = outcome
                job.prepared.keep(store_name(group), group[0].config, read, ray.get(value), about)
                for task in group:
                    submit_trial(task, value)
            begin(groups[1:])


def _remote_prepare(shipped: bytes, packed: bytes) -> tuple[bytes, bytes]:
    """What a replicate's arms share, and the config fields it read with what it noted; or the failure."""
    import traceback

    from .study import NotApplicable

    shipment, task = cloudpickle.loads(shipped), cloudpickle.loads(packed)
    config, read = recording(task.config)
    value: bytes = b""
    outcome: Any = None
    try:
        made, about = run_prepare(shipment.study, task.replicate, config, scale=shipment.scale, device=shipment.device)
        value, outcome = cloudpickle.dumps(made), (read, about)
    except NotApplicable as gap:
        outcome = TrialResult(Status.SKIPPED, error=str(gap))
    except Exception as error:
        message = f"prepare failed: {type(error).__name__}: {error}"
        outcome = TrialResult(Status.FAILED, error=message, trace=traceback.format_exc())
    return value, cloudpickle.dumps(outcome)


def _remote_trial(shipped: bytes, packed: bytes, shared: bytes | None) -> bytes:
    shipment = cloudpickle.loads(shipped)
    arm, task = cloudpickle.loads(packed)
    own = None if shared is None else cloudpickle.loads(shared)
    return cloudpickle.dumps(run_trial(shipment.study, arm, task, own, scale=shipment.scale, device=shipment.device))


def _init(ray: Any, address: str | None, num_cpus: int | None) -> None:
    import logging
    import os

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = address or os.environ.get("RAY_ADDRESS")
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address:
        ray.init(address=address, **quiet)
    else:
        ray.init(num_cpus=num_cpus or os.cpu_count(), include_dashboard=False, **quiet)


def _groups(tasks: list[Task]) -> list[list[Task]]:
    """Tasks that share what ``prepare`` makes: the same replicate under the same config."""
    groups: list[list[Task]] = []
    for task in tasks:
        for group in groups:
            if group[0].replicate == task.replicate and group[0].config == task.config:
                group.append(task)
                break
        else:
            groups.append([task])
    return groups


def _died(ray: Any, error: Exception) -> bool:
    """Whether a worker was lost, rather than the code it ran having raised."""
    lost = (
        ray.exceptions.WorkerCrashedError,
        ray.exceptions.OutOfMemoryError,
        ray.exceptions.NodeDiedError,
        ray.exceptions.ObjectLostError,
    )
    return isinstance(error, lost)


def _lost(error: Exception, attempt: int) -> TrialResult:
    tries = "" if attempt == 0 else f" ({attempt + 1} tries)"
    return TrialResult(Status.FAILED, error=f"{type(error).__name__}{tries}: {str(error).splitlines()[0]}", trace=str(error))


def _name(kind: str, task: Task) -> str:
    return f"{task.arm} · {task.replicate}" if kind == "trial" else f"prepare · {task.replicate}"
