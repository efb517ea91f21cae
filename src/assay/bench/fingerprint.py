"""Keys for stored work: what a trial depends on, as one hash.

A key covers the code that decides a number, not its wording: comments, docstrings, layout, claims and figures may change
without a finished trial being run again.
"""

import ast
import dis
import hashlib
import json
import sys
import time
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from .study import Study

# What a study reads off finished trials; a change of these runs nothing again. Scales enter a key as the config itself.
_AFTERWARDS = {"claims", "gates", "figure", "compare", "paper", "scales"}


def digest(*parts: Any) -> str:
    """A short hash of JSON-able parts."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()[:20]


def study_source(study: Study) -> str:
    """A hash of the code behind a study: its method's folder, its own module and its area's problem modules."""
    return source_of(sys.modules[study.trial.__module__])


def source_of(module: ModuleType | None) -> str:
    """A hash of a module's code; for a method's module, of its whole folder and of the area's problem modules."""
    file = getattr(module, "__file__", None)
    if file is None:
        return ""
    home = Path(file)
    files = {home}
    if (home.parent / "about.toml").exists():
        files |= set(home.parent.glob("*.py"))
        if (home.parent.parent / "__init__.py").exists():  # the area, if there is one
            files |= set(home.parent.parent.glob("*.py"))
    return digest(*[(path.name, _code_hash(path, path.stat().st_mtime_ns)) for path in sorted(files)])


@lru_cache(maxsize=1024)
def _code_hash(path: Path, modified: int) -> str:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [child for child in body if not _is_docstring(child)] or [ast.Pass()]  # type: ignore[attr-defined]
    return hashlib.sha256("\n".join(ast.dump(statement) for statement in _deciding(tree)).encode()).hexdigest()


def _deciding(tree: ast.Module) -> list[ast.stmt]:
    """The statements that a trial's numbers can depend on: all of them, or in a study's module those that the trial, the
    arms and the other deciding arguments of ``Study(...)`` reach by name."""
    call = next((node.value for node in tree.body if isinstance(node, ast.Assign) and _is_study_call(node.value)), None)
    if not isinstance(call, ast.Call):
        return tree.body
    wanted: set[str] = set()
    for keyword in call.keywords:
        if keyword.arg not in _AFTERWARDS:
            wanted |= _names_used(keyword.value)
    kept: set[int] = set()
    grew = True
    while grew:
        grew = False
        for i, statement in enumerate(tree.body):
            if i in kept or _is_study_call(getattr(statement, "value", None)):
                continue
            defined = _names_defined(statement)
            if not defined or defined & wanted:  # a bare expression has effects of its own: always kept
                kept.add(i)
                wanted |= _names_used(statement)
                grew = True
    return [tree.body[i] for i in sorted(kept)]


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_study_call(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "Study"


def _names_used(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def _names_defined(statement: ast.stmt) -> set[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
    return {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def arm_fingerprint(arm: Any) -> Any:
    """What an arm is, for a key: where it is defined, the arguments bound to it, what it closes over, and the code of its
    file where that is the user's own."""
    if isinstance(arm, partial):
        return ["partial", arm_fingerprint(arm.func), arm_fingerprint(arm.args), arm_fingerprint(arm.keywords)]
    if isinstance(arm, FunctionType):
        cells = [arm_fingerprint(cell.cell_contents) for cell in arm.__closure__ or ()]
        code = _bytecode(arm.__code__) if "<lambda>" in arm.__qualname__ else ""
        return ["function", arm.__module__, arm.__qualname__, code, arm_fingerprint(arm.__defaults__), cells]
    if isinstance(arm, (list, tuple)):
        return [arm_fingerprint(item) for item in arm]
    if isinstance(arm, dict):
        return {str(key): arm_fingerprint(value) for key, value in arm.items()}
    if isinstance(arm, (str, int, float, bool, type(None))):
        return arm
    if isinstance(arm, type):
        return ["class", arm.__module__, arm.__qualname__]
    if isinstance(arm, ModuleType):
        return ["module", arm.__name__, source_of(arm)]
    own = getattr(arm, "__dict__", None)
    return [type(arm).__module__, type(arm).__qualname__, arm_fingerprint(own) if own else _content(arm)]


def case_fingerprint(case: Any, path: str) -> str:
    """What a user's case is, for a key: a function by its code and its file's, anything else by its content."""
    if callable(case):
        return digest(path, arm_fingerprint(case), source_of(module_of(case)))
    return digest(path, _content(case))


def files_fingerprint(values: dict[str, Any]) -> dict[str, str]:
    """The content of every file that a setting names: a user's text or table may change under the same name."""
    found = {}
    for name, value in values.items():
        if isinstance(value, str) and 0 < len(value) < 1000 and Path(value).is_file():
            with open(value, "rb") as stream:
                found[name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return found


def _content(thing: Any) -> str:
    """A hash of what an object holds: tensors, arrays, tuples of them."""
    import cloudpickle

    try:
        return hashlib.sha256(cloudpickle.dumps(thing)).hexdigest()
    except Exception:  # what cannot be pickled is never the same twice
        return f"{id(thing)} {time.time_ns()}"


def module_of(thing: Any) -> ModuleType | None:
    """The module a function, partial, class or object comes from."""
    while isinstance(thing, partial):
        thing = thing.func
    return sys.modules.get(getattr(thing, "__module__", None) or type(thing).__module__)


def _bytecode(code: CodeType) -> str:
    parts = [(i.opname, _stable(i.argval)) for i in dis.get_instructions(code) if not isinstance(i.argval, CodeType)]
    return digest(parts, [_bytecode(const) for const in code.co_consts if isinstance(const, CodeType)])


def _stable(value: Any) -> str:
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)  # sets print in any order
