import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from assay.bench import Config
from assay.bench.records import Records
from assay.bench.trial import Status, Task, TrialResult


def trial(key="k", points=100, status=Status.FINISHED):
    curve = ([float(i) for i in range(points)], [1 / (i + 1) for i in range(points)])
    result = TrialResult(
        status, {"final loss (nats)": 0.5, "loss": 0.01}, {"loss": curve}, {"a.svg": b"<svg/>"}, ["noted"], 1.5, 100.0
    )
    return Task("arm", "0", Config(), key), result


def test_a_trial_comes_back_as_it_went_in(records):
    task, result = trial()
    records.save_trial("study", "desk", task, result)
    stored = records.finished("study")
    assert list(stored) == ["k"]
    again = records.trial(stored["k"])
    again.files = result.files
    again.curves = {name: tuple(curve) for name, curve in again.curves.items()}
    assert again == result


def test_failed_trials_are_kept_but_not_reused(records):
    records.save_trial("study", "desk", *trial("bad", status=Status.FAILED))
    records.save_trial("study", "desk", *trial("good"))
    assert list(records.finished("study")) == ["good"]


def test_five_trials_of_a_hundred_points_take_under_a_second(records):
    records.finished("study")  # opens the experiment
    best = float("inf")
    for attempt in range(3):  # the machine may be busy with other tests
        started = time.perf_counter()
        for i in range(5):
            records.save_trial("study", "desk", *trial(f"{attempt}-{i}"))
        best = min(best, time.perf_counter() - started)
    assert best < 1.0
    assert len(records.finished("study")) == 15


def test_a_curve_longer_than_a_batch_arrives_whole(records):
    records.save_trial("study", "desk", *trial(points=2500))
    run_id = records.finished("study")["k"]
    assert len(records._client.get_metric_history(run_id, "loss curve")) == 2500


def test_the_newest_result_of_a_scale(records):
    assert records.latest("study") is None
    for scale, value in (("smoke", 1), ("desk", 2), ("desk", 3)):
        records.save_result("study", {"scale": scale, "value": value}, {"study.svg": b"<svg/>"})
        time.sleep(0.01)
    assert records.latest("study", "smoke")[0]["value"] == 1
    assert records.latest("study")[0]["value"] == 3
    assert records.latest("study")[1] == {"study.svg": b"<svg/>"}
    assert records.studies() == ["study"]


@pytest.mark.slow
def test_a_tracking_server_serves_as_the_store(empty_store, tmp_path, monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
         "--backend-store-uri", f"sqlite:///{tmp_path / 'server.db'}", "--artifacts-destination", str(tmp_path / "artifacts")],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                break
            except OSError:
                assert server.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.3)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        records = Records(tmp_path / "runs")
        task, result = trial()
        records.save_trial("study", "desk", task, result)
        assert records.trial(records.finished("study")["k"]).metrics == result.metrics
        records.save_result("study", {"scale": "desk"}, {"study.svg": b"<svg/>"})
        assert records.latest("study", "desk") == ({"scale": "desk"}, {"study.svg": b"<svg/>"})
        assert not (tmp_path / "runs" / "mlflow.db").exists()
    finally:
        server.terminate()
        server.wait()
