"""The skeleton of a new method: a small working example in every file that a method has, for its author to replace."""

import keyword
import re
import tomllib
from pathlib import Path

import assay
from assay import catalog
from assay.bench.config import UsageError, nearest

_TEMPLATES = Path(__file__).parent / "templates"


def write_skeleton(path: str, root: Path) -> list[Path]:
    """Writes the files of a new method into a checkout.

    Args:
        path: ``area/slug``: one of the areas, and a name in small letters, digits and underscores that no method has yet.
        root: The checkout, or a folder inside it.

    Returns:
        The files written, relative to the checkout.

    Raises:
        UsageError: an unknown area, a name that cannot be used or is taken, or a folder that is no checkout. Nothing is
            written then.
    """
    area, _, slug = path.strip("/").partition("/")
    _check_names(path, area, slug)
    checkout = find_checkout(root)
    home = Path("src/assay", area, slug)
    files = {
        home / "__init__.py": "init.py",
        home / f"{slug}.py": "method.py",
        home / "study.py": "study.py",
        home / "README.md": "README.md",
        home / "about.toml": "about.toml",
        Path("tests", area, f"test_{slug}.py"): "test.py",
        Path("benchmarks", f"{slug}.py"): "benchmark.py",
    }
    taken = [str(file) for file in files if (checkout / file).exists()]
    if (checkout / home).exists() or taken:
        raise UsageError(f"{taken[0] if taken else home} is already there; choose another name, or remove it first")
    for file, template in files.items():
        (checkout / file).parent.mkdir(parents=True, exist_ok=True)
        (checkout / file).write_text(_filled(template, area, slug), encoding="utf-8")
    return list(files)


def find_checkout(start: Path) -> Path:
    """The checkout of this project that holds a folder.

    Raises:
        UsageError: there is none.
    """
    for folder in [start.resolve(), *start.resolve().parents]:
        if (folder / "src" / "assay").is_dir() and _project_name(folder / "pyproject.toml") == "assay":
            return folder
    raise UsageError(
        f"{start} is not inside a checkout of assay: a new method goes into the source tree. Clone the repository, "
        "`pip install -e '.[dev]'` there, and run this in it. To add a study from a package of your own, use the entry point "
        f"{catalog.PLUGINS!r}."
    )


def _project_name(file: Path) -> str:
    return tomllib.loads(file.read_text(encoding="utf-8")).get("project", {}).get("name", "") if file.exists() else ""


def _check_names(path: str, area: str, slug: str) -> None:
    areas = [name for name in assay.__all__ if name != "__version__"]
    if not slug or "/" in slug:
        raise UsageError(f"assay new takes AREA/SLUG, as in optim/lion, got {path!r}")
    if area not in areas:
        raise UsageError(f"no area is called {area!r}{nearest(area, areas)}; areas: {', '.join(areas)}")
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", slug) or keyword.iskeyword(slug):
        raise UsageError(f"a method is called by small letters, digits and underscores, as in dual_averaging; got {slug!r}")
    for method in catalog.methods().values():
        if slug in (method.slug, method.problem):
            what = "a method" if slug == method.slug else "a problem"
            raise UsageError(f"{slug!r} is already the name of {what} ({method.area}/{method.slug}); choose another")
    if slug in areas:
        raise UsageError(f"{slug!r} is the name of an area; choose another")


def _filled(template: str, area: str, slug: str) -> str:
    words = {
        "area": area,
        "slug": slug,
        "Name": slug.replace("_", " ").capitalize(),
        "Camel": "".join(part.capitalize() for part in slug.split("_")),
        "imports": "\n".join(sorted(["from assay.bench.speed import Contest", f"from assay.{area} import {slug}_mean"])),
    }
    text = (_TEMPLATES / f"{template}.tmpl").read_text(encoding="utf-8")
    for word, value in words.items():
        text = text.replace("{{" + word + "}}", value)
    return text
