import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from assay.bench import Claim, Config, Study, Tune, UsageError, at_least, at_most, require
from assay.bench.loading import load_object
from assay.bench.records import Records
from assay.bench.result import failed
from assay.bench.runner import run
from support import job, marks, numbers

TOY = Path(__file__).parent / "toy.py"


@pytest.fixture
def toy():
    return load_object(f"{TOY}:study", "--case")


def test_tunes_runs_judges_and_keeps(toy, records, tmp_path):
    result = run(job(toy, records, settings={"marks": str(tmp_path / "marks")}))
    assert result["tune"]["best"] == {"one": 1.0, "half": 1.0}
    assert result["tune"]["follow"] == {"tenth": "half"}
    assert result["arms"]["tenth"]["tuned"] == {"lr": 1.0}
    assert [c["verdict"] for c in result["claims"]] == ["holds", "reported"]
    assert result["claims"][0]["mean"] == pytest.approx(0.25, abs=0.02)
    assert result["arms"]["one"]["replicates"]["1"]["curves"]["loss"][0] == [0, 1, 2, 3, 4]
    assert not failed(result)
    assert result["prepare"]["1"]["curves"] == {"prepared": [[0], [1]]}
    # 2 leaders × 3 rates on the tuning replicate, then 3 arms × 2 seeds; prepare once a replicate
    assert len(marks(tmp_path / "marks", "trial")) == 6 + 6
    assert marks(tmp_path / "marks", "prepare") == ["prepare-0", "prepare-1", "prepare-1000"]
    stored, figures = records.latest("toy", "desk")
    assert stored == result
    assert figures == {}


def test_a_second_run_repeats_nothing_and_says_the_same(toy, records, tmp_path):
    settings = {"marks": str(tmp_path / "marks")}
    first = run(job(toy, records, settings=settings))
    before = sorted(os.listdir(tmp_path / "marks"))
    assert numbers(run(job(toy, records, settings=settings))) == numbers(first)
    assert sorted(os.listdir(tmp_path / "marks")) == before


def test_what_applies_nowhere_is_named_apart_from_the_claims(toy, records, tmp_path):
    never = Claim("on labelled data only", lambda r: None, holds=at_most(1))
    study = replace(toy, claims=(*toy.claims, never), gates=(replace(never, text="labels exist"),))
    result = run(job(study, records, settings={"marks": str(tmp_path / "marks"), "lr": 1.0}))
    assert result["not_applicable"] == ["labels exist", "on labelled data only"]
    assert [c["text"] for c in result["claims"]] == [c.text for c in toy.claims]
    assert result["gates"] == []
    assert "on labelled data only" in result["notes"][-1]


def test_a_gate_of_one_claim_is_kept_beside_the_gates_of_all(toy, records, tmp_path):
    shut = Claim("never met", lambda r: 0, holds=at_least(1))
    claims = (*toy.claims, Claim("decided by it", lambda r: 0, holds=at_most(1), gates=(shut,)))
    result = run(job(replace(toy, claims=claims), records, settings={"marks": str(tmp_path / "marks"), "lr": 1.0}))
    assert [c["verdict"] for c in result["claims"]] == ["holds", "reported", "inconclusive"]
    wide, narrow = result["gates"]
    assert "decides" not in wide
    assert (narrow["text"], narrow["verdict"], narrow["decides"]) == ("never met", "fails", ["decided by it"])


def test_more_seeds_run_only_the_new_ones(toy, records, tmp_path):
    settings = {"marks": str(tmp_path / "marks"), "lr": 1.0}
    run(job(toy, records, settings=settings))
    assert len(marks(tmp_path / "marks", "trial")) == 6
    result = run(job(toy, records, settings={**settings, "seeds": 3}))
    assert len(marks(tmp_path / "marks", "trial")) == 9
    assert result["replicates"] == ["0", "1", "2"]


