import json

import pytest

from assay.data import DataUnavailable, load_text
from assay.data.text import _from_hub


def test_the_standard_library_is_python_and_the_same_every_time():
    text = load_text("stdlib", limit=300_000)
    assert len(text) == 300_000
    assert text == load_text("stdlib", limit=500_000)[:300_000]
    assert text.count("\ndef ") > 100


def test_tests_and_installed_packages_stay_out_of_the_standard_library(monkeypatch, tmp_path):
    for name in (
        "a.py",
        "pkg/b.py",
        "test/c.py",
        "pkg/tests/d.py",
        "encodings/cp1.py",
        "site-packages/e.py",
        "config-3.11/f.py",
        "_sysconfigdata_x.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}")
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert set(load_text("stdlib").split("\n")) == {"# a.py", "# pkg/b.py"}


def test_pydoc_is_english():
    text = load_text("pydoc")
    assert len(text) > 300_000
    assert 'The "if" statement' in text


def test_a_file_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "notes.txt").write_text("Grüße, 世界\n", encoding="utf-8")
    assert load_text(str(tmp_path / "notes.txt")) == "Grüße, 世界\n"
    assert load_text(str(tmp_path / "notes.txt"), limit=5) == "Grüße"
    monkeypatch.setenv("ASSAY_DATA", str(tmp_path))
    assert load_text("notes.txt") == "Grüße, 世界\n"


def test_bad_input(tmp_path):
    (tmp_path / "b").write_bytes(b"\xff\xfe")
    (tmp_path / "e").write_bytes(b"")
    with pytest.raises(ValueError, match="not UTF-8"):
        load_text(str(tmp_path / "b"))
    with pytest.raises(ValueError, match="is empty"):
        load_text(str(tmp_path / "e"))
    with pytest.raises(ValueError, match="at least 1, got 0"):
        load_text("stdlib", limit=0)
    for name in ("no-such-file.txt", str(tmp_path), ""):
        with pytest.raises(DataUnavailable, match="hub id"):
            load_text(name)


@pytest.mark.slow  # importing datasets takes a while
def test_a_data_set_in_the_hubs_layout(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    rows = [{"text": "one"}, {"text": "two"}, {"text": "three"}]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert _from_hub(str(folder), 1000) == "one\ntwo\nthree"
    assert _from_hub(str(folder), 5) == "one\nt"
    (folder / "train.jsonl").write_text(json.dumps({"body": "x"}))
    with pytest.raises(ValueError, match="no column 'text' of strings; it has body"):
        _from_hub(str(folder), 10)
