import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.data import DataUnavailable, load_letters, needs
from assay.data.letters import parse_letters

ROW = "T,2,8,3,5,1,8,13,0,6,6,10,8,0,8,0,8"


def test_the_letters_of_uci():
    needs("letters")
    data = load_letters()
    assert len(data) == 20_000
    assert data.features.shape == (20_000, 16)
    assert data.is_test.sum() == 4000
    assert data.is_test[-4000:].all()
    counts = np.bincount(data.labels, minlength=26)
    assert counts.shape == (26,)
    assert (counts.min(), counts.max()) == (734, 813)
    assert "".join(chr(65 + label) for label in data.labels[:5]) == "TIDNG"  # the file's first rows
    assert data.features[0].tolist() == [2, 8, 3, 5, 1, 8, 13, 0, 6, 6, 10, 8, 0, 8, 0, 8]
    assert data.features.max() == 15


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("header", ["", "Letter," + ",".join(str(i) for i in range(1, 17))])
def test_a_file_of_ones_own(tmp_path, header, ending):
    path = tmp_path / "own.data"
    path.write_bytes(ending.join([*filter(None, [header]), *[ROW] * 4, ROW.replace("T", "A"), "", ROW]).encode())
    data = load_letters(path)
    assert data.labels.tolist() == [19] * 4 + [0, 19]
    assert data.labels.dtype == np.int64
    assert data.features.dtype == np.uint8
    assert data.is_test.tolist() == [False] * 5 + [True]


@pytest.mark.parametrize(
    "line", [ROW[:-2], ROW + ",1", ROW.lower(), ROW.replace("13", "16"), ROW.replace("8", "1.5"), ROW.replace("8", "٣"), "x"]
)
def test_a_bad_line_is_named(line):
    with pytest.raises(ValueError, match="file, line 2: not a capital letter and 16 numbers"):
        parse_letters(f"{ROW}\n{line}\n".encode())
    with pytest.raises(ValueError, match="line 1"):
        parse_letters(f"{line}\n{ROW}\n".encode())


def test_bad_files(tmp_path, monkeypatch):
    few = tmp_path / "few.data"
    few.write_text(f"{ROW}\n" * 4)
    with pytest.raises(ValueError, match="holds 4 letters"):
        load_letters(few)
    with pytest.raises(DataUnavailable, match="not there"):
        load_letters(tmp_path / "none.data")
    monkeypatch.setenv("ASSAY_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(DataUnavailable, match=r"letters/letter-recognition\.data"):
        load_letters()


@given(
    st.binary(max_size=200)
    | st.text("TA,0123456789\n\r ", max_size=200).map(str.encode)
    | st.lists(st.integers(-1, 17), min_size=15, max_size=17).map(lambda v: ("T," + ",".join(map(str, v))).encode())
)
def test_any_bytes_give_letters_or_a_value_error(raw):
    try:
        features, labels = parse_letters(raw)
    except ValueError:
        return
    assert features.shape == (len(labels), 16)
    assert features.max(initial=0) <= 15
    assert set(labels.tolist()) <= set(range(26))