def test_a_changed_setting_or_arm_does_not_reuse(toy, records, tmp_path):
    settings = {"marks": str(tmp_path / "marks"), "lr": 1.0}
    one = run(job(toy, records, settings=settings))
    two = run(job(toy, records, settings={**settings, "n": 17}))
    assert numbers(one)[0] != numbers(two)[0]
    module = sys.modules[toy.trial.__module__]
    third = replace(toy, arms={**toy.arms, "one": partial(module.scale, factor=1.5)})
    assert numbers(run(job(third, records, settings=settings)))[0]["one"] != numbers(one)[0]["one"]


def test_arms_share_draws_and_cannot_spoil_each_others_case(toy, records):
    result = run(job(toy, records, settings={"lr": 1.0}))
    means = {arm: body["replicates"]["0"]["metrics"]["mean"] for arm, body in result["arms"].items()}
    torch.manual_seed(0)
    x = torch.randn(16)
    torch.manual_seed(0)
    noise = 0.01 * torch.randn(16)
    for arm, factor in {"one": 1.0, "half": 0.5, "tenth": 0.1}.items():
        assert means[arm] == pytest.approx((factor * x + noise).mean().item(), rel=1e-5)


def broken_trial(arm, shared, config, log):
    return arm(log)


def raises(log):
    raise RuntimeError("the arm broke")


def runs_out_of_memory(log):
    return torch.empty(10**15)


def logs_nan(log):
    log.metric("loss", 1.0, 0)
    log.metric("loss", math.nan, 1)


def returns_infinity(log):
    return {"x": math.inf}


def returns_text(log):
    return {"x": "many"}


def returns_nothing(log):
    return None


def needs_a_peer(log):
    require("no_such_package_here", extra="optim")


def works(log):
    return {"x": 1.0}


BROKEN = Study(
    trial=broken_trial,
    arms={
        "raises": raises,
        "memory": runs_out_of_memory,
        "nan": logs_nan,
        "infinity": returns_infinity,
        "text": returns_text,
        "nothing": returns_nothing,
        "peer": needs_a_peer,
        "works": works,
    },
    scales={"smoke": Config(seeds=2), "desk": Config(seeds=2)},
    claims=[
        Claim("works works", lambda r: r["works"].x, holds=at_most(1)),
        Claim("raises works", lambda r: r["raises"].x, holds=at_most(1)),
    ],
)


def test_one_arm_that_breaks_takes_no_other_with_it(records):
    result = run(job(BROKEN, records))
    seen = {arm: body["replicates"]["0"] for arm, body in result["arms"].items()}
    assert {arm: record["status"] for arm, record in seen.items()} == {
        "raises": "failed",
        "memory": "failed",
        "nan": "diverged",
        "infinity": "diverged",
        "text": "failed",
        "nothing": "failed",
        "peer": "skipped",
        "works": "finished",
    }
    assert "the arm broke" in seen["raises"]["trace"]
    assert "in raises" in seen["raises"]["trace"]
    assert "loss became nan at step 1" in seen["nan"]["error"]
    assert seen["nan"]["curves"]["loss"] == [[0.0], [1.0]]
    assert "'x' is inf" in seen["infinity"]["error"]
    assert "'x' must be a number, got 'many'" in seen["text"]["error"]
    assert "mapping" in seen["nothing"]["error"]
    assert "pip install 'assay[optim]'" in seen["peer"]["error"]
    assert [c["verdict"] for c in result["claims"]] == ["holds", "inconclusive"]
    assert {arm for arm, *_ in failed(result)} == set(seen) - {"peer", "works"}


def fails_to_prepare(config, log):
    raise OSError("no such file")


def test_prepare_that_fails_fails_its_trials_and_shows_why(records):
    result = run(job(replace(BROKEN, prepare=fails_to_prepare, arms={"works": works}), records))
    record = result["arms"]["works"]["replicates"]["1"]
    assert record["status"] == "failed"
    assert record["error"] == "prepare failed: OSError: no such file"
    assert "fails_to_prepare" in record["trace"]


class TunedConfig(Config):
    rate: float = 1.0


