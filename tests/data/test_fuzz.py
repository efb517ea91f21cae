"""Whatever bytes a file holds, a parser gives a value or a ValueError: no other exception, no hang."""

import gzip
import io
import tarfile
import warnings
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from assay.data.csv_series import parse_csv, parse_stamped
from assay.data.idx import parse_idx, read_idx
from assay.data.image_files import decode
from assay.data.image_sets import cifar_binary, jpeg_npz
from assay.data.nab import parse_windows
from assay.data.telemetry import from_npz, from_telemanom

few = settings(max_examples=150, deadline=None)


def damaged(whole: bytes) -> st.SearchStrategy[bytes]:
    """The bytes with a few of them changed, cut off somewhere, or with others put in."""
    places = st.integers(0, len(whole) - 1)

    def apply(changes, cut, extra):
        body = bytearray(whole)
        for at, value in changes:
            body[at] = value
        return bytes(body[:cut]) + extra

    return st.builds(
        apply, st.lists(st.tuples(places, st.integers(0, 255)), max_size=6), places | st.just(len(whole)), st.binary(max_size=8)
    )


def in_file(raw: bytes, name: str, parse):
    """What the parser gives for a file of these bytes; None where it raises a ValueError."""
    with TemporaryDirectory() as folder, suppress(ValueError):
        path = Path(folder) / name
        path.write_bytes(raw)
        return parse(path)
    return None


def npz(**arrays) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def picture(form: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(buffer, form)
    return buffer.getvalue()


IDX = b"\0\0\x08\x03" + b"\0\0\0\x02" * 3 + bytes(8)
IMAGES = npz(
    jpeg=np.frombuffer(picture("JPEG"), np.uint8),
    offsets=np.array([0, len(picture("JPEG"))]),
    label=np.zeros(1, np.uint8),
    is_test=np.zeros(1, bool),
    classes=np.array(["a"]),
)
TELEMETRY = npz(SMAP_A_test=np.zeros(3), SMAP_A_train=np.zeros(2), SMAP_A_test_label=np.array([0, 1, 0]))


@few
@given(st.binary(max_size=200) | damaged(IDX) | st.builds(lambda tail: b"\0\0\x08" + tail, st.binary(max_size=300)))
def test_idx(raw):
    with suppress(ValueError):
        array = parse_idx(raw)
        assert array.dtype == np.uint8
        array += 1  # its own memory, writable


@few
@given(damaged(gzip.compress(IDX)))
def test_compressed_idx(raw):
    array = in_file(raw, "f.gz", read_idx)
    assert array is None or array.dtype == np.uint8


def test_a_small_file_that_unpacks_without_end_is_refused(tmp_path):
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(bytes(10_000_000)))
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        read_idx(tmp_path / "bomb.gz", largest=1000)


@few
@given(
    st.binary(max_size=200)
    | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass"))
    | st.text(alphabet='01.,-enaif\n\r"_ \0label', max_size=120).map(str.encode)
    | damaged(b"timestamp,a,label\n2020-01-01 00:00:00,1.5,0\n2020-01-02 00:00:00,2.5,1\n")
)
def test_csv(raw):
    with suppress(ValueError):
        values, labels = parse_csv(raw)
        assert values.ndim == 2
        assert np.isfinite(values).all()
        assert labels is None or labels.shape == values.shape[:1]


@few
@given(damaged(b"timestamp,value\n2020-01-01 00:00:00,1.5\n2020-01-02T00:00:00+01:00,2\n"))
def test_stamped_csv(raw):
    with suppress(ValueError):
        stamps, values = parse_stamped(raw, "fuzz")
        assert len(stamps) == len(values)


@few
@given(
    st.binary(max_size=100)
    | damaged(b'{"a.csv": [["2020-01-01 00:00:00", "2020-01-02 00:00:00.5"]], "b.csv": []}')
    | st.just(b"[" * 100_000)
)
def test_windows(raw):
    with suppress(ValueError):
        windows = parse_windows(raw)
        assert all(start <= end for spans in windows.values() for start, end in spans)


@few
@given(damaged(IMAGES) | st.binary(max_size=100))
def test_npz_of_images(raw):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = in_file(raw, "f.npz", lambda path: jpeg_npz(path, "fuzz"))
    if loaded is not None:
        images, labels, is_test, _, _ = loaded
        assert len(images) == len(labels) == len(is_test)
        assert images.dtype == np.uint8


@few
@given(damaged(TELEMETRY))
def test_npz_of_telemetry(raw):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        series = in_file(raw, "f.npz", lambda path: list(from_npz(path, "smap")))
    for _, test, labels, train in series or ():
        assert test.ndim == train.ndim == 2
        assert len(test) == len(labels)


@few
@given(st.one_of(*(damaged(picture(form)) for form in ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP"))))
def test_pictures(raw):
    with warnings.catch_warnings(), suppress(ValueError):
        warnings.simplefilter("ignore")
        assert decode(raw, 4, "fuzz").shape[:2] == (4, 4)


def cifar_archive() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, body in {"train.bin": bytes(3074), "test.bin": bytes(3074), "fine_label_names.txt": b"a\n"}.items():
            entry = tarfile.TarInfo(f"cifar-100-binary/{name}")
            entry.size = len(body)
            archive.addfile(entry, io.BytesIO(body))
    return buffer.getvalue()


@few
@given(damaged(cifar_archive()))
def test_cifar_archive(raw):
    loaded = in_file(raw, "f.tar.gz", lambda path: cifar_binary(path, "cifar100"))
    assert loaded is None or len(loaded[0]) == len(loaded[1]) == len(loaded[2])


@few
@given(damaged(b'chan_id,spacecraft,anomaly_sequences,class,num_values\nP-2,SMAP,"[[3, 5], [29, 29]]",[point],30\n'))
def test_telemetry_table(raw):
    assert in_file(raw, "labeled_anomalies.csv", channels_there) in (None, [])  # refused, or sound: no channel lies beside it


def channels_there(path: Path) -> list:
    try:
        return list(from_telemanom(path, "smap"))
    except FileNotFoundError:  # the table is sound and its channel is, rightly, not there
        return []
