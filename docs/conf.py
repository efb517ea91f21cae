"""The site: guides in Markdown, a page for every method from its README, the API from the docstrings, the stored results."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

# autodoc imports with typing.TYPE_CHECKING on, which FastAPI (loaded by MLflow, which TRL loads) does not bear.
import mlflow  # noqa: F401
from generated import write_pages

import assay

project = "Assay"
author = "The Assay authors"
copyright = "The Assay authors"
version = release = assay.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "Assay"

myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_custom_sections = ["Shapes"]

write_pages(Path(__file__).parent)


def setup(app):
    app.connect("autodoc-skip-member", skip_generated)


def skip_generated(app, what, name, obj, skip, options):
    """Leaves out what scikit-learn adds to every estimator for metadata routing; its text points into scikit-learn's site."""
    return True if re.fullmatch(r"set_\w+_request", name) else None
