import time

import pytest
import torch

from assay.bench import UsageError
from assay.bench.speed import Contest, compete, load_contests, peak_memory_mb


def busy(seconds):
    def call():
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    return call


def test_the_ratio_of_two_known_tasks():
    outcome = compete(Contest("wait", busy(0.002), busy(0.004), "twice as long", target=0.6, rounds=3))
    assert outcome["ratio"] == pytest.approx(0.5, abs=0.1)
    assert outcome["met"] is True
    assert outcome["spread"][0] <= outcome["ratio"] <= outcome["spread"][1]
    assert compete(Contest("wait", busy(0.004), busy(0.002), "half", target=1.0, rounds=3))["met"] is False
    assert compete(Contest("wait", busy(0.001), busy(0.001), "same", rounds=3))["met"] is None


def test_peak_memory_of_a_known_size():
    assert peak_memory_mb(lambda: torch.ones(50_000_000, dtype=torch.uint8)) == pytest.approx(50, rel=0.2)
    contest = Contest(
        "allocate",
        lambda: torch.ones(40_000_000, dtype=torch.uint8),
        lambda: torch.ones(160_000_000, dtype=torch.uint8),
        "four times",
        memory=True,
        memory_target=0.5,
        rounds=1,
    )
    memory = compete(contest)["memory"]
    assert memory["ratio"] == pytest.approx(0.25, abs=0.1)
    assert memory["met"] is True


def test_benchmarks_are_found_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "mine.py").write_text(
        "from assay.bench.speed import Contest\ncontest = Contest('x', len, len, 'peer')\n"
    )
    assert [c.name for c in load_contests("mine")] == ["x"]
    (tmp_path / "benchmarks" / "none.py").write_text("x = 1\n")
    with pytest.raises(UsageError, match="must define"):
        load_contests("none")
    with pytest.raises(UsageError, match=r"no benchmarks/other\.py"):
        load_contests("other")
