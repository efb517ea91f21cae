import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.data import DataUnavailable, load_preferences, needs
from assay.data.preferences import pairs_of, parse_lines

DIALOGUE = "\n\nHuman: Hello\n\nAssistant: Hi.\n\nHuman: How is it?\n\nAssistant:"


def test_the_harmless_test_split():
    needs("preferences")
    data = load_preferences()
    assert len(data) == 2303
    assert data.dropped == {"different prompts": 5, "empty answer": 4}
    # counts alone: an assertion on a text would print it when it fails
    assert sum(p.prompt.endswith("Assistant:") for p in data.pairs) == 2303
    assert sum(p.chosen == p.rejected for p in data.pairs) == 0


def test_dialogues_are_split_at_the_last_answer():
    data = pairs_of([{"chosen": DIALOGUE + " Fine.", "rejected": DIALOGUE + " Bad."}], "own")
    assert data.pairs[0] == (DIALOGUE, " Fine.", " Bad.")


def test_unusable_rows_are_left_out_and_counted():
    rows = [
        {"prompt": "p", "chosen": "a", "rejected": "b"},
        {"prompt": "p", "chosen": "a"},
        {"prompt": "p", "chosen": "a", "rejected": 3},
        {"prompt": "p", "chosen": " ", "rejected": "b"},
        {"prompt": "p", "chosen": "a", "rejected": "a "},
        {"prompt": 1, "chosen": "a", "rejected": "b"},
        {"chosen": DIALOGUE + " Fine.", "rejected": "\n\nHuman: Other\n\nAssistant: Bad."},
    ]
    data = pairs_of(rows, "own")
    assert len(data) == 1
    assert data.dropped == {
        "missing answer": 2, "empty answer": 1, "identical answers": 1, "missing prompt": 1, "different prompts": 1
    }  # fmt: skip
    with pytest.raises(ValueError, match="own holds no usable preference pair; left out"):
        pairs_of(rows[1:], "own")


def test_no_text_is_shown():
    secret = "swordfish"
    data = pairs_of([{"prompt": secret, "chosen": secret + "a", "rejected": secret}], "own")
    assert secret not in repr(data) + repr(data.pairs[0]) + str(data.pairs)
    with pytest.raises(ValueError, match="line 1: not JSON") as caught:
        parse_lines(b'{"chosen": "swordfish')
    assert secret not in str(caught.value)


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_of_ones_own(tmp_path, packed):
    raw = (json.dumps({"prompt": "p", "chosen": "a\u2028b", "rejected": "c"}, ensure_ascii=False) + "\n\n").encode()
    path = tmp_path / "own.jsonl"
    path.write_bytes(gzip.compress(raw) if packed else raw)
    assert load_preferences(path).pairs[0].chosen == "a\u2028b"


def test_bad_files(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="is broken"):
        parse_lines(gzip.compress(b"{}")[:-3])
    with pytest.raises(ValueError, match="line 2: a JSON object"):
        parse_lines(b"{}\n[1]")
    with pytest.raises(DataUnavailable, match=r"a \.jsonl file"):
        load_preferences("no-such-file.jsonl")
    monkeypatch.setenv("ASSAY_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(DataUnavailable, match="hh_harmless_base_test"):
        load_preferences()


@given(st.binary(max_size=200) | st.binary(max_size=100).map(lambda b: b"\x1f\x8b" + b))
def test_any_bytes_give_rows_or_a_value_error(raw):
    try:
        rows = parse_lines(raw)
    except ValueError:
        return
    assert all(isinstance(row, dict) for row in rows)