def tuned_trial(arm, shared, config, log):
    return {"loss": arm(config.rate)}


def diverges_above_one(rate):
    return 1 / rate if rate <= 1 else math.nan


def always_diverges(rate):
    return math.nan


def raises_always(rate):
    raise RuntimeError("never")


def test_a_grid_point_that_diverges_is_a_finding_and_a_whole_grid_a_failure(records):
    study = Study(
        trial=tuned_trial,
        arms={"some": diverges_above_one, "all": always_diverges, "error": raises_always},
        tune=Tune("rate", (0.1, 1.0, 10.0), select="loss"),
        scales={"smoke": TunedConfig(), "desk": TunedConfig(seeds=1)},
    )
    result = run(job(study, records))
    assert result["tune"]["scores"]["some"] == [10.0, 1.0, None]
    assert result["tune"]["best"] == {"some": 1.0, "all": None, "error": None}
    assert result["arms"]["some"]["replicates"]["0"]["metrics"] == {"loss": 1.0}
    assert "every rate of the grid" in result["arms"]["all"]["replicates"]["0"]["error"]
    assert result["arms"]["error"]["replicates"]["0"]["error"] == "RuntimeError: never"
    assert result["tune"]["at_edge"] == []


def test_the_edge_of_the_grid_is_noticed(records):
    study = Study(
        trial=tuned_trial,
        arms={"inverse": diverges_above_one},
        tune=Tune("rate", (0.1, 0.5, 1.0), select="loss"),
        scales={"smoke": TunedConfig(), "desk": TunedConfig(seeds=1)},
    )
    assert run(job(study, records))["tune"]["at_edge"] == ["inverse"]


def test_smoke_and_a_value_the_user_set_are_not_tuned(toy, records):
    assert run(job(toy, records, scale="smoke"))["tune"] is None
    result = run(job(toy, records, settings={"lr": 10.0}))
    assert result["tune"] is None
    assert result["config"]["lr"] == 10.0


def test_only_some_arms(toy, records):
    result = run(job(toy, records, only=("tenth",)))
    assert list(result["arms"]) == ["tenth"]
    assert set(result["tune"]["best"]) == {"half"}  # the arm it follows is tuned, not reported
    assert [c["verdict"] for c in result["claims"]] == [
        "inconclusive",
        "reported",
    ]  # both need arm one: the bound, and its gate
    assert "arm 'one' was not measured" in result["claims"][1]["reason"]
    with pytest.raises(UsageError, match=r"no arm is called 'tneth' \(did you mean 'tenth'\?\)"):
        job(toy, records, only=("tneth",))


def test_a_case_of_the_users_own(toy, records):
    module = sys.modules[toy.trial.__module__]

    def ones(config, log):
        return module.Case(torch.ones(config.n))

    result = run(job(toy, records, settings={"lr": 1.0}, case=ones, case_path="mine.py:ones"))
    assert result["arms"]["one"]["replicates"]["0"]["metrics"]["final_loss"] == pytest.approx(1.0, abs=0.02)
    assert result["case"] == "mine.py:ones"
    with pytest.raises(UsageError, match="without x"):
        run(job(toy, records, settings={"lr": 1.0}, case={"x": 1}, case_path="mine.py:x"))


def test_an_edited_case_is_not_answered_with_the_old_ones_numbers(toy, records, tmp_path):
    path = tmp_path / "mine.py"
    source = "import torch, sys\nCase = sys.modules['assay_user_toy'].Case\n"
    source += "x = Case({0} * torch.ones(16))\ny = Case({0} * 2 * torch.ones(16))\n"
    source += "def z(config, log):\n    return Case({0} * torch.ones(16))\n"
    seen = []
    for factor in (1.0, 3.0):
        path.write_text(source.format(factor))
        for name in ("x", "y", "z"):
            case = load_object(f"{path}:{name}", "--case")
            result = run(job(toy, records, settings={"lr": 1.0, "seeds": 1}, case=case, case_path=f"mine.py:{name}"))
            seen.append(round(result["arms"]["one"]["replicates"]["0"]["metrics"]["mean"]))
    assert seen == [1, 2, 1, 3, 6, 3]


