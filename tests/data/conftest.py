"""A real web server on this machine, which can be told to misbehave."""

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


@dataclass
class Site:
    """What the server serves and how. ``requests`` collects (path, Range header) of each request."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    break_after: list[int] = field(default_factory=list)
    """For the coming requests: bytes after which the connection is dropped, although more were promised."""
    fail_with: list[int] = field(default_factory=list)
    """For the coming requests: a status to answer instead."""
    ranges: bool = True
    pause: float = 0.0
    """Seconds between pieces of 64 KiB."""
    requests: list[tuple[str, str | None]] = field(default_factory=list)


@pytest.fixture
def site() -> Iterator[Site]:
    here = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            here.requests.append((self.path, wanted))
            if here.fail_with:
                return self.send_error(here.fail_with.pop(0))
            if self.path not in here.files:
                return self.send_error(404)
            body, start = here.files[self.path], 0
            if wanted and here.ranges:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                if start >= len(body):
                    return self.send_error(416)
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            rest = body[start:]
            if here.break_after:
                rest = rest[: here.break_after.pop(0)]
            for i in range(0, len(rest), 1 << 16):
                try:
                    self.wfile.write(rest[i : i + (1 << 16)])
                except OSError:  # the other side was killed
                    return
                time.sleep(here.pause)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    here.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield here
    server.shutdown()
    server.server_close()


OWN_DATA = os.environ.get("ASSAY_DATA", "")


@pytest.fixture
def own_data() -> str:
    """What ASSAY_DATA was before `empty_home` took it away."""
    return OWN_DATA


@pytest.fixture
def empty_home(tmp_path, monkeypatch):
    """No data anywhere: an empty cache, ASSAY_DATA not set."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ASSAY_DATA", raising=False)
    return tmp_path
