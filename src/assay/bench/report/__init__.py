"""What was found, for a reader: a static site, the same tables as Markdown, several studies side by side."""

from .compare import Comparison, comparison, comparison_tables
from .markdown import fill_readme, markdown_tables, results_markdown
from .pages import Page, collect
from .site import write_site

__all__ = [
    "Comparison",
    "Page",
    "collect",
    "comparison",
    "comparison_tables",
    "fill_readme",
    "markdown_tables",
    "results_markdown",
    "write_site",
]
