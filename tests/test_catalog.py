"""The table of contents: quick, complete, and able to say what is wrong with it."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import assay
from assay import catalog
from assay._lazy import attach_area, public_names

ROOT = Path(__file__).parents[1]
AREAS = [name for name in assay.__all__ if name != "__version__"]
OWN = [method for method in catalog.methods().values() if method.module.startswith("assay.")]
LIST = [sys.executable, "-m", "assay.cli", "list"]


@pytest.fixture
def fresh():
    """The catalog is read again, in the test and after it."""
    catalog.methods.cache_clear()
    yield
    catalog.methods.cache_clear()


def processor_seconds(command):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_list_answers_in_under_three_tenths_of_a_second():
    # Processor time, and the least of several runs: other tests share the machine, and what they take is not its own.
    assert min(processor_seconds(LIST) for _ in range(9)) < 0.3


def test_list_imports_nothing_heavy():
    code = "import sys; from assay import cli; sys.argv = ['assay', 'list']\ntry: cli.main()\nexcept SystemExit: pass\n"
    code += "print('loaded:', *{name.partition('.')[0] for name in sys.modules})"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    listed, _, loaded = ran.stdout.partition("loaded:")
    assert "SOAP" in listed or "soap" in listed
    assert not {"torch", "mlflow", "numpy", "scipy", "sklearn", "pydantic", "matplotlib", "transformers"} & set(loaded.split())


def test_import_assay_is_lazy_and_names_come_from_their_area():
    code = "import sys, assay, assay.optim; print('torch' in sys.modules, 'SOAP' in dir(assay.optim))\n"
    code += "from assay.optim import SOAP; print(SOAP.__module__)"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed.split() == ["False", "True", "assay.optim.soap.soap"]


@pytest.mark.parametrize("method", OWN, ids=lambda method: method.slug)
def test_every_method_says_what_it_has_to(method):
    assert method.area in AREAS
    assert method.public_names
    for field in ("name", "summary", "paper", "problem", "use_when", "avoid_when", "cost"):
        assert getattr(method, field).strip(), f"about.toml of {method.slug} has no {field}"
    area = getattr(assay, method.area)
    assert set(method.public_names) <= set(dir(area))
    page = (method.folder / "README.md").read_text(encoding="utf-8")
    assert page.count("<!-- measured:begin -->") == page.count("<!-- measured:end -->") == 1
    assert (ROOT / "benchmarks" / f"{method.slug}.py").exists()


def test_the_readmes_table_is_the_one_of_today():
    assert catalog.main([str(ROOT / "README.md"), "--check"]) == 0


def test_a_table_out_of_date_is_told_and_mended(tmp_path, capsys):
    page = tmp_path / "README.md"
    page.write_text(f"before\n{catalog.BEGIN}\nold\n{catalog.END}\nafter\n")
    assert catalog.main([str(page), "--check"]) == 1
    assert "--write" in capsys.readouterr().err
    assert catalog.main([str(page), "--write"]) == 0
    assert catalog.main([str(page), "--check"]) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{catalog.END}\nafter\n")
    assert "| optim | [SOAP](src/assay/optim/soap/README.md)" in text
    page.write_text("no markers")
    with pytest.raises(catalog.CatalogError, match="methods:begin"):
        catalog.main([str(page), "--check"])


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ("name = ", "about.toml"),
        ('name = "x"\nsummary = "y"', "missing paper"),
        ('name = "x"\nsummary = "y"\npaper = "z"\nauthor = "me"', "unknown author"),
        ('name = "x"\nsummary = "y"\npaper = 3', "not text: paper"),
    ],
)
def test_a_wrong_about_toml_is_named(tmp_path, about, message):
    (tmp_path / "about.toml").write_text(about)
    with pytest.raises(catalog.CatalogError, match=message):
        catalog._read(tmp_path / "about.toml", "x", "optim", "assay.optim.x")


def install(site: Path, name: str, points: str, package: str = "", about: str = "") -> None:
    """What pip leaves of a package: its metadata, and a method's folder."""
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)
    if package:
        folder = site.joinpath(*package.split("."))
        folder.mkdir(parents=True)
        (site / package.partition(".")[0] / "__init__.py").touch()
        (folder / "__init__.py").write_text("raise RuntimeError('imported')")
        (folder / "about.toml").write_text(about)


