import pickle
import threading

import pytest

from assay.bench import Config
from assay.bench.prepared import PreparedStore, recording


class Example(Config):
    width: int = 2
    """Read by prepare."""
    lr: float = 0.1
    """Not read."""


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return PreparedStore(tmp_path / "prepared")


def test_what_is_read_is_recorded():
    twin, read = recording(Example(width=5))
    assert isinstance(twin, Example)
    assert (twin.width, read) == (5, {"width"})
    twin.model_dump()
    assert read == set(Example.model_fields)


def test_only_fields_that_were_read_make_it_anew(store):
    made = []

    def make(config):
        made.append(config.width)
        return [config.width] * 3, {}

    for config, expected in [
        (Example(), [2, 2, 2]),
        (Example(lr=0.5), [2, 2, 2]),
        (Example(seeds=9), [2, 2, 2]),
        (Example(width=4), [4, 4, 4]),
        (Example(width=4, lr=1), [4, 4, 4]),
    ]:
        assert store.get("name", config, make) == (expected, "")
    assert made == [2, 4]


class Bomb:
    exploded = False

    def __reduce__(self):
        return (setattr, (Bomb, "exploded", True))


def test_an_entry_it_did_not_write_is_not_read(store):
    store.get("name", Example(), lambda c: (c.width, {}))
    (entry,) = store.folder.glob("*.pickle")
    payload = pickle.dumps(Bomb())
    for forged in (payload, entry.read_bytes()[:32] + payload, b"", b"x" * 10):
        entry.write_bytes(forged)
        assert store.find("name", Example()) is None
    assert not Bomb.exploded
    assert store.get("name", Example(), lambda c: (c.width, {})) == (2, "")  # made again and kept again
    assert pickle.loads(store.find("name", Example())) == 2


def test_what_cannot_be_kept_is_used_and_said(store):
    value, note = store.get("name", Example(), lambda c: (threading.Lock(), {}))
    assert value is not None
    assert "cannot be kept" in note
    assert not list(store.folder.glob("*")) if store.folder.exists() else True


def test_a_half_written_index_is_no_entry(store):
    store.get("name", Example(), lambda c: (c.width, {}))
    (index,) = store.folder.glob("*.json")
    index.write_text("{")
    assert store.find("name", Example()) is None


def test_what_was_noted_while_making_it_is_kept_beside_it(store):
    store.get("name", Example(), lambda c: (c.width, {"seconds": 1.5}))
    assert store.about("name", Example(lr=9.0)) == {"seconds": 1.5}
    assert store.about("name", Example(width=3)) == {}
    assert store.about("other", Example()) == {}
