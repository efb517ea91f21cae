"""What ``prepare`` made, kept on disk: a resumed run and other studies of the same problem read it instead of making it.

An entry is found by what ``prepare`` read from the config, so a field that only the trial looks at (a learning rate)
does not make it anew. Entries are pickles, signed with a key that only this user has: one that this program did not
write is not read.
"""

import contextlib
import hashlib
import hmac
import json
import os
import pickle
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle

from .config import Config
from .fingerprint import digest, module_of, source_of
from .study import Study

_SIGNATURE_BYTES = 32


def recording(config: Config) -> tuple[Config, set[str]]:
    """A config like the one given, and the set of fields that have been read from it so far."""
    read: set[str] = set()
    fields = type(config).model_fields

    class Recorded(type(config)):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name in fields:
                read.add(name)
            elif name in ("model_dump", "model_dump_json", "model_copy", "__dict__", "__iter__"):
                read.update(fields)
            return super().__getattribute__(name)

    twin = Recorded.model_construct(**config.model_dump(round_trip=True))
    object.__setattr__(twin, "__dict__", dict(config.__dict__))
    read.clear()
    return twin, read


class PreparedStore:
    """Results of ``prepare`` under a folder.

    Args:
        folder: Where the entries are kept.
        salt: What an entry depends on beyond its ``prepare``'s own code: a user's case.
    """

    def __init__(self, folder: Path, salt: str = ""):
        self.folder = folder
        self.salt = salt

    def name(self, study: Study, replicate: str, scale: str, device: str) -> str:
        """What an entry depends on besides the config."""
        prepare = study.prepare
        assert prepare is not None
        where = f"{prepare.__module__}.{prepare.__qualname__}"
        return digest(where, source_of(module_of(prepare)), self.salt, replicate, scale, device, _versions())

    def find(self, name: str, config: Config) -> bytes | None:
        """The pickle kept for this config, if there is one that this program wrote."""
        for index, _ in self._entries(name, config):
            payload = _signed_payload(index.with_suffix(".pickle"))
            if payload is not None:
                return payload
        return None

    def about(self, name: str, config: Config) -> dict[str, Any]:
        """What was noted when the entry for this config was made: its curves, notes and seconds."""
        return next((entry["about"] for _, entry in self._entries(name, config)), {})

    def keep(self, name: str, config: Config, read: set[str], payload: bytes, about: dict[str, Any]) -> None:
        """Keeps a pickle under the fields that were read while it was made, with what was noted of its making."""
        fields = {field: dumped for field, dumped in config.model_dump(mode="json").items() if field in read}
        stem = f"{name}-{digest(fields)}"
        self.folder.mkdir(parents=True, exist_ok=True)
        _write_atomically(self.folder / f"{stem}.pickle", _sign(payload) + payload)
        _write_atomically(self.folder / f"{stem}.json", json.dumps({"fields": fields, "about": about}).encode())

    def get(self, name: str, config: Config, make: Callable[[Config], tuple[Any, dict[str, Any]]]) -> tuple[Any, str]:
        """What is kept, or what ``make`` makes, which is then kept; and why not, where it cannot be pickled."""
        payload = self.find(name, config)
        if payload is not None:
            # An entry of code that has since gone cannot be read: it is made again.
            with contextlib.suppress(Exception):
                return pickle.loads(payload), ""
        twin, read = recording(config)
        value, about = make(twin)
        try:
            self.keep(name, config, read, cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), about)
        except Exception as error:  # whatever a study returned: not being able to keep it must not end the run
            return value, f"what prepare returned cannot be kept ({type(error).__name__}: {error}); it is made again next time"
        return value, ""

    def _entries(self, name: str, config: Config) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Index files, with their content, of the entries whose fields this config agrees with."""
        values = config.model_dump(mode="json")
        for index in sorted(self.folder.glob(f"{name}-*.json")):
            try:
                entry = json.loads(index.read_text())
            except (OSError, json.JSONDecodeError):
                continue
            if all(values.get(field, _ABSENT) == value for field, value in entry["fields"].items()):
                yield index, entry


_ABSENT = object()


def _versions() -> list[str]:
    torch = sys.modules.get("torch")
    numpy = sys.modules.get("numpy")
    return [sys.version.split()[0], getattr(torch, "__version__", ""), getattr(numpy, "__version__", "")]


def _signed_payload(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    signature, payload = content[:_SIGNATURE_BYTES], content[_SIGNATURE_BYTES:]
    return payload if hmac.compare_digest(signature, _sign(payload)) else None


def _sign(payload: bytes) -> bytes:
    return hmac.new(_key(), payload, hashlib.sha256).digest()


def _key() -> bytes:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "assay"
    path = home / "signing-key"
    try:
        return path.read_bytes()
    except FileNotFoundError:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=home, delete=False) as file:  # created 0600
            file.write(secrets.token_bytes(32))
        with contextlib.suppress(FileExistsError):
            os.link(file.name, path)  # whoever comes first decides; nobody reads half a key
        os.unlink(file.name)
        return path.read_bytes()


def _write_atomically(path: Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)
