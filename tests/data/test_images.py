import gzip
import io
import struct
import tarfile

import numpy as np
import pytest
from PIL import Image

from assay.data import DataUnavailable, load_images, needs
from assay.data.image_files import from_hub, seeded_split
from assay.data.image_sets import cifar_binary, jpeg_npz

RNG = np.random.default_rng(0)


def check(data):
    n = len(data.images)
    assert data.images.dtype == np.uint8
    assert data.images.ndim == 4
    assert data.labels.shape == data.is_test.shape == (n,)
    assert data.labels.dtype == np.int64
    assert data.is_test.dtype == bool
    assert set(np.unique(data.labels)) == set(range(len(data.classes)))
    assert 0 < data.is_test.sum() < n


def test_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    data = load_images("digits")
    check(data)
    assert np.abs(data.images[..., 0] / 255 * 16 - load_digits().images).max() < 16 / 255
    assert data.is_test.mean() == pytest.approx(0.2, abs=0.002)
    assert np.array_equal(data.is_test, load_images("digits").is_test)


@pytest.mark.parametrize(("name", "shape", "classes"), [("mnist", (28, 28, 1), 10), ("notmnist", (28, 28, 1), 10)])
def test_idx_sets(name, shape, classes):
    needs(name)
    data = load_images(name)
    check(data)
    assert data.images.shape[1:] == shape
    assert len(data.classes) == classes
    # a nearest-mean classifier knows them: pictures and labels belong together
    means = np.stack([data.images[~data.is_test & (data.labels == k)].mean(0) for k in range(classes)]).reshape(classes, -1)
    pixels = data.images[data.is_test].reshape(int(data.is_test.sum()), -1).astype(float)
    nearest = (-2 * pixels @ means.T + (means**2).sum(1)).argmin(1)
    assert (nearest == data.labels[data.is_test]).mean() > 0.7


@pytest.mark.slow
@pytest.mark.parametrize(("name", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_cifar(name, classes):
    needs(name)
    data = load_images(name)
    check(data)
    assert data.images.shape[1:] == (32, 32, 3)
    assert len(data.classes) == classes
    assert f"{len(data.images):,}" in data.source
    assert 90 < data.images.mean() < 140  # the mean pixel of CIFAR lies near 120


def cifar_files(folder, label_bytes, names, train, test, classes):
    folder.mkdir(parents=True)
    pixels, labels = {}, {}
    for name in [*train, test]:
        pixels[name], labels[name] = RNG.integers(0, 256, (4, 32, 32, 3), np.uint8), RNG.integers(0, len(classes), 4)
        records = [
            bytes([0] * (label_bytes - 1) + [label]) + image.transpose(2, 0, 1).tobytes()
            for image, label in zip(pixels[name], labels[name], strict=True)
        ]
        (folder / name).write_bytes(b"".join(records))
    (folder / names).write_text("\n".join(classes) + "\n\n")
    order = [*train, test]
    return np.concatenate([pixels[f] for f in order]), np.concatenate([labels[f] for f in order])


def test_the_full_cifar_is_preferred_to_the_subset_and_reads_as_folder_and_as_archive(empty_home, monkeypatch):
    own = empty_home / "own"
    folder = own / "cifar-10-batches-bin"
    images, labels = cifar_files(
        folder, 1, "batches.meta.txt", [f"data_batch_{i}.bin" for i in range(1, 6)], "test_batch.bin", "abcdefghij"
    )
    write_jpeg_npz(own / "cifar_subsets" / "cifar10_subset_jpeg.npz")
    monkeypatch.setenv("ASSAY_DATA", str(own))
    data = load_images("cifar10")
    assert np.array_equal(data.images, images)
    assert np.array_equal(data.labels, labels)
    assert data.is_test.tolist() == [False] * 20 + [True] * 4
    assert data.source == "cifar10: the full set, 24 images"
    with tarfile.open(own / "cifar-10-binary.tar.gz", "w:gz") as archive:
        archive.add(folder, folder.name)
    assert np.array_equal(cifar_binary(own / "cifar-10-binary.tar.gz", "cifar10").__getitem__(0), images)
    folder.rename(own / "elsewhere")
    (own / "cifar-10-binary.tar.gz").unlink()
    assert "a subset of 3 images" in load_images("cifar10").source


def test_cifar100_takes_the_fine_label(tmp_path):
    classes = [f"c{i}" for i in range(100)]
    images, labels = cifar_files(tmp_path / "c", 2, "fine_label_names.txt", ["train.bin"], "test.bin", classes)
    got = cifar_binary(tmp_path / "c", "cifar100")
    assert np.array_equal(got[0], images)
    assert np.array_equal(got[1], labels)
    (tmp_path / "c" / "train.bin").write_bytes(b"\0" * 3073)
    with pytest.raises(ValueError, match="no multiple of 3074"):
        cifar_binary(tmp_path / "c", "cifar100")


def idx(array):
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return gzip.compress(head + array.astype(np.uint8).tobytes())


def test_all_of_mnist_where_its_training_files_are_there(empty_home, monkeypatch):
    raw = empty_home / "own" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, n in (("train", 30), ("t10k", 10)):
        (raw / f"{part}-images-idx3-ubyte.gz").write_bytes(idx(RNG.integers(0, 256, (n, 28, 28))))
        (raw / f"{part}-labels-idx1-ubyte.gz").write_bytes(idx(np.arange(n) % 10))
    monkeypatch.setenv("ASSAY_DATA", str(empty_home / "own"))
    data = load_images("mnist")
    check(data)
    assert data.is_test.tolist() == [False] * 30 + [True] * 10
    (raw / "t10k-labels-idx1-ubyte.gz").write_bytes(idx(np.arange(9)))
    with pytest.raises(ValueError, match=r"has shape \(10, 28, 28\)"):
        load_images("mnist")


def write_jpeg_npz(path, n=3, **changed):
    path.parent.mkdir(parents=True, exist_ok=True)
    files = []
    for i in range(n):
        buffer = io.BytesIO()
        Image.fromarray(np.full((8, 8, 3), 60 * i, np.uint8)).save(buffer, "JPEG", quality=95)
        files.append(np.frombuffer(buffer.getvalue(), np.uint8))
    arrays = {
        "jpeg": np.concatenate(files),
        "offsets": np.cumsum([0, *map(len, files)]),
        "label": np.arange(n, dtype=np.uint8) % 2,
        "is_test": np.arange(n) == n - 1,
        "classes": np.array(["dark", "bright"]),
    }
    np.savez(path, **{**arrays, **changed})
    return path


def test_encoded_images_in_an_npz(tmp_path):
    images, labels, is_test, classes, _ = jpeg_npz(write_jpeg_npz(tmp_path / "a.npz"), "x")
    assert np.abs(images.mean((1, 2, 3)) - [0, 60, 120]).max() < 2
    assert labels.tolist() == [0, 1, 0]
    assert is_test.tolist() == [False, False, True]
    assert classes == ("dark", "bright")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"label": np.array([0, 1, 2], np.uint8)}, r"labels must lie in \[0, 2\)"),
        ({"offsets": np.array([0, 5, 3, 9])}, "offsets must rise"),
        ({"offsets": np.array([0, 5, 9, 10**9])}, "offsets must rise"),
        ({"is_test": np.zeros(2, bool)}, "wrong shape or type"),
        ({"classes": np.array([1, 2])}, "wrong shape or type"),
        ({"jpeg": np.zeros(5000, np.uint8)}, "image 0 is not an image"),
        ({"classes": np.array([object()], object)}, "not an npz archive that can be read"),
    ],
)
def test_an_npz_that_is_wrong_is_told_so(tmp_path, changed, message):
    with pytest.raises(ValueError, match=message):
        jpeg_npz(write_jpeg_npz(tmp_path / "a.npz", **changed), "x")


