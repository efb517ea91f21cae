import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.data import DataUnavailable, load_reviews, needs
from assay.data.reviews import parse_reviews


def test_the_sentences_of_uci():
    needs("reviews")
    data = load_reviews()
    assert len(data) == 2982
    assert data.dropped == {"empty": 0, "repeated": 18}
    assert len(set(data.sentences)) == len(data.sentences) == len(data.labels)
    assert abs(data.labels.mean() - 0.5) < 0.01
    assert not any("\t" in s or "\n" in s or "\x85" in s for s in data.sentences)


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "own.tsv"
    path.write_text("So\tgood.\t1\nBad  indeed.\t0\n\nBad indeed.\t1\n \t0\n", encoding="utf-8")
    data = load_reviews(path)
    assert data.sentences == ("So good.", "Bad indeed.")
    assert data.labels.tolist() == [1, 0]
    assert data.labels.dtype == np.int64
    assert data.dropped == {"empty": 1, "repeated": 1}
    assert "good" not in repr(data)


def test_a_letter_that_ends_lines_elsewhere_does_not_here():
    assert parse_reviews("one\x85two\t1\n".encode()) == (["one two"], [1])


@pytest.mark.parametrize("line", ["no tab", "a\t2", "a\t", "a\t1.0"])
def test_a_bad_line_is_named_and_not_quoted(line):
    with pytest.raises(ValueError, match=r"file, line 2: not 'sentence<TAB>0 or 1'"):
        parse_reviews(f"good\t1\n{line}\n".encode())


def test_bad_files(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="not UTF-8"):
        parse_reviews(b"\xff\t1")
    one = tmp_path / "one.tsv"
    one.write_text("good\t1\n")
    with pytest.raises(ValueError, match="not both labels"):
        load_reviews(one)
    with pytest.raises(DataUnavailable, match="not there"):
        load_reviews(tmp_path / "none.tsv")
    monkeypatch.setenv("ASSAY_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(DataUnavailable, match="imdb_labelled"):
        load_reviews()


@given(st.binary(max_size=200))
def test_any_bytes_give_sentences_or_a_value_error(raw):
    try:
        sentences, labels = parse_reviews(raw)
    except ValueError:
        return
    assert len(sentences) == len(labels)
    assert set(labels) <= {0, 1}
