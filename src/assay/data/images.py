"""Labelled images by name, as one array."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from . import image_files, image_sets
from .hub import is_hub_id
from .places import DataUnavailable


class Images(NamedTuple):
    """Images with their labels and the data set's own split.

    Shapes: ``images (n, height, width, channels)`` uint8 with 1 or 3 channels, ``labels (n,)`` int64 that count into
    ``classes``, ``is_test (n,)`` bool. ``source`` says in words what was read.
    """

    images: np.ndarray
    labels: np.ndarray
    is_test: np.ndarray
    classes: tuple[str, ...]
    source: str


def load_images(name: str, *, size: int | None = None) -> Images:
    """Labelled images as one array.

    Args:
        name: ``"digits"`` (scikit-learn's, 8×8), ``"mnist"``, ``"notmnist"`` (28×28), ``"cifar10"``, ``"cifar100"``
            (32×32×3; the full set where it is on disk, else the subset of 12,000 where that is, else the full set is
            downloaded), a folder whose subfolders are the classes (itself maybe split into ``train`` and ``test``), or
            ``"owner/name"`` of the Hugging Face hub. Where a set has no split, a seeded fifth of each class is test.
        size: Scale the images of a folder or of the hub to ``size × size``. Needed where they differ in size.

    Raises:
        ValueError: a file that is not what its name says; images of several sizes and no `size`.
        DataUnavailable: nothing of that name.

    Example:
        >>> digits = load_images("digits")
        >>> digits.images.shape, int(digits.is_test.sum()), len(digits.classes)
        ((1797, 8, 8, 1), 359, 10)
    """
    if size is not None and not 1 <= size <= 8192:
        raise ValueError(f"size must lie in [1, 8192], got {size}")
    if name in image_sets.LOADERS:
        if size is not None:
            raise ValueError(f"size is for folders and the hub; {name!r} has a size of its own")
        return Images(*image_sets.LOADERS[name]())
    path = Path(name).expanduser()
    if path.is_dir():
        return Images(*image_files.from_folder(path, size))
    if is_hub_id(name):
        return Images(*image_files.from_hub(name, size))
    known = ", ".join(map(repr, image_sets.LOADERS))
    raise DataUnavailable(name, [path.absolute()], f"a folder of images, a hub id 'owner/name', or one of {known}")
