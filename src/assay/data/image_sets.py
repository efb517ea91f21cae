"""The image sets known by name: digits, MNIST, notMNIST, CIFAR-10 and CIFAR-100."""

import tarfile
import zlib
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from .download import obtain
from .idx import read_idx
from .image_files import Loaded, decode, seeded_split, stack
from .npz import read_npz
from .places import find

_TORONTO = "https://www.cs.toronto.edu/~kriz"
_MNIST = "https://storage.googleapis.com/cvdf-datasets/mnist"
_NOTMNIST = "https://raw.githubusercontent.com/davidflanagan/notMNIST-to-MNIST/17823f4d4a3acd8317c07866702d2eb2ac79c7a0"


def digits() -> Loaded:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = np.rint(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)  # scikit-learn's run from 0 to 16
    labels = labels.astype(np.int64)
    return images, labels, seeded_split(labels), tuple("0123456789"), "scikit-learn digits, 1,797 images"


# ---- IDX: MNIST and notMNIST ------------------------------------------------------------------------------------------

_IDX_SHA256 = {
    "mnist": {
        "train-images": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "train-labels": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "t10k-images": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "t10k-labels": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    },
    "notmnist": {
        "t10k-images": "70ae9e06201f2827e5b0a3781a3169d735dd2efc69996b9eeaee7f10ed4044d7",
        "t10k-labels": "1fa03836e01c862542f8eb83463bb951bebec6fcb3efa28dad748c6b38a9021b",
    },
}


def idx_set(name: str, home: str, classes: str) -> Loaded:
    """MNIST's four files where they are there (or can be had); else its test files alone, with a split of our own."""
    train = _idx_part(name, "train", home, fetch=False)
    test = _idx_part(name, "t10k", home, fetch=train is not None)
    if test is None:  # nothing on disk: download what the set consists of
        if "train-images" in _IDX_SHA256[name]:
            train = _idx_part(name, "train", home, fetch=True)
        test = _idx_part(name, "t10k", home, fetch=True)
    assert test is not None
    images = test[0] if train is None else np.concatenate([train[0], test[0]])
    labels = test[1] if train is None else np.concatenate([train[1], test[1]])
    if labels.max(initial=0) >= len(classes):
        raise ValueError(f"{name} has the label {labels.max()}; expected 0 to {len(classes) - 1}")
    is_test = seeded_split(labels) if train is None else np.arange(len(labels)) >= len(train[1])
    what = "its 10,000 test images, a fifth of them held out" if train is None else f"all {len(labels):,} images"
    return images[..., None], labels, is_test, tuple(classes), f"{name}: {what}"


def _idx_part(name: str, part: str, home: str, *, fetch: bool) -> tuple[np.ndarray, np.ndarray] | None:
    paths = []
    for kind in (f"{part}-images", f"{part}-labels"):
        file = f"{kind}-idx{3 if kind.endswith('images') else 1}-ubyte"
        folder = {"mnist": "MNIST", "notmnist": "notMNIST"}[name]
        # the second is torchvision's layout, and where downloads go
        places = (f"mnist_family/{name}-{file}.gz", f"{folder}/raw/{file}", f"{folder}/raw/{file}.gz")
        if not fetch and find(*places) is None:
            return None
        paths.append(obtain(name, places, f"{home}/{file}.gz", _IDX_SHA256[name][kind], home))
    images, labels = read_idx(paths[0]), read_idx(paths[1])
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise ValueError(
            f"{paths[0]} has shape {images.shape} and {paths[1]} has {labels.shape}; expected (n, height, width), (n,)"
        )
    return images, labels.astype(np.int64)


# ---- CIFAR ------------------------------------------------------------------------------------------------------------

_CIFAR = {  # archive, folder in it, train files, test files, label bytes a record (the last one counts), file of class names
    "cifar10": (
        "cifar-10-binary.tar.gz",
        "cifar-10-batches-bin",
        [f"data_batch_{i}.bin" for i in range(1, 6)],
        "test_batch.bin",
        1,
        "batches.meta.txt",
    ),
    "cifar100": ("cifar-100-binary.tar.gz", "cifar-100-binary", ["train.bin"], "test.bin", 2, "fine_label_names.txt"),
}
_CIFAR_SHA256 = {
    "cifar10": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    "cifar100": "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
}


