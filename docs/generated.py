"""Pages that are written when the site is built: a method's page and API from its folder, the table, the results."""

import re
from pathlib import Path

from assay import catalog
from assay.bench.report import collect, results_markdown

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")  # [text](path) and ![text](path), not addresses or anchors


def write_pages(docs: Path) -> None:
    """Writes ``methods/*.md`` and ``results.md``; leaves a file alone whose text is the same, so that builds stay quick."""
    own = [method for method in catalog.methods().values() if method.module.startswith("assay.")]
    pages = {docs / "methods" / f"{method.slug}.md": method_page(method) for method in own}
    pages[docs / "methods" / "index.md"] = _index(own)
    pages[docs / "results.md"] = results_markdown(collect(None, own))
    for old in (docs / "methods").glob("*.md"):
        if old not in pages:
            old.unlink()
    for path, text in pages.items():
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def method_page(method: catalog.Method) -> str:
    """A method's README as a page of the site, and below it the API of its public names."""
    readme = (method.folder / "README.md").read_text(encoding="utf-8").rstrip()
    page = _LINK.sub(lambda link: _for_the_site(link, method), readme)
    directive = f".. automodule:: {method.module}\n   :members:\n   :imported-members:\n"
    return f"{page}\n\n## API\n\n`{method.import_line}`\n\n```{{eval-rst}}\n{directive}```\n"


def _for_the_site(link: re.Match[str], method: catalog.Method) -> str:
    picture, text, target = link.groups()
    if picture:  # stays where the run wrote it
        return f"![{text}](../../src/assay/{method.area}/{method.slug}/{target})"
    path = (method.folder / target).resolve()
    others = {other.folder / "README.md": other.slug for other in catalog.methods().values()}
    if path in others:
        return f"[{text}]({others[path]}.md)"
    return text if text.startswith("`") else f"`{text}`"  # a file of the source tree, which the site does not hold


def _index(methods: list[catalog.Method]) -> str:
    names = "\n".join(method.slug for method in methods)
    table = catalog.table(markdown_link="{slug}.md")
    return f"# Methods\n\n{table}\n\n```{{toctree}}\n:hidden:\n\n{names}\n```\n"
