"""From names to objects: studies by slug, a user's own arm or case by ``module:attribute`` or ``file.py:attribute``."""

import importlib
import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from assay.catalog import Method

from .config import UsageError, nearest
from .study import Study


def load_study(method: Method) -> Study:
    """The ``study`` of a method's ``study.py``.

    Raises:
        UsageError: the module has no ``study``.
        ImportError: a package is missing; names the extra that has it.
    """
    try:
        module = importlib.import_module(f"{method.module}.study")
    except ModuleNotFoundError as missing:
        if not method.extra or (missing.name or "").startswith(method.module.partition(".")[0]):
            raise
        message = f"{method.slug} needs the package {missing.name!r}: pip install 'assay[{method.extra}]'"
        raise ImportError(message, name=missing.name) from missing
    study = getattr(module, "study", None)
    if not isinstance(study, Study):
        raise UsageError(f"{module.__name__} has no `study = Study(...)`")
    return study


def load_object(path: str, option: str) -> Any:
    """The object that ``module:attribute`` or ``path/to/file.py:attribute`` names.

    Args:
        path: Where it is.
        option: The command-line option it came from, for messages.

    Raises:
        UsageError: no such file, module or attribute, or an error while importing it.
    """
    place, colon, attribute = path.rpartition(":")
    if not colon or not place or not attribute:
        raise UsageError(f"{option} takes module:attribute or file.py:attribute, got {path!r}")
    module = _from_file(Path(place), option) if place.endswith(".py") else _from_name(place, option)
    if not hasattr(module, attribute):
        public = [name for name in vars(module) if not name.startswith("_")]
        raise UsageError(f"{option}: {place} has no {attribute!r}{nearest(attribute, public)}")
    return getattr(module, attribute)


def _from_name(name: str, option: str) -> Any:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does: a user's own package need not be installed
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise UsageError(f"{option}: importing {name!r} failed: {type(error).__name__}: {error}") from error


class _AsItStands(SourceFileLoader):
    """Compiles the source each time. Bytecode on disk passes for new while the second and the length of the source agree."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _from_file(path: Path, option: str) -> Any:
    if not path.is_file():
        raise UsageError(f"{option}: there is no file {path}")
    name = f"assay_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve(), loader=_AsItStands(name, str(path.resolve())))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise UsageError(f"{option}: running {path} failed: {type(error).__name__}: {error}") from error
    import cloudpickle

    cloudpickle.register_pickle_by_value(module)  # a worker elsewhere does not have the file
    return module
