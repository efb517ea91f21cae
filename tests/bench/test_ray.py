"""The same study on a real local Ray: the same numbers, and workers that die."""

import pickle
from pathlib import Path

import pytest

from assay.bench.loading import load_object
from assay.bench.runner import run
from support import Messages, job, marks, numbers

TOY = Path(__file__).parent / "toy.py"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray")
    from assay.bench.ray_executor import OnRay, _init

    _init(ray, None, 2)
    yield OnRay()
    ray.shutdown()


@pytest.fixture
def toy():
    return load_object(f"{TOY}:study", "--case")


def test_same_seeds_same_numbers_as_in_process(toy, cluster, records, tmp_path):
    from assay.bench.records import Records

    settings = {"marks": str(tmp_path / "marks")}
    there = run(job(toy, records, settings=settings), cluster)
    assert marks(tmp_path / "marks", "prepare") == ["prepare-0", "prepare-1", "prepare-1000"]  # once a replicate there too
    here = run(job(toy, Records(tmp_path / "other"), settings={"marks": str(tmp_path / "more")}))
    assert numbers(there) == numbers(here)
    before = len(list((tmp_path / "marks").iterdir()))
    assert numbers(run(job(toy, records, settings=settings), cluster)) == numbers(there)
    assert len(list((tmp_path / "marks").iterdir())) == before  # resumed: nothing ran


def test_a_worker_killed_once_is_retried_and_reported(toy, cluster, records, tmp_path):
    display = Messages()
    settings = {"marks": str(tmp_path / "marks"), "die_once": "half", "lr": 1.0, "seeds": 1}
    result = run(job(toy, records, settings=settings, display=display), cluster)
    record = result["arms"]["half"]["replicates"]["0"]
    assert record["status"] == "finished"
    assert record["notes"] == ["its worker died once; this is the second try"]
    assert any("half · 0: its worker died" in text for text in display.texts)
    assert len([m for m in marks(tmp_path / "marks", "trial") if "half" in m]) == 2
    assert result["claims"][0]["verdict"] == "holds"


def test_a_worker_that_dies_every_time_fails_alone(toy, cluster, records, tmp_path):
    settings = {"marks": str(tmp_path / "marks"), "die_always": "tenth", "lr": 1.0, "seeds": 1}
    result = run(job(toy, records, settings=settings), cluster)
    states = {arm: body["replicates"]["0"]["status"] for arm, body in result["arms"].items()}
    assert states == {"one": "finished", "half": "finished", "tenth": "failed"}
    assert "(2 tries)" in result["arms"]["tenth"]["replicates"]["0"]["error"]
    assert len([m for m in marks(tmp_path / "marks", "trial") if "tenth" in m]) == 2


def test_an_arm_from_a_users_file_travels(toy, cluster, records, tmp_path):
    from dataclasses import replace

    from assay.bench.study import with_arm

    (tmp_path / "mine.py").write_text("OFFSET = 2.0\ndef shift(x):\n    return x + OFFSET\n")
    study = replace(toy, arms=with_arm(toy, "mine", load_object(f"{tmp_path / 'mine.py'}:shift", "--arm")))
    result = run(job(study, records, settings={"lr": 1.0, "seeds": 1}, extra_arms={"mine": "mine.py:shift"}), cluster)
    assert result["arms"]["mine"]["replicates"]["0"]["metrics"]["mean"] > 1


def test_what_is_shipped_is_small(toy):
    import cloudpickle

    from assay.bench.ray_executor import _Shipment

    assert len(cloudpickle.dumps(_Shipment(toy, "desk", "cpu"))) < 50_000
    assert pickle.loads(cloudpickle.dumps(_Shipment(toy, "desk", "cpu"))).scale == "desk"