def cifar(name: str) -> Loaded:
    """The full set in its binary form (never the pickled one), else the subset of JPEGs, else the full one downloaded."""
    archive, folder, *_ = _CIFAR[name]
    subset = find(jpegs := f"cifar_subsets/{name}_subset_jpeg.npz")
    if subset is not None and find(folder, archive) is None:
        return jpeg_npz(subset, name)
    places = (jpegs, folder, archive) if subset is None else (folder, archive)
    return cifar_binary(obtain(name, places, f"{_TORONTO}/{archive}", _CIFAR_SHA256[name], f"{_TORONTO}/cifar.html"), name)


def cifar_binary(path: Path, name: str) -> Loaded:
    """CIFAR's binary version: records of one or two label bytes and 3,072 bytes of pixels, channel after channel."""
    _, folder, train, test, label_bytes, names = _CIFAR[name]
    files = _members(path, folder, [*train, test, names])
    classes = tuple(files[names].decode("utf-8", "strict").split())
    images, labels, is_test = [], [], []
    for file in [*train, test]:
        if not files[file] or len(files[file]) % (label_bytes + 3072):
            raise ValueError(f"{path}: {file} has {len(files[file])} bytes, no multiple of {label_bytes + 3072}")
        records = np.frombuffer(files[file], np.uint8).reshape(-1, label_bytes + 3072)
        labels.append(records[:, label_bytes - 1].astype(np.int64))
        images.append(records[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))  # (n, 32, 32, 3)
        is_test.append(np.full(len(records), file == test))
    y = np.concatenate(labels)
    if y.max() >= len(classes):
        raise ValueError(f"{path} has the label {y.max()} and names only {len(classes)} classes")
    return np.concatenate(images), y, np.concatenate(is_test), classes, f"{name}: the full set, {len(y):,} images"


def _members(path: Path, folder: str, names: list[str]) -> dict[str, bytes]:
    if path.is_dir():
        return {name: (path / name).read_bytes() for name in names}
    try:
        with tarfile.open(path) as archive:
            streams = {name: archive.extractfile(f"{folder}/{name}") for name in names}
            return {name: stream.read() if stream else b"" for name, stream in streams.items()}
    except (tarfile.TarError, OSError, EOFError, KeyError, zlib.error) as wrong:
        raise ValueError(f"{path} is not the archive it should be: {wrong}") from None


def jpeg_npz(path: Path, name: str) -> Loaded:
    """An npz with encoded images: ``jpeg`` bytes, ``offsets (n + 1,)``, ``label``, ``is_test``, ``classes``."""
    arrays = read_npz(path)
    keys = ("jpeg", "offsets", "label", "is_test", "classes")
    if not set(keys) <= set(arrays):
        raise ValueError(f"{path} has the arrays {', '.join(arrays)}; expected {', '.join(keys)}")
    jpeg, offsets, labels, is_test, classes = (arrays[key] for key in keys)
    n = len(labels) if labels.ndim == 1 else -1
    sound = n > 0 and jpeg.ndim == 1 and offsets.shape == (n + 1,) and is_test.shape == (n,) and classes.ndim == 1
    integers = jpeg.dtype == np.uint8 and offsets.dtype.kind in "iu" and labels.dtype.kind in "iu" and is_test.dtype == bool
    if not sound or not integers or classes.dtype.kind != "U":
        raise ValueError(f"{path}: arrays of the wrong shape or type for {n} encoded images")
    offsets, labels = offsets.astype(np.int64), labels.astype(np.int64)
    if offsets[0] < 0 or offsets[-1] > len(jpeg) or (np.diff(offsets) < 0).any():
        raise ValueError(f"{path}: offsets must rise within [0, {len(jpeg)}]")
    if labels.min() < 0 or labels.max() >= len(classes):
        raise ValueError(f"{path}: labels must lie in [0, {len(classes)})")
    raw = jpeg.tobytes()
    pieces = (decode(raw[a:b], None, f"{path} image {i}") for i, (a, b) in enumerate(pairwise(offsets)))
    images = stack(pieces, [f"image {i}" for i in range(n)])
    return images, labels, is_test, tuple(map(str, classes)), f"{name}: a subset of {n:,} images, from {path.name}"


LOADERS: dict[str, Callable[[], Loaded]] = {
    "digits": digits,
    "cifar10": partial(cifar, "cifar10"),
    "cifar100": partial(cifar, "cifar100"),
    "mnist": partial(idx_set, "mnist", _MNIST, "0123456789"),
    "notmnist": partial(idx_set, "notmnist", _NOTMNIST, "ABCDEFGHIJ"),
}
