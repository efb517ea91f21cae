"""Images from single files: a folder of classes, the hub, or many encoded images in one array."""

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from .hub import hub_rows

Loaded = tuple[np.ndarray, np.ndarray, np.ndarray, tuple[str, ...], str]
_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}


def from_folder(folder: Path, size: int | None) -> Loaded:
    """``folder/<class>/*`` or ``folder/{train,test}/<class>/*``."""
    parts = {part: folder / part for part in ("train", "test", "val") if (folder / part).is_dir()}
    split = "train" in parts and len(parts) > 1
    files: list[tuple[Path, str, bool]] = []
    for part, home in parts.items() if split else [("", folder)]:
        for kind in sorted(path for path in home.iterdir() if path.is_dir()):
            found = sorted(path for path in kind.rglob("*") if path.suffix.lower() in _SUFFIXES)
            files += [(path, kind.name, part != "train") for path in found]
    if not files:
        raise ValueError(f"{folder} holds no images in subfolders; expected {folder}/<class>/<image>.png")
    classes = tuple(sorted({kind for _, kind, _ in files}))
    number = {kind: k for k, kind in enumerate(classes)}
    labels = np.array([number[kind] for _, kind, _ in files], dtype=np.int64)
    is_test = np.array([test for *_, test in files]) if split else seeded_split(labels)
    images = stack((decode(path, size, str(path)) for path, *_ in files), [str(path) for path, *_ in files])
    return images, labels, is_test, classes, f"{len(files)} images from {folder}"


def from_hub(name: str, size: int | None) -> Loaded:
    """The splits train and test (or validation) of a hub data set with one image and one class-label column."""
    splits = hub_rows(name, None)
    if "train" not in splits:
        raise ValueError(f"data set {name!r} has no split 'train'; it has {', '.join(splits)}")
    test = next((split for split in ("test", "validation", "valid") if split in splits), None)
    image_key, label_key = _columns(name, splits["train"].features)
    classes = tuple(splits["train"].features[label_key].names)
    images, labels, is_test = [], [], []
    for split in ["train"] if test is None else ["train", test]:
        rows = splits[split]
        images += [to_array(row[image_key], size) for row in rows]
        labels += rows[label_key]
        is_test += [split != "train"] * len(rows)
    y = np.array(labels, dtype=np.int64)
    if len(y) == 0 or y.min() < 0:
        raise ValueError(f"data set {name!r} has no rows, or rows without a label")
    mask = np.array(is_test) if test else seeded_split(y)
    return stack(images, [f"row {i}" for i in range(len(images))]), y, mask, classes, f"{len(y):,} images from hub {name}"


def _columns(name: str, features: Any) -> tuple[str, str]:
    def only(kind: str, prefer: Sequence[str]) -> str:
        found = [key for key, feature in features.items() if type(feature).__name__ == kind]
        best = next((key for key in prefer if key in found), found[0] if len(found) == 1 else None)
        if best is None:
            raise ValueError(
                f"data set {name!r} has {len(found)} columns of type {kind}; expected one. Columns: {', '.join(features)}"
            )
        return best

    return only("Image", ("image", "img")), only("ClassLabel", ("label", "fine_label"))


def decode(source: Path | bytes, size: int | None, label: str) -> np.ndarray:
    """One image file as ``(height, width, 3)`` or ``(height, width, 1)`` uint8."""
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            return to_array(image, size)
    except Exception as wrong:  # Pillow's decoders raise whatever they stumble over
        raise ValueError(f"{label} is not an image that can be read: {wrong}") from None


def to_array(image: Image.Image, size: int | None) -> np.ndarray:
    grey = image.mode in {"1", "L"}
    image = image.convert("L" if grey else "RGB")
    if size is not None and image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(image, dtype=np.uint8).reshape(image.height, image.width, 1 if grey else 3)


def stack(images: Iterable[np.ndarray], names: Sequence[str]) -> np.ndarray:
    """One array of all; grey images among coloured ones become coloured."""
    arrays = list(images)
    channels = max(a.shape[2] for a in arrays)
    arrays = [np.repeat(a, 3, axis=2) if a.shape[2] < channels else a for a in arrays]
    for array, name in zip(arrays, names, strict=True):
        if array.shape != arrays[0].shape:
            raise ValueError(
                f"images differ in size: {names[0]} is {arrays[0].shape[:2]}, {name} is {array.shape[:2]}; pass size="
            )
    return np.stack(arrays)


def seeded_split(labels: np.ndarray, share: float = 0.2) -> np.ndarray:
    """A fifth of each class as test, the same one every time; at least one row of each class stays in training."""
    rng = np.random.default_rng(0)
    is_test = np.zeros(len(labels), dtype=bool)
    order = rng.permutation(len(labels))
    for k in np.unique(labels):
        rows = order[labels[order] == k]
        is_test[rows[: min(round(share * len(rows)), len(rows) - 1)]] = True
    return is_test
