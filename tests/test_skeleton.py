"""`assay new`, and the page that walks from it to a finished method, done to the letter in a copy of the source tree."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from assay.bench.config import UsageError
from assay.skeleton import write_skeleton
from walkthrough import follow

ROOT = Path(__file__).parents[1]
KEPT = ("pyproject.toml", "README.md", "CONTRIBUTING.md", "LICENSE", "src", "benchmarks")


@pytest.fixture
def checkout(tmp_path) -> Path:
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in KEPT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy)
    shutil.copytree(ROOT / "tests" / "optim", copy / "tests" / "optim", ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_contributing_to_the_letter(checkout):
    ran = {
        r.command: " ".join(r.output.split()) for r in follow(checkout / "CONTRIBUTING.md", checkout, source=checkout / "src")
    }
    assert "✓" in ran["assay run lion --scale smoke"]
    assert "passed" in ran["pytest tests/optim/test_lion.py src/assay/optim/lion"]
    assert "no issues found" in ran["mypy src/assay/optim/lion"]
    assert "left unchanged" in ran["ruff format src/assay/optim/lion tests/optim benchmarks/lion.py"]
    assert "0 broken" in ran["lint-imports"]
    assert "torch mean and var_mean" in ran["assay speed lion"]

    method = checkout / "src" / "assay" / "optim" / "lion"
    result = json.loads((method / "result.json").read_text(encoding="utf-8"))
    assert result["scale"] == "desk"
    assert len(result["replicates"]) == 20
    assert "its error is below the plain mean" in (method / "README.md").read_text(encoding="utf-8").replace("\\", "")
    assert "[Lion](src/assay/optim/lion/README.md)" in (checkout / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", ["alignment/a", "generation/dual_averaging_with_a_long_name", "optim/x2"])
def test_any_name_gives_files_that_ruff_accepts(checkout, path):
    written = write_skeleton(path, checkout / "src")  # from inside the checkout
    area, slug = path.split("/")
    assert [str(file) for file in written] == [
        f"src/assay/{area}/{slug}/__init__.py",
        f"src/assay/{area}/{slug}/{slug}.py",
        f"src/assay/{area}/{slug}/study.py",
        f"src/assay/{area}/{slug}/README.md",
        f"src/assay/{area}/{slug}/about.toml",
        f"tests/{area}/test_{slug}.py",
        f"benchmarks/{slug}.py",
    ]
    files = [checkout / file for file in written]
    assert not [file for file in files if "{{" in file.read_text(encoding="utf-8")]
    for command in (["check", "-q"], ["format", "--check", "-q"]):
        ran = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--config", checkout / "pyproject.toml", *files],
            capture_output=True, text=True, cwd=checkout,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("lion", "AREA/SLUG, as in optim/lion, got 'lion'"),
        ("optim/", "AREA/SLUG"),
        ("optim/a/b", "AREA/SLUG"),
        ("optmi/lion", r"no area is called 'optmi' \(did you mean 'optim'\?\); areas: alignment, "),
        ("../lion", "no area is called '..'"),
        ("bench/lion", "no area is called 'bench'"),
        ("optim/Lion", "small letters, digits and underscores"),
        ("optim/li-on", "small letters"),
        ("optim/2lion", "small letters"),
        ("optim/..", "small letters"),
        ("optim/lambda", "small letters"),
        ("explain/soap", r"'soap' is already the name of a method \(optim/soap\)"),
        ("explain/training", "already the name of a problem"),
        ("explain/optim", "is the name of an area"),
    ],
)
def test_a_name_that_cannot_be_is_refused(checkout, path, message):
    before = sorted(checkout.rglob("*"))
    with pytest.raises(UsageError, match=message):
        write_skeleton(path, checkout)
    assert sorted(checkout.rglob("*")) == before


def test_nothing_is_overwritten(checkout):
    (checkout / "benchmarks" / "lion.py").write_text("mine")
    with pytest.raises(UsageError, match=r"benchmarks/lion.py is already there"):
        write_skeleton("optim/lion", checkout)
    (checkout / "benchmarks" / "lion.py").unlink()
    (checkout / "src" / "assay" / "optim" / "lion").mkdir()
    with pytest.raises(UsageError, match=r"src/assay/optim/lion is already there"):
        write_skeleton("optim/lion", checkout)


def test_outside_a_checkout_it_says_where_to_go(tmp_path):
    with pytest.raises(UsageError, match=r"not inside a checkout of assay.*entry point 'assay.studies'"):
        write_skeleton("optim/lion", tmp_path)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\n')
    (tmp_path / "src" / "assay").mkdir(parents=True)
    with pytest.raises(UsageError, match="not inside a checkout"):
        write_skeleton("optim/lion", tmp_path)
