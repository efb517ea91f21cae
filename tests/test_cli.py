"""The command, run in this process on the bench's toy study, and as a program where that is what is tested."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from assay import catalog, cli

TOY = Path(__file__).parent / "bench" / "toy.py"
ABOUT = """
name = "Toy"
summary = "A toy"
paper = "Toys, 2025"
arxiv = "2501.00001"
problem = "toys"
use_when = "you test the bench"
"""
PAGE = "# Toy\n\n## What we measured\n<!-- measured:begin -->\n<!-- measured:end -->\n"


@pytest.fixture
def toys(tmp_path, monkeypatch, runs_folder):
    """A catalog of one method, and the folder of its records."""
    package = tmp_path / "toybox"
    method = package / "toy"
    method.mkdir(parents=True)
    (package / "__init__.py").touch()
    (method / "__init__.py").write_text('from .study import scale\n\n__all__ = ["scale"]\n')
    (method / "about.toml").write_text(ABOUT)
    (method / "README.md").write_text(PAGE)
    shutil.copy(TOY, method / "study.py")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASSAY_RUNS", str(runs_folder))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    entry = catalog._read(method / "about.toml", "toy", "toys-area", "toybox.toy")
    monkeypatch.setattr(catalog, "methods", lambda: {"toy": entry})
    yield method
    for name in [name for name in sys.modules if name.startswith("toybox")]:
        del sys.modules[name]


def assay(*arguments):
    return CliRunner().invoke(cli.app, list(arguments))


def test_run_shows_a_table_a_verdict_and_where_it_is_kept(toys):
    result = assay("run", "toy")
    assert result.exit_code == cli.HOLDS, result.output
    for text in ("final_loss", "half is at most half", "✓ holds", "· reported", "sqlite:///"):
        assert text in result.output


def test_exit_code_of_a_claim_that_fails(toys):
    study = toys / "study.py"
    study.write_text(study.read_text().replace("holds=at_most(0.5)", "holds=at_most(0.0)"))
    assert assay("run", "toy").exit_code == cli.CLAIM_FAILS


def test_exit_code_and_traceback_of_a_trial_that_fails(toys):
    (toys.parent.parent / "mine.py").write_text("def broken(x):\n    raise RuntimeError('my arm broke')\n")
    result = assay("run", "toy", "--arm", "mine=mine.py:broken", "--set", "lr=1")
    assert result.exit_code == cli.TRIAL_FAILED
    assert "my arm broke" in result.output
    assert "in broken" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "tyo"], "did you mean 'toy'?"),
        (["run", "toy", "--set", "nn=3"], "did you mean 'n'?"),
        (["run", "toy", "--set", "n"], "NAME=VALUE"),
        (["run", "toy", "--set", "n=many"], "integer"),
        (["run", "toy", "--only", "hlaf"], "did you mean 'half'?"),
        (["run", "toy", "--arm", "mine"], "NAME=module:attribute"),
        (["run", "toy", "--arm", "mine=math:pi"], "An arm is a callable"),
        (["run", "toy", "--case", "no.py:x"], "no file no.py"),
        (["run", "toy", "--case", "math:pi"], "``prepare`` returns a ``Case``"),
        (["run", "toy", "--device", "tpu9"], "--device tpu9"),
        (["run", "toy", "--save-reference", "--scale", "smoke"], "--save-reference keeps the desk run"),
        (["speed", "toy"], "no benchmarks/toy.py"),
        (["show", "toys-area-9"], "no method, area or problem"),
    ],
)
def test_usage_errors_are_one_line_and_code_2(toys, arguments, message):
    result = assay(*arguments)
    assert result.exit_code == cli.USAGE, result.output
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_dry_run_prints_the_plan_and_runs_nothing(toys, runs_folder):
    result = assay("run", "toy", "--scale", "paper", "--dry-run")
    assert result.exit_code == 0
    assert "21 trials, nothing is run" in result.output  # 2 tuned arms × 3 rates, 3 arms × 5 seeds
    assert "a billion numbers" in result.output
    assert "1000000000" in result.output
    plan = json.loads(assay("run", "toy", "--dry-run", "--json").output)
    assert (plan["trials"], plan["tuning_trials"], plan["replicates"]) == (6, 6, ["0", "1"])
    assert not (runs_folder / "prepared").exists()


@pytest.mark.parametrize("only", [("--only", "one,half"), ("--only", "one", "--only", "half")])
def test_only_takes_commas_and_repeats(toys, only):
    ran = json.loads(assay("run", "toy", "--scale", "smoke", "--set", "lr=1", *only, "--json").stdout)
    assert list(ran["arms"]) == ["one", "half"]


def test_json_of_every_reading_command(toys):
    ran = json.loads(assay("run", "toy", "--scale", "smoke", "--json").stdout)
    assert ran["claims"][0]["verdict"] == "holds"
    assert json.loads(assay("list", "--json").output)[0]["slug"] == "toy"
    assert json.loads(assay("show", "toy", "--json").output)["use_when"] == "you test the bench"
    assert json.loads(assay("compare", "toys", "--scale", "smoke", "--json").output)


def test_your_own_arm_and_case(toys):
    mine = "import torch\nfrom toybox.toy.study import Case\ndef double(x):\n    return 2 * x\n"
    mine += "def ones(config, log):\n    return Case(torch.ones(config.n))\n"
    (toys.parent.parent / "mine.py").write_text(mine)
    result = assay("run", "toy", "--arm", "double=mine.py:double", "--case", "mine.py:ones", "--set", "lr=1", "--json")
    ran = json.loads(result.stdout)
    assert ran["arms"]["double"]["replicates"]["0"]["metrics"]["final_loss"] == pytest.approx(4, rel=0.05)
    assert ran["extra_arms"] == {"double": "mine.py:double"}


def test_save_reference_writes_the_folder_and_the_page(toys):
    assert assay("run", "toy", "--save-reference").exit_code == 0
    stored = json.loads((toys / "result.json").read_text())
    assert stored["claims"][0]["verdict"] == "holds"
    assert "half is at most half as large" in (toys / "README.md").read_text()
    shown = assay("show", "toy").output
    assert "✓ holds" in shown
    assert "takes about" in shown


def test_show_and_list_before_any_run(toys):
    assert "not run yet: assay run toy" in assay("show", "toy").output
    assert "not run" in assay("list").output


def test_report_writes_a_site(toys, tmp_path):
    assert assay("run", "toy", "--scale", "smoke").exit_code == 0
    assert assay("report", "--out", str(tmp_path / "site")).exit_code == 0
    assert "half is at most half as large" in "".join(p.read_text() for p in (tmp_path / "site").rglob("*.html"))


def test_data_and_models_can_be_listed():
    names = {s["name"] for s in json.loads(assay("data", "list", "--json").output)}
    assert {"stdlib", "digits", "cifar10"} <= names
    assert "smollm2-135m" in {m["name"] for m in json.loads(assay("models", "list", "--json").output)}


def test_help_teaches_by_example_and_version_prints():
    program = [sys.executable, "-m", "assay.cli"]
    text = subprocess.run([*program, "run", "--help"], capture_output=True, text=True, check=True).stdout
    assert "assay run soap --arm muon=mypkg.optim:make_muon" in text
    assert subprocess.run([*program, "--version"], capture_output=True, text=True, check=True).stdout.startswith("0.")
