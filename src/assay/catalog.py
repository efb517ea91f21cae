"""The table of contents: every method by its ``about.toml``. Imports no method and nothing heavy.

Methods are found in this package and through the entry-point group ``assay.studies``, whose values name a method's
package (``lion = "mypackage.lion"``).
"""

import importlib.util
import json
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

PLUGINS = "assay.studies"
BEGIN, END = "<!-- methods:begin -->", "<!-- methods:end -->"


class CatalogError(ValueError):
    """An ``about.toml`` that does not say what it has to."""


@dataclass(frozen=True)
class Method:
    """What ``about.toml`` says of a method.

    Attributes:
        slug: Its folder, its name in the command, its page.
        area: What it is for; a plugin's distribution name for methods from other packages.
        module: The package that holds it, as Python imports it.
        folder: Where it is on disk.
        name: Its name in print.
        summary: One line.
        paper: Title, venue.
        arxiv: arXiv number, or empty.
        extra: The extra of this package that it needs, or empty.
        problem: The question it answers; ``assay compare`` sets methods with the same one side by side.
        use_when: When to use it, one line.
        avoid_when: When not to, one line.
        cost: What it costs, one line.
    """

    slug: str
    area: str
    module: str
    folder: Path
    name: str
    summary: str
    paper: str
    arxiv: str = ""
    extra: str = ""
    problem: str = ""
    use_when: str = ""
    avoid_when: str = ""
    cost: str = ""

    @cached_property
    def public_names(self) -> list[str]:
        from assay._lazy import public_names

        return public_names(self.folder / "__init__.py")

    @cached_property
    def reference(self) -> dict[str, Any] | None:
        """The reference desk run, if there is one."""
        try:
            return json.loads((self.folder / "result.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None

    @property
    def import_line(self) -> str:
        """What the page's own example imports first; without one, up to three public names."""
        home = self.module.rpartition(".")[0] if self.module.startswith("assay.") else self.module
        page = self.folder / "README.md"
        for line in page.read_text(encoding="utf-8").splitlines() if page.is_file() else ():
            if line.startswith(f"from {home} import ") and "(" not in line:
                return line
        return f"from {home} import {', '.join(self.public_names[:3])}" if self.public_names else f"import {self.module}"


@lru_cache(maxsize=1)
def methods() -> dict[str, Method]:
    """Slug to method, ordered by area and name.

    Raises:
        CatalogError: an ``about.toml`` is malformed, or two methods have the same slug.
    """
    package = Path(__file__).parent
    found = [
        _read(about, about.parent.name, about.parent.parent.name, f"assay.{about.parent.parent.name}.{about.parent.name}")
        for about in sorted(package.glob("*/*/about.toml"))
    ]
    for slug, module, distribution in _plugins():
        folder = _package_folder(module)
        if folder is None or not (folder / "about.toml").exists():
            print(f"assay: plugin {slug!r} names {module!r}, which holds no about.toml; left out", file=sys.stderr)
            continue
        found.append(_read(folder / "about.toml", slug, distribution, module))
    by_slug: dict[str, Method] = {}
    for method in sorted(found, key=lambda m: (not m.module.startswith("assay."), m.area, m.slug)):
        if method.slug in by_slug:
            raise CatalogError(f"two methods are called {method.slug!r}: {by_slug[method.slug].folder} and {method.folder}")
        by_slug[method.slug] = method
    return by_slug


def _plugins() -> Iterator[tuple[str, str, str]]:
    """Slug, package and distribution of every method that other installed packages add.

    The entry-point files are searched for the group's name first: ``importlib.metadata`` would be imported and would parse
    every installed distribution, which with two hundred of them takes a third of the time of ``assay list``.
    """
    files = [file for place in dict.fromkeys(sys.path) for file in Path(place).glob("*.*-info/entry_points.txt")]
    homes = [file.parent for file in files if PLUGINS in file.read_text(encoding="utf-8", errors="replace")]
    if not homes:
        return
    from importlib.metadata import PathDistribution

    seen = set()
    for distribution in map(PathDistribution, homes):
        name = distribution.metadata["Name"]
        if name not in seen:  # an earlier place on the path hides a later one
            seen.add(name)
            yield from ((point.name, point.value, name) for point in distribution.entry_points.select(group=PLUGINS))


def _read(about: Path, slug: str, area: str, module: str) -> Method:
    try:
        values = tomllib.loads(about.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise CatalogError(f"{about}: {error}") from None
    fields = set(Method.__dataclass_fields__) - {"slug", "area", "module", "folder"}
    unknown = set(values) - fields
    missing = {"name", "summary", "paper"} - set(values)
    if unknown or missing or not all(isinstance(value, str) for value in values.values()):
        raise CatalogError(
            f"{about}: "
            + ("unknown " if unknown else "missing " if missing else "not text: ")
            + ", ".join(sorted(unknown or missing or {k for k, v in values.items() if not isinstance(v, str)}))
        )
    return Method(slug=slug, area=area, module=module, folder=about.parent, **values)


def _package_folder(module: str) -> Path | None:
    """Where a package lies, found without running it."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)), *rest)


def select(names: list[str]) -> list[Method]:
    """Methods by slug, area or problem, each once, in the order asked for.

    Raises:
        KeyError: a name that is none of these; the message has the nearest right one.
    """
    import difflib

    known = methods()
    chosen: dict[str, Method] = {}
    for name in names:
        plain = name.replace("-", "_")
        matches = [m for m in known.values() if plain in (m.slug, m.area, m.problem) or name == m.area]
        if not matches:
            words = sorted({word for m in known.values() for word in (m.slug, m.area, m.problem) if word})
            close = difflib.get_close_matches(plain, words, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise KeyError(f"no method, area or problem is called {name!r}; {hint}`assay list` shows them all")
        chosen.update({m.slug: m for m in matches})
    return list(chosen.values())


def table(markdown_link: str = "src/assay/{area}/{slug}/README.md") -> str:
    """The methods as a Markdown table, for the README."""
    rows = ["| area | method | what it is for | paper | desk verdict |", "|---|---|---|---|---|"]
    for m in methods().values():
        if m.module.startswith("assay."):
            link = markdown_link.format(area=m.area, slug=m.slug)
            paper = f"[{m.paper}](https://arxiv.org/abs/{m.arxiv})" if m.arxiv else m.paper
            rows.append(f"| {m.area} | [{m.name}]({link}) | {m.summary} | {paper} | {verdict_line(m.reference)} |")
    return "\n".join(rows)


def with_table(page: str) -> str:
    """A README with the table of methods, as it is now, between its two marker lines.

    Raises:
        CatalogError: it has not each marker once, the beginning before the end.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise CatalogError(f"the page needs the line {BEGIN} once and, after it, the line {END} once")
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


def verdict_line(result: dict[str, Any] | None) -> str:
    """``3 hold, 1 mixed``: the verdicts of a result in words."""
    if not result:
        return "not run"
    words = {"holds": "hold", "mixed": "mixed", "fails": "fail", "inconclusive": "inconclusive"}
    counts = {word: sum(c["verdict"] == verdict for c in result["claims"]) for verdict, word in words.items()}
    line = ", ".join(f"{count} {word if count != 1 or word != 'hold' else 'holds'}" for word, count in counts.items() if count)
    return line or "reported"


def main(arguments: list[str] | None = None) -> int:
    """``python -m assay.catalog --check README.md``: whether its table is the one of today; ``--write`` makes it so."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m assay.catalog", description=main.__doc__)
    parser.add_argument("readme", type=Path)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--check", action="store_true", help="exit with 1 if the table is not the one of today")
    choice.add_argument("--write", action="store_true", help="put the table of today in")
    asked = parser.parse_args(arguments)
    page = asked.readme.read_text(encoding="utf-8")
    wanted = with_table(page)
    if asked.write:
        asked.readme.write_text(wanted, encoding="utf-8")
    elif page != wanted:
        print(
            f"{asked.readme}: the table of methods is out of date: python -m assay.catalog --write {asked.readme}",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
