"""Fixtures that several test modules share."""

import os
import shutil
from pathlib import Path

import pytest

os.environ.setdefault("MPLBACKEND", "Agg")


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory):
    """A folder with a fresh MLflow store; laying its tables takes seconds, copying it none."""
    from assay.bench.records import Records

    folder = tmp_path_factory.mktemp("store")
    Records(folder, uri=f"sqlite:///{folder / 'mlflow.db'}")
    return folder


@pytest.fixture
def runs_folder(empty_store, tmp_path) -> Path:
    """A folder of records of the test's own, with an empty store in it."""
    folder = tmp_path / "runs"
    shutil.copytree(empty_store, folder)
    return folder


@pytest.fixture
def records(runs_folder, monkeypatch):
    from assay.bench.records import Records

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return Records(runs_folder)
