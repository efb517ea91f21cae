"""Where runs are kept: MLflow, in a SQLite file under ``./assay-runs`` unless ``MLFLOW_TRACKING_URI`` names a server.

A study is an MLflow experiment; a trial is a run in it, written in one go when the trial has ended, so that the store
never holds half a trial; so is each result of a study. ``mlflow ui`` shows them all.
"""

import contextlib
import dataclasses
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from .trial import Status, Task, TrialResult

T = TypeVar("T")
FOLDER = Path("assay-runs")
_METRICS_A_BATCH = 1000  # MLflow's own limit
_LAST_BATCH = 800  # leaves room for the parameters and the mark in the same call
_KIND, _KEY, _STATUS, _SCALE, _STUDY = "assay.kind", "assay.key", "assay.status", "assay.scale", "assay.study"


class Records:
    """The store of trials and results.

    Args:
        folder: Local home of the store, of what ``prepare`` made and of locks.
        uri: MLflow tracking URI; by default ``MLFLOW_TRACKING_URI``, else a SQLite file in ``folder``.
    """

    def __init__(self, folder: Path | str = FOLDER, uri: str | None = None):
        self.folder = Path(folder).resolve()
        self.uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{self.folder / 'mlflow.db'}"
        self._local = self.uri.startswith("sqlite:///")
        if self._local:
            self.folder.mkdir(parents=True, exist_ok=True)
        with self._lock("store"):  # MLflow lays the tables when first used; two at once would collide
            self._client = _client(self.uri)
            if self._local:
                _write_ahead(Path(self.uri.removeprefix("sqlite:///")))
        self._experiments: dict[str, str] = {}

    # Trials

    def finished(self, study: str) -> dict[str, str]:
        """Key to run id of every finished trial of a study."""
        runs = self._search(study, f"tags.`{_KIND}` = 'trial' and tags.`{_STATUS}` = '{Status.FINISHED}'")
        return {run.data.tags[_KEY]: run.info.run_id for run in runs}

    def trial(self, run_id: str) -> TrialResult:
        """A stored trial."""
        stored = json.loads(self._text(run_id, "trial.json"))
        return TrialResult(**{**stored, "status": Status(stored["status"])})

    def save_trial(self, study: str, scale: str, task: Task, result: TrialResult) -> None:
        """Writes a trial: parameters, metrics and curves in batches, files, and last the mark that it is whole."""
        from mlflow.entities import Metric, Param, RunTag

        now = int(time.time() * 1000)
        metrics = [Metric(_plain(name), value, now, 0) for name, value in result.metrics.items()]
        metrics += [Metric("seconds", result.seconds, now, 0), Metric("peak_mb", result.peak_mb, now, 0)]
        for name, (steps, values) in result.curves.items():
            label = _plain(name if name not in result.metrics else f"{name} curve")
            metrics += [Metric(label, value, now, int(step)) for step, value in zip(steps, values, strict=True)]
        settings = [Param(k, str(v)[:5000]) for k, v in task.config.model_dump().items()]
        settings += [Param("arm", task.arm), Param("replicate", task.replicate)]

        name = f"{task.arm} · {task.replicate}" + (" · tuning" if task.tuning else "")
        run_id = self._start(study, name, {_KIND: "trial", _SCALE: scale, _KEY: task.key})
        stored = {k: v for k, v in dataclasses.asdict(result).items() if k != "files"}
        self._files(run_id, {**result.files, "trial.json": json.dumps(stored).encode()})
        for start in range(_LAST_BATCH, len(metrics), _METRICS_A_BATCH):
            batch = metrics[start : start + _METRICS_A_BATCH]
            self._retry(partial(self._client.log_batch, run_id, metrics=batch, synchronous=True))
        last = {"metrics": metrics[:_LAST_BATCH], "params": settings, "tags": [RunTag(_STATUS, result.status)]}
        self._retry(partial(self._client.log_batch, run_id, **last, synchronous=True))
        done = result.status in (Status.FINISHED, Status.SKIPPED)
        self._retry(lambda: self._client.set_terminated(run_id, "FINISHED" if done else "FAILED"))

    # Results

    def save_result(self, study: str, result: dict[str, Any], figures: dict[str, bytes]) -> None:
        """Writes the result of a study with its figures."""
        scale = result["scale"]
        run_id = self._start(study, f"result · {scale}", {_KIND: "result", _SCALE: scale, _STUDY: study})
        self._files(run_id, {**figures, "result.json": json.dumps(result, indent=1).encode()})
        self._retry(lambda: self._client.set_tag(run_id, _STATUS, Status.FINISHED.value))
        self._retry(lambda: self._client.set_terminated(run_id))

    def latest(self, study: str, scale: str | None = None) -> tuple[dict[str, Any], dict[str, bytes]] | None:
        """The newest result of a study (at a scale) and its figures by file name."""
        wanted = f"tags.`{_KIND}` = 'result' and tags.`{_STATUS}` = '{Status.FINISHED}'"
        if scale:
            wanted += f" and tags.`{_SCALE}` = '{scale}'"
        runs = self._search(study, wanted)
        if not runs:
            return None
        run_id = runs[0].info.run_id
        listed = self._retry(lambda: self._client.list_artifacts(run_id))
        figures = {f.path: self._bytes(run_id, f.path) for f in listed if f.path.endswith(".svg")}
        return json.loads(self._text(run_id, "result.json")), figures

    def studies(self) -> list[str]:
        """Names of the studies that have a record here."""
        return sorted(e.name for e in self._retry(self._client.search_experiments) if "assay" in e.tags)

    # MLflow, with patience

    def _experiment(self, study: str) -> str:
        if study not in self._experiments:
            with self._lock("store"):
                found = self._retry(lambda: self._client.get_experiment_by_name(study))
                if found is None:
                    place = (self.folder / "artifacts" / study).as_uri() if self._local else None
                    self._experiments[study] = self._retry(
                        lambda: self._client.create_experiment(study, artifact_location=place, tags={"assay": "study"})
                    )
                else:
                    self._experiments[study] = found.experiment_id
        return self._experiments[study]

    def _start(self, study: str, name: str, tags: dict[str, str]) -> str:
        experiment = self._experiment(study)
        return self._retry(lambda: self._client.create_run(experiment, run_name=name, tags=tags)).info.run_id

    def _search(self, study: str, wanted: str) -> list[Any]:
        found = self._retry(lambda: self._client.get_experiment_by_name(study))
        if found is None:
            return []
        experiment = found.experiment_id
        runs: list[Any] = []
        token = None
        while True:
            newest = ["attributes.start_time DESC"]
            search = partial(self._client.search_runs, [experiment], wanted, max_results=1000, order_by=newest)
            page = self._retry(partial(search, page_token=token))
            runs += page
            token = page.token
            if not token:
                return runs

    def _files(self, run_id: str, files: dict[str, bytes]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            self._retry(lambda: self._client.log_artifacts(run_id, folder))

    def _bytes(self, run_id: str, name: str) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            return Path(self._retry(lambda: self._client.download_artifacts(run_id, name, folder))).read_bytes()

    def _text(self, run_id: str, name: str) -> str:
        return self._bytes(run_id, name).decode()

    def _retry(self, call: Callable[[], T]) -> T:
        """SQLite lets one writer in at a time; with several runs on one store a call may have to wait its turn."""
        for pause in (0.05, 0.1, 0.2, 0.5, 1, 2, 4, 8):
            try:
                return call()
            except Exception as error:
                if "locked" not in str(error):
                    raise
                time.sleep(pause)
        return call()

    @contextlib.contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        if not self._local:
            yield
            return
        from filelock import FileLock

        with FileLock(self.folder / f".{name}.lock"):
            yield


def _client(uri: str) -> Any:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    for noisy in ("mlflow", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    from mlflow.tracking import MlflowClient

    for noisy in ("mlflow", "alembic"):  # importing MLflow sets its level back
        logging.getLogger(noisy).setLevel(logging.WARNING)
    client = MlflowClient(tracking_uri=uri)
    client.search_experiments(max_results=1)  # lays the tables now, under the lock
    return client


def _write_ahead(database: Path) -> None:
    """SQLite's write-ahead log: readers do not wait for a writer. The setting stays in the file."""
    import sqlite3

    with contextlib.closing(sqlite3.connect(database, timeout=30)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")


def _plain(name: str) -> str:
    """A metric name in the characters that MLflow takes."""
    return re.sub(r"[^\w\-. :/]", "_", name)