def save(path, size, value, mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(path)


def test_a_folder_of_ones_own(tmp_path):
    for i in range(10):
        save(tmp_path / "cat" / f"{i}.png", (6, 4), (i, 0, 0))
        save(tmp_path / "dog" / "more" / f"{i}.png", (6, 4), i, "L")
    (tmp_path / "dog" / "notes.txt").write_text("not an image")
    data = load_images(str(tmp_path))
    check(data)
    assert data.images.shape == (20, 4, 6, 3)
    assert data.classes == ("cat", "dog")
    assert [int(data.is_test[data.labels == k].sum()) for k in (0, 1)] == [2, 2]
    assert load_images(str(tmp_path), size=5).images.shape == (20, 5, 5, 3)


def test_a_folder_with_its_own_split(tmp_path):
    for part, n in (("train", 3), ("test", 2)):
        for kind in "ab":
            for i in range(n):
                save(tmp_path / part / kind / f"{i}.png", (4, 4), i, "L")
    data = load_images(str(tmp_path))
    check(data)
    assert data.images.shape == (10, 4, 4, 1)
    assert data.is_test.sum() == 4


def test_bad_folders(tmp_path):
    with pytest.raises(ValueError, match="no images in subfolders"):
        load_images(str(tmp_path))
    save(tmp_path / "a" / "1.png", (4, 4), 0, "L")
    save(tmp_path / "a" / "2.png", (5, 4), 0, "L")
    with pytest.raises(ValueError, match=r"differ in size.*pass size="):
        load_images(str(tmp_path))
    (tmp_path / "a" / "3.png").write_bytes(b"\x89PNG broken")
    with pytest.raises(ValueError, match=r"3\.png is not an image"):
        load_images(str(tmp_path), size=4)
    with pytest.raises(ValueError, match="a size of its own"):
        load_images("digits", size=4)
    with pytest.raises(ValueError, match=r"\[1, 8192\], got 0"):
        load_images(str(tmp_path), size=0)
    with pytest.raises(DataUnavailable, match="'cifar10'"):
        load_images("no-such-images")


@pytest.mark.slow  # importing datasets takes a while
def test_a_data_set_in_the_hubs_layout(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for part, n in (("train", 3), ("test", 2)):
        for kind in ("cat", "dog"):
            for i in range(n):
                save(tmp_path / "set" / part / kind / f"{i}.png", (4, 4), (i, 0, 0))
    images, labels, is_test, classes, source = from_hub(str(tmp_path / "set"), None)
    assert images.shape == (10, 4, 4, 3)
    assert sorted(labels.tolist()) == [0] * 5 + [1] * 5
    assert is_test.sum() == 4
    assert classes == ("cat", "dog")
    assert "10 images" in source


def test_the_split_takes_a_fifth_of_each_class_and_never_all():
    labels = np.repeat([0, 1, 2], [100, 10, 1])
    is_test = seeded_split(labels)
    assert [int(is_test[labels == k].sum()) for k in range(3)] == [20, 2, 0]
