import hashlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from assay.data import DataUnavailable
from assay.data import download as module
from assay.data.download import WrongChecksum, download, obtain

BODY = bytes(range(256)) * 4096  # one MiB
DIGEST = hashlib.sha256(BODY).hexdigest()


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    monkeypatch.setattr(module, "_RETRY_PAUSE", 0.0)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.endswith(".lock")}


def test_fetches_once_and_then_finds_it_there(site, tmp_path):
    site.files["/f"] = BODY
    path = tmp_path / "deep" / "folder" / "f"
    assert download(f"{site.url}/f", path, sha256=DIGEST).read_bytes() == BODY
    assert left_in(path.parent) == {"f"}
    download(f"{site.url}/f", path, sha256=DIGEST)
    assert len(site.requests) == 1


def test_a_transfer_that_breaks_off_goes_on_from_where_it_stopped(site, tmp_path):
    site.files["/f"] = BODY
    site.break_after = [300_000, 100_000]
    assert download(f"{site.url}/f", tmp_path / "f", sha256=DIGEST).read_bytes() == BODY
    assert [wanted for _, wanted in site.requests] == [None, "bytes=300000-", "bytes=400000-"]


def test_a_truncated_file_never_counts_as_whole(site, tmp_path):
    site.files["/f"] = BODY
    site.break_after = [1000] * module.ENOUGH
    for sha256 in (DIGEST, None):  # without a checksum the promised length alone must tell
        site.break_after = [1000] * module.ENOUGH
        with pytest.raises(DataUnavailable, match=r"broke off 3 times.*of \d+ bytes arrived"):
            download(f"{site.url}/f", tmp_path / "f", sha256=sha256)
        assert not (tmp_path / "f").exists()
    assert download(f"{site.url}/f", tmp_path / "f", sha256=DIGEST).read_bytes() == BODY


def test_a_wrong_file_is_not_kept(site, tmp_path):
    site.files["/f"] = BODY[:-1] + b"!"
    with pytest.raises(WrongChecksum, match=f"expected {DIGEST}"):
        download(f"{site.url}/f", tmp_path / "f", sha256=DIGEST)
    assert left_in(tmp_path) == set()


def test_a_leftover_of_another_file_costs_one_more_transfer_and_no_error(site, tmp_path):
    site.files["/f"] = BODY
    (tmp_path / ".f.part").write_bytes(b"something else")
    assert download(f"{site.url}/f", tmp_path / "f", sha256=DIGEST).read_bytes() == BODY
    assert [wanted for _, wanted in site.requests] == ["bytes=14-", None]


def test_a_server_without_ranges_is_asked_for_the_whole(site, tmp_path):
    site.files["/f"], site.ranges, site.break_after = BODY, False, [5000]
    assert download(f"{site.url}/f", tmp_path / "f", sha256=DIGEST).read_bytes() == BODY


def test_a_leftover_that_is_complete_or_too_long_is_settled(site, tmp_path):
    site.files["/f"] = BODY
    for leftover in (BODY, BODY + b"more"):
        (tmp_path / "f").unlink(missing_ok=True)
        (tmp_path / ".f.part").write_bytes(leftover)
        assert download(f"{site.url}/f", tmp_path / "f", sha256=DIGEST).read_bytes() == BODY


def test_of_unknown_content_nothing_is_resumed(site, tmp_path):
    site.files["/f"] = BODY
    (tmp_path / ".f.part").write_bytes(BODY[:1000])
    assert download(f"{site.url}/f", tmp_path / "f").read_bytes() == BODY
    assert site.requests == [("/f", None)]


def test_a_passing_failure_of_the_server_is_tried_again_and_a_refusal_is_not(site, tmp_path):
    site.files["/f"], site.fail_with = BODY, [503, 500]
    assert download(f"{site.url}/f", tmp_path / "f", sha256=DIGEST).read_bytes() == BODY
    site.requests.clear()
    with pytest.raises(DataUnavailable, match="answered 404"):
        download(f"{site.url}/absent", tmp_path / "absent")
    assert len(site.requests) == 1


def test_a_killed_process_leaves_a_beginning_that_the_next_one_completes(site, tmp_path):
    site.files["/f"], site.pause = BODY, 0.05
    url, path = f"{site.url}/f", str(tmp_path / "f")
    script = (
        "from pathlib import Path; from assay.data.download import download;"
        f"download({url!r}, Path({path!r}), sha256={DIGEST!r})"
    )
    child = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    part = tmp_path / ".f.part"
    until = time.monotonic() + 60
    while not (part.exists() and part.stat().st_size > 0):
        assert time.monotonic() < until, "the child never wrote anything"
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not (tmp_path / "f").exists()
    have = part.stat().st_size
    assert 0 < have < len(BODY)
    site.pause = 0.0
    assert download(f"{site.url}/f", tmp_path / "f", sha256=DIGEST).read_bytes() == BODY
    assert site.requests[-1] == ("/f", f"bytes={have}-")


def test_two_at_once_transfer_once(site, tmp_path):
    site.files["/f"], site.pause = BODY, 0.01
    threads = [
        threading.Thread(target=download, args=(f"{site.url}/f", tmp_path / "f"), kwargs={"sha256": DIGEST}) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "f").read_bytes() == BODY
    assert len(site.requests) == 1


def test_nobody_there(tmp_path):
    with pytest.raises(DataUnavailable, match="broke off 3 times"):
        download("http://127.0.0.1:9/f", tmp_path / "f", sha256=DIGEST, timeout=2)


def test_offline_asks_nobody(site, tmp_path, monkeypatch):
    site.files["/f"] = BODY
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataUnavailable, match="HF_HUB_OFFLINE is set"):
        download(f"{site.url}/f", tmp_path / "f")
    assert site.requests == []


def test_own_files_come_before_the_cache_and_the_cache_before_a_download(site, empty_home, monkeypatch):
    site.files["/f"] = BODY
    arguments = ("thing", ("mine/f", "usual/f"), f"{site.url}/f", DIGEST, "https://example.org")
    cached = obtain(*arguments)
    assert cached == empty_home / "cache" / "assay" / "usual" / "f"
    monkeypatch.setenv("ASSAY_DATA", str(empty_home / "own"))
    assert obtain(*arguments) == cached
    assert not (empty_home / "own").exists()  # never written to
    (empty_home / "own" / "mine").mkdir(parents=True)
    (empty_home / "own" / "mine" / "f").write_bytes(b"mine")
    assert obtain(*arguments).read_bytes() == b"mine"
    assert len(site.requests) == 1


def test_the_error_says_what_where_and_how_and_survives_pickling(empty_home, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("ASSAY_DATA", "/somewhere/else")
    with pytest.raises(DataUnavailable) as caught:
        obtain("thing", ("a/b",), "https://example.org/raw/b", DIGEST, "https://example.org")
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert isinstance(error, FileNotFoundError)
        for fact in (
            "'thing'",
            "/somewhere/else/a/b",
            "cache/assay/a/b",
            "https://example.org",
            "ASSAY_DATA",
            "HF_HUB_OFFLINE",
        ):
            assert fact in str(error)
