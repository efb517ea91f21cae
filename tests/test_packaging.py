"""The wheel, installed without extras in a new environment, and a plug-in beside it: what a stranger gets from pip."""

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from assay import catalog

ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "tests" / "plugin"
EXTERNAL = ("PYTHONPATH", "ASSAY_RUNS", "MLFLOW_TRACKING_URI", "VIRTUAL_ENV")

# One worker builds and fills the environment, whatever else runs; filling it takes a minute or two.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("packaging"), pytest.mark.timeout(1800)]


def call(*command, cwd=None, codes=(0,)) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in EXTERNAL} | {"COLUMNS": "200"}
    ran = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert ran.returncode in codes, f"{command} exited with {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    return ran


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory) -> Path:
    """The programs of an environment that holds the wheel and what it requires, no extra."""
    home = tmp_path_factory.mktemp("bare")
    venv.create(home, with_pip=True, symlinks=True)
    programs = home / "bin"
    call(programs / "python", "-m", "pip", "install", "-q", "--no-compile", "-c", ROOT / "constraints.txt", wheel)
    return programs


@pytest.fixture(scope="session")
def desk(tmp_path_factory) -> Path:
    """An empty folder to work in, with the records of the runs in it."""
    return tmp_path_factory.mktemp("desk")


def test_the_wheel_holds_what_the_source_holds(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    skip = {"__pycache__"}
    source = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "assay").rglob("*")
        if path.is_file() and not skip & set(path.parts)
    }
    assert source <= held
    assert "assay/py.typed" in held
    assert {name.partition("/")[0] for name in held} == {"assay", f"assay-{_version()}.dist-info"}


def test_without_extras_the_list_and_a_study_work(installed, desk):
    call(installed / "python", "-m", "pip", "check")
    listed = json.loads(call(installed / "assay", "list", "--json", cwd=desk).stdout)
    assert [m["slug"] for m in listed] == list(catalog.methods())
    ran = call(installed / "assay", "run", "soap", "--scale", "smoke", cwd=desk, codes=(0, 3))
    assert "claims" in ran.stdout
    assert re.search(r"skipped: needs the package '\w+': pip install 'assay\[optim\]'", ran.stdout)


def test_a_missing_extra_is_named_in_one_line(installed, desk):
    ran = call(installed / "assay", "run", "rotated_runtime_smooth", "--scale", "smoke", cwd=desk, codes=(2,))
    assert "pip install 'assay[compression]'" in ran.stderr
    assert "Traceback" not in ran.stderr
    speed = call(installed / "assay", "speed", "soap", cwd=desk, codes=(2,))
    assert "run this from a checkout" in " ".join(speed.stderr.split())


def test_a_plugin_is_listed_run_and_reported(installed, desk):
    call(installed / "python", "-m", "pip", "install", "-q", "--no-deps", PLUGIN)
    listed = call(installed / "assay", "list", cwd=desk).stdout
    assert re.search(r"assay-hello\s+hello\s+Train against labels", listed)
    assert "from assay_hello.hello import smoothed_cross_entropy" in call(installed / "assay", "show", "hello").stdout

    arm = "focal=assay_hello.arms:focal_loss"
    ran = call(installed / "assay", "run", "hello", "--scale", "smoke", "--arm", arm, "--json", cwd=desk, codes=(0, 3))
    result = json.loads(ran.stdout)
    assert list(result["arms"]) == ["plain", "smoothed", "focal"]
    assert all(r["status"] == "finished" for body in result["arms"].values() for r in body["replicates"].values())
    assert {c["verdict"] for c in result["claims"]} <= {"holds", "mixed", "fails"}

    call(installed / "assay", "report", "--out", "site", cwd=desk)
    pages = "".join(path.read_text(encoding="utf-8") for path in (desk / "site").rglob("*.html"))
    for text in ("Label smoothing", "confidence ends closer to accuracy", "assay_hello.arms:focal_loss"):
        assert text in pages


def _version() -> str:
    import assay

    return assay.__version__
