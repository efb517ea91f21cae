"""Downloads that are whole or absent: resumed after a kill, checked, and moved into place in one step."""

import hashlib
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from filelock import FileLock

from .places import DataUnavailable, cache_home, find, looked_at, offline

_CHUNK = 1 << 18
_RETRY_PAUSE = 0.5  # seconds, doubled at each attempt
ENOUGH = 3  # attempts, each going on from where the last one stopped


class WrongChecksum(ValueError):
    """A file came whole but is not the one that was pinned."""


def download(url: str, path: Path, *, sha256: str | None = None, timeout: float = 20.0) -> Path:
    """Fetch `url` to `path`, unless it is there already.

    The bytes go to ``.<name>.part`` in the same folder, which takes the final name only once it is complete and its
    SHA-256 agrees. A transfer that breaks off, or whose process is killed, is resumed from that file; one of unknown
    checksum starts anew, since a mixture of two versions could not be told. A lock keeps two processes apart.

    Args:
        url: http or https.
        path: Where the file belongs; its folder is made.
        sha256: Hexadecimal digest that the file must have; None where the content changes over time.
        timeout: Seconds without a byte after which a transfer counts as broken off.

    Raises:
        WrongChecksum: The file came whole with another digest; nothing is kept.
        DataUnavailable: No connection, no such file, or broken off three times.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with FileLock(path.with_name(f".{path.name}.lock")):
        if path.exists():
            return path
        if offline():
            raise DataUnavailable(path.name, [path], url, "HF_HUB_OFFLINE is set")
        if sha256 is None:
            part.unlink(missing_ok=True)
        resumed = part.exists()
        _until_whole(url, part, path.name, timeout)
        digest = file_sha256(part)
        if sha256 is not None and digest != sha256.lower() and resumed:  # what was left behind was of another file
            part.unlink()
            _until_whole(url, part, path.name, timeout)
            digest = file_sha256(part)
        if sha256 is not None and digest != sha256.lower():
            part.unlink()
            raise WrongChecksum(f"{url} has SHA-256 {digest}, expected {sha256}; the file was not kept")
        part.replace(path)
    return path


def obtain(name: str, places: Sequence[str], url: str, sha256: str, home: str) -> Path:
    """A file of the set `name`: the first of `places` that exists, else downloaded to the last of them in the cache.

    Raises:
        DataUnavailable: naming the set, all the places and its `home`.
        WrongChecksum: the download is not the pinned file.
    """
    path = find(*places)
    if path is not None:
        return path
    try:
        return download(url, cache_home() / places[-1], sha256=sha256)
    except DataUnavailable as missing:
        raise DataUnavailable(name, looked_at(*places), home, f"{Path(places[-1]).name}: {missing.why}") from missing


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _until_whole(url: str, part: Path, label: str, timeout: float) -> None:
    for attempt in range(ENOUGH):
        try:
            return _transfer(url, part, label, timeout)
        except urllib.error.HTTPError as refused:
            if refused.code < 500:  # the server will say the same again
                raise DataUnavailable(label, [part], url, f"the server answered {refused.code} {refused.reason}") from None
            broken: Exception = refused
        except (OSError, http.client.HTTPException) as failure:
            broken = failure
        if attempt + 1 < ENOUGH:
            time.sleep(_RETRY_PAUSE * 2**attempt)
    raise DataUnavailable(label, [part], url, f"the download broke off {ENOUGH} times, last with {broken!r}") from broken


def _transfer(url: str, part: Path, label: str, timeout: float) -> None:
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "assay", **({"Range": f"bytes={have}-"} if have else {})})
    try:
        response = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as refused:
        if refused.code != 416 or not have:
            raise
        part.unlink()  # nothing lies beyond what we have: it is whole or wrong, and a fresh start settles which
        return _transfer(url, part, label, timeout)
    with response, open(part, "ab" if response.status == 206 else "wb") as out:
        have = have if response.status == 206 else 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        with progress(label, total, have) as advance:
            while chunk := response.read(_CHUNK):
                out.write(chunk)
                have += len(chunk)
                advance(len(chunk))
    if total is not None and have != total:
        raise ConnectionError(f"{have} of {total} bytes arrived")


class progress:  # noqa: N801  (used like a function)
    """A bar on stderr while bytes arrive, gone when they are there; silent where stderr is not a terminal."""

    def __init__(self, label: str, total: int | None, done: int = 0):
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = [TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()]
        console = Console(stderr=True)
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task(label, total=total, completed=done)

    def __enter__(self) -> Callable[[int], None]:
        self._bar.start()
        return lambda count: self._bar.update(self._task, advance=count)

    def __exit__(self, *failure: object) -> None:
        self._bar.stop()