def test_plugins_are_found_without_being_imported(tmp_path, monkeypatch, fresh, capsys):
    about = 'name = "Tiger"\nsummary = "Stripes"\npaper = "None, 2025"\n'
    near, far = tmp_path / "near", tmp_path / "far"
    install(near, "big-cats", "[assay.studies]\ntiger = big_cats.tiger\n", "big_cats.tiger", about)
    install(far, "big-cats", "[assay.studies]\nold_tiger = big_cats.tiger\n")  # hidden by the nearer one
    install(near, "broken", "[assay.studies]\ngone = not_there.gone\n")
    install(near, "other", "[console_scripts]\nother = other:main\n")
    monkeypatch.syspath_prepend(far)
    monkeypatch.syspath_prepend(near)
    found = catalog.methods()
    assert (found["tiger"].area, found["tiger"].name) == ("big-cats", "Tiger")
    assert found["tiger"].import_line == "import big_cats.tiger"
    assert list(found)[-1] == "tiger"  # after our own
    assert "gone" not in found
    assert "old_tiger" not in found
    assert "'gone' names 'not_there.gone', which holds no about.toml" in capsys.readouterr().err
    assert [m.slug for m in catalog.select(["big-cats"])] == ["tiger"]
    assert "Tiger" not in catalog.table()


def test_two_methods_of_one_name_are_refused(tmp_path, monkeypatch, fresh):
    about = 'name = "Soap"\nsummary = "Another"\npaper = "None, 2025"\n'
    install(tmp_path, "soaps", "[assay.studies]\nsoap = soaps.soap\n", "soaps.soap", about)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(catalog.CatalogError, match="two methods are called 'soap'"):
        catalog.methods()


def test_select_by_slug_area_and_problem():
    chosen = [m.slug for m in catalog.select(["soap", "optim"])]
    assert chosen[0] == "soap"
    assert len(set(chosen)) == len(chosen)
    assert "soap" in [m.slug for m in catalog.select(["training"])]
    assert catalog.select(["rotated-runtime-smooth"])[0].slug == "rotated_runtime_smooth"
    with pytest.raises(KeyError, match="did you mean 'soap'"):
        catalog.select(["saop"])


def test_verdicts_in_words():
    def result(*verdicts):
        return {"claims": [{"verdict": verdict} for verdict in verdicts]}

    assert catalog.verdict_line(None) == "not run"
    assert catalog.verdict_line(result("reported")) == "reported"
    assert catalog.verdict_line(result("holds", "fails", "mixed", "holds")) == "2 hold, 1 mixed, 1 fail"
    assert catalog.verdict_line(result("holds")) == "1 holds"


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    area = tmp_path / "box"
    (area / "cat").mkdir(parents=True)
    (area / "cat" / "about.toml").write_text('extra = "explain"')
    (area / "cat" / "__init__.py").write_text('import not_installed_anywhere\n\n__all__ = ["Cat"]\n')
    (area / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    import box

    getter, names, offered = attach_area("box")
    assert names() == ["Cat", "cat"]
    assert offered == ["Cat"]
    with pytest.raises(ImportError, match=r"needs the package 'not_installed_anywhere': pip install 'assay\[explain\]'"):
        getter("Cat")
    with pytest.raises(AttributeError, match="has no attribute 'Dog'; it has Cat, cat"):
        getter("Dog")
    assert public_names(Path(box.__file__)) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion_is_offered(shell):
    env = {**os.environ, "SHELL": f"/bin/{shell}", "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    program = Path(sys.executable).parent / "assay"
    ran = subprocess.run([program, "--show-completion", shell], env=env, capture_output=True, text=True, check=True)
    assert "assay" in ran.stdout
    assert "complete" in ran.stdout.lower()


def test_completion_knows_the_methods():
    program = Path(sys.executable).parent / "assay"
    env = {**os.environ, "_ASSAY_COMPLETE": "complete_bash", "COMP_WORDS": "assay run so", "COMP_CWORD": "2"}
    ran = subprocess.run([program], env=env, capture_output=True, text=True)
    assert "soap" in ran.stdout.split()


def test_a_methods_import_is_that_of_its_pages_example():
    for method in catalog.methods().values():
        names = set(method.import_line.partition(" import ")[2].split(", "))
        assert names <= set(method.public_names), method.slug
    assert catalog.methods()["power"].import_line == "from assay.alignment import POWERConfig, POWERTrainer"
    assert catalog.methods()["soap"].import_line == "from assay.optim import SOAP"