def test_an_edit_within_the_second_and_of_the_same_length_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "mine.py"
    seen = []
    for number in (1, 3):
        path.write_text(f"x = {number}")
        os.utime(path, (1e9, 1e9))
        seen.append(load_object(f"{path}:x", "--case"))
    assert seen == [1, 3]


def test_an_edited_file_that_a_setting_names_is_read_again(toy, records, tmp_path):
    module = sys.modules[toy.trial.__module__]
    path = tmp_path / "x.txt"

    def from_file(config, log):
        return module.Case(torch.full((16,), float(Path(config.marks).read_text())))

    means = []
    for number in ("1.0", "3.0"):
        path.write_text(number)
        study = replace(toy, prepare=from_file, trial=mean_of)
        result = run(job(study, records, settings={"lr": 1.0, "seeds": 1, "marks": str(path)}))
        means.append(result["arms"]["one"]["replicates"]["0"]["metrics"]["mean"])
    assert means == [1.0, 3.0]


def mean_of(arm, shared, config, log):
    return {"mean": arm(shared.x).mean().item()}


def draws_a_figure(replicates):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots()
    axes.plot([r["works"].x for r in replicates])
    return figure


def cannot_draw(replicates):
    raise ValueError("no ink")


def test_a_figure_is_kept_and_one_that_fails_costs_nothing(records):
    study = replace(BROKEN, arms={"works": works}, figure=draws_a_figure)
    result = run(job(study, records))
    stored, figures = records.latest("toy")
    assert stored["figures"] == ["toy.svg"]
    assert figures["toy.svg"].startswith(b"<?xml")
    result = run(job(replace(study, figure=cannot_draw), records))
    assert "no ink" in result["notes"][0]
    assert result["claims"][0]["verdict"] == "holds"


PROGRAM = """
import sys
sys.path.insert(0, {here!r})
import support
from assay.bench.records import Records
from assay.bench.loading import load_object
from assay.bench.runner import run
toy = load_object(sys.argv[1] + ":study", "--case")
run(support.job(toy, Records(sys.argv[2]), settings={{"marks": sys.argv[3], "sleep": 0.25}}))
"""


def start(runs, marked):
    program = PROGRAM.format(here=str(Path(__file__).parents[1]))
    return subprocess.Popen(
        [sys.executable, "-c", program, str(TOY), str(runs), str(marked)], stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_a_killed_run_resumes_and_loses_only_the_trial_in_flight(toy, runs_folder, tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    marked = tmp_path / "marks"
    process = start(runs_folder, marked)
    deadline = time.monotonic() + 120
    while len(marks(marked, "trial")) < 8:  # in the middle of the reported trials, after the tuning
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()

    kept = len(Records(runs_folder).finished("toy"))
    started_before = marks(marked, "trial")
    assert 0 < kept < 12
    assert kept in (len(started_before) - 1, len(started_before))  # all that had ended, none that had not

    again = start(runs_folder, marked)
    assert again.wait(timeout=120) == 0, again.stderr.read()
    starts = marks(marked, "trial")
    assert len(set(starts)) == 12
    assert len(starts) <= 13  # at most the trial in flight ran twice
    assert len(Records(runs_folder).finished("toy")) == 12

    resumed = Records(runs_folder).latest("toy")[0]
    whole = run(job(toy, Records(tmp_path / "other"), settings={"marks": str(tmp_path / "more"), "sleep": 0.25}))
    assert numbers(resumed) == numbers(whole)


@pytest.mark.slow
def test_two_runs_into_one_new_store_both_finish(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    both = [start(tmp_path / "runs", tmp_path / f"marks{i}") for i in range(2)]
    for process in both:
        assert process.wait(timeout=240) == 0, process.stderr.read()
    assert len(Records(tmp_path / "runs").finished("toy")) == 24  # the folder of the marks is a setting: nothing is shared
