"""Imports point one way: what import-linter checks, proved to bite, and the rules that it cannot express."""

import ast
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import assay

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "assay"
AREAS = [name for name in assay.__all__ if name != "__version__"]
HOUSE = {"bench", "catalog", "cli", "data", "models", "skeleton", "_lazy"}
A_STUDY_MAY = {"bench", "data", "models"}


def imported(file: Path, source: Path) -> set[str]:
    """The modules of ours that a file imports anywhere in it, as dotted paths below ``assay``."""
    package = list(file.relative_to(source).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            up = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join((["assay", *up] if node.level else []) + ([node.module] if node.module else []))
            # `from assay.data import x`: x may be a module or a name; the longer path says more and breaks no rule
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return {name.removeprefix("assay.") for name in found if name.startswith("assay.")}


def violations(source: Path) -> list[str]:
    """Where a method's folder imports what it must not, in words."""
    broken = []
    for about in sorted(source.glob("*/*/about.toml")):
        area, slug = about.parent.parts[-2:]
        problems = {path.stem for path in about.parent.parent.glob("*.py")} - {"__init__"}
        for file in sorted(about.parent.rglob("*.py")):
            for name in imported(file, source):
                parts = name.split(".")
                own = parts[:2] == [area, slug]
                of_its_study = file.name == "study.py" and (
                    parts[0] in A_STUDY_MAY or (parts[0] == area and len(parts) > 1 and parts[1] in problems)
                )
                lifts_the_study = own and parts[2:3] == ["study"] and file.name != "study.py"
                if lifts_the_study or not (own or of_its_study):
                    broken.append(f"{file.relative_to(source)} imports assay.{name}")
    return broken


def test_methods_import_nothing_of_ours():
    assert violations(SOURCE) == []


def lint(checkout: Path) -> subprocess.CompletedProcess[str]:
    """import-linter on a checkout's source, whichever assay is installed."""
    code = "import sys; sys.path.insert(0, 'src'); from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run([sys.executable, "-c", code, "--no-cache"], cwd=checkout, capture_output=True, text=True)


@pytest.fixture
def checkout(tmp_path):
    """The source with a method ``tiny`` in optim, a problem ``depth`` beside it, and their studies' usual imports."""
    shutil.copytree(SOURCE, tmp_path / "src" / "assay", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    area = tmp_path / "src" / "assay" / "optim"
    (area / "tiny").mkdir()
    (area / "depth.py").write_text("from assay.bench import Config\nfrom assay.data import load_text\n")
    (area / "tiny" / "about.toml").write_text("")
    (area / "tiny" / "__init__.py").write_text("from .core import x\n")
    (area / "tiny" / "core.py").write_text("x = 1\n")
    (area / "tiny" / "study.py").write_text(
        "from assay.bench import Study\nfrom assay.optim import depth\nfrom .core import x\n"
    )
    return tmp_path


def test_a_method_that_keeps_the_rules_passes(checkout):
    assert violations(checkout / "src" / "assay") == []
    ran = lint(checkout)
    assert ran.returncode == 0, ran.stdout + ran.stderr


# Each line breaks one rule; whether import-linter sees it, or this module's own check alone.
BROKEN = [
    ("optim/tiny/core.py", "from assay.bench import Config", True),
    ("optim/tiny/core.py", "import assay.data.text", True),
    ("optim/tiny/core.py", "def f():\n    from assay.models import locate", True),
    ("optim/tiny/core.py", "from assay.optim.soap import SOAP", True),
    ("optim/tiny/core.py", "from .. import depth", True),
    ("optim/tiny/core.py", "from assay.explain.timeinf import detector", True),
    ("optim/tiny/core.py", "from .study import x", False),
    ("optim/tiny/__init__.py", "from assay.data import load_text", False),
    ("optim/tiny/study.py", "from assay.explain import timeinf", False),
    ("optim/tiny/study.py", "from assay.optim.soap import SOAP", False),
]


@pytest.mark.parametrize(("file", "line", "linter"), BROKEN)
def test_a_violation_in_a_method_is_caught(checkout, file, line, linter):
    path = checkout / "src" / "assay" / file
    path.write_text(path.read_text() + line + "\n")
    assert len(violations(checkout / "src" / "assay")) == 1
    if linter:
        ran = lint(checkout)
        assert ran.returncode == 1, ran.stdout + ran.stderr
        assert "0 broken" not in ran.stdout


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("bench/claims.py", "from assay.optim.tiny import x"),
        ("data/text.py", "from assay.bench import Config"),
        ("catalog.py", "from assay.bench import Config"),
        ("bench/study.py", "from assay import cli"),
        ("optim/depth.py", "from .tiny import core"),
    ],
)
def test_a_violation_in_the_house_is_caught(checkout, file, line):
    path = checkout / "src" / "assay" / file
    path.write_text(path.read_text() + "\n" + line + "\n")
    ran = lint(checkout)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "0 broken" not in ran.stdout


def test_the_contracts_name_every_area():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    listed = [
        {module.split(".")[1] for module in modules} - HOUSE
        for contract in contracts
        for key in ("source_modules", "forbidden_modules", "modules")
        if (modules := contract.get(key))
    ]
    assert [areas for areas in listed if areas] == [set(AREAS)] * 3
    assert {path.parent.name for path in SOURCE.glob("*/__init__.py")} - HOUSE == set(AREAS)


def test_a_method_offers_its_names_and_nothing_else():
    for about in SOURCE.glob("*/*/about.toml"):
        body = ast.parse((about.parent / "__init__.py").read_text(encoding="utf-8")).body
        assert all(isinstance(node, (ast.Expr, ast.ImportFrom, ast.Assign)) for node in body), about.parent
        names = {alias.asname or alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}
        offered = next(ast.literal_eval(node.value) for node in body if isinstance(node, ast.Assign))
        assert set(offered) == names, about.parent
