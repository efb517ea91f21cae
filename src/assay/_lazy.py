"""How an area offers its methods' names without importing them: the names come from the source, the code when used."""

import ast
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def attach_area(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` for an area package.

    Every folder of the area that holds an ``about.toml`` is a method; the literal ``__all__`` of its ``__init__.py`` is
    read without running it. A method's folder is therefore all that has to be added (SPEC 1 without a list to keep).
    """
    folder = Path(str(sys.modules[package].__file__)).parent
    methods = sorted(about.parent.name for about in folder.glob("*/about.toml"))
    home = {name: method for method in methods for name in public_names(folder / method / "__init__.py")}

    def __getattr__(name: str) -> Any:  # noqa: N807 - the module hook of PEP 562
        if name in home:
            return getattr(_import_method(package, folder, home[name]), name)
        if name in methods:
            return _import_method(package, folder, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted([*home, *methods]))}")

    return __getattr__, lambda: sorted([*home, *methods]), sorted(home)


def public_names(init: Path) -> list[str]:
    """The literal ``__all__`` of a module, read from its source."""
    for node in ast.parse(init.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return list(ast.literal_eval(node.value))
    return []


def _import_method(package: str, folder: Path, method: str) -> Any:
    try:
        return import_module(f"{package}.{method}")
    except ModuleNotFoundError as missing:
        extra = tomllib.loads((folder / method / "about.toml").read_text(encoding="utf-8")).get("extra", "")
        if not extra or (missing.name or "").startswith("assay"):
            raise
        message = f"{package}.{method} needs the package {missing.name!r}: pip install 'assay[{extra}]'"
        raise ImportError(message, name=missing.name) from missing
