"""The table of data sets that have a name: what they are, under which licence, where they come from, whether they are here."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from .nab_files import GROUPS, SHA256
from .places import find


@dataclass(frozen=True)
class DataSet:
    """A named data set.

    ``present`` says whether it can be loaded without a network, ``path`` by which file or folder that was told (None
    where a dependency ships the set, or where it is absent). A licence that forbids commercial use begins with ``NC``.
    """

    name: str
    kind: str
    summary: str
    licence: str
    home: str
    present: bool = False
    path: Path | None = None
    places: tuple[str, ...] = field(default=(), repr=False)
    """Paths below the searched folders, any one of which makes the set present. None: a dependency ships it."""


def _images(name: str, summary: str, licence: str, home: str, *places: str) -> DataSet:
    return DataSet(name, "images", summary, licence, home, places=places)


def _series(name: str, summary: str, licence: str, home: str, *places: str) -> DataSet:
    return DataSet(name, "series", summary, licence, home, places=places)


def _nab(name: str, summary: str, group: str) -> DataSet:
    last = f"{group}/{list(SHA256[group])[-1]}.csv"  # files are fetched in order: with the last one all are here
    return _series(name, summary, "MIT", "https://github.com/numenta/NAB", f"series/NAB/{last}", f"NAB/data/{last}")


_TORONTO = "https://www.cs.toronto.edu/~kriz/cifar.html"
_KRIZHEVSKY = "none stated; given for research, cite Krizhevsky 2009"
_TELEMANOM = "https://github.com/khundman/telemanom"

_TABLE = (
    DataSet("stdlib", "text", "source of Python's standard library, 10 million characters", "PSF-2.0", "Python itself"),
    DataSet("pydoc", "text", "Python's language reference, 0.5 million characters", "PSF-2.0", "Python itself"),
    DataSet(
        "reviews",
        "reviews",
        "3,000 review sentences of films, phones and restaurants, labelled positive or not",
        "CC BY 4.0",
        "https://archive.ics.uci.edu/dataset/331/sentiment+labelled+sentences",
        places=tuple(f"{folder}/yelp_labelled.txt" for folder in ("reviews", "sentiment labelled sentences")),
    ),
    DataSet(
        "preferences",
        "preferences",
        "2,312 human preference pairs, HH-RLHF harmless-base test; its prompts are made to provoke",
        "MIT",
        "https://huggingface.co/datasets/Anthropic/hh-rlhf",
        places=("preferences/hh_harmless_base_test.jsonl.gz", "hh-rlhf/harmless-base/test.jsonl.gz"),
    ),
    DataSet(
        "letters",
        "letters",
        "20,000 printed capital letters of 20 fonts, sixteen numbers each",
        "CC BY 4.0",
        "https://archive.ics.uci.edu/dataset/59/letter+recognition",
        places=tuple(f"{folder}/letter-recognition.data" for folder in ("letters", "letter-recognition")),
    ),
    _images("digits", "1,797 handwritten digits, 8×8 grey", "CC BY 4.0", "scikit-learn (UCI Optical Digits)"),
    _images(
        "mnist",
        "70,000 handwritten digits, 28×28 grey, or only its 10,000 test images",
        "CC BY-SA 3.0",
        "https://storage.googleapis.com/cvdf-datasets/mnist",
        *(f"MNIST/raw/t10k-labels-idx1-ubyte{ending}" for ending in (".gz", "")),
        "mnist_family/mnist-t10k-labels-idx1-ubyte.gz",
    ),
    _images(
        "notmnist",
        "10,000 letters A to J from many fonts, 28×28 grey",
        "MIT",
        "https://github.com/davidflanagan/notMNIST-to-MNIST",
        *(f"notMNIST/raw/t10k-labels-idx1-ubyte{ending}" for ending in (".gz", "")),
        "mnist_family/notmnist-t10k-labels-idx1-ubyte.gz",
    ),
    _images(
        "cifar10",
        "photographs of 10 kinds, 32×32 colour: 60,000, or a subset of 12,000",
        _KRIZHEVSKY,
        _TORONTO,
        "cifar-10-batches-bin",
        "cifar-10-binary.tar.gz",
        "cifar_subsets/cifar10_subset_jpeg.npz",
    ),
    _images(
        "cifar100",
        "photographs of 100 kinds, 32×32 colour: 60,000, or a subset of 12,000",
        _KRIZHEVSKY,
        _TORONTO,
        "cifar-100-binary",
        "cifar-100-binary.tar.gz",
        "cifar_subsets/cifar100_subset_jpeg.npz",
    ),
    _nab("nab", "37 real series with labelled anomalies, in the first four groups below", GROUPS[-1]),
    _nab("nab/realAWSCloudwatch", "17 series of cloud servers", "realAWSCloudwatch"),
    _nab("nab/realAdExchange", "6 series of advertisement prices", "realAdExchange"),
    _nab("nab/realKnownCause", "7 series whose anomalies are explained", "realKnownCause"),
    _nab("nab/realTraffic", "7 series of road traffic", "realTraffic"),
    _nab("nab/realTweets", "10 series of mentions of companies", "realTweets"),
    _nab("nab/artificialNoAnomaly", "5 artificial series without an anomaly", "artificialNoAnomaly"),
    _nab("nab/artificialWithAnomaly", "6 artificial series with anomalies", "artificialWithAnomaly"),
    *(
        _series(name, what, "Apache-2.0", _TELEMANOM, "series/smap_msl_dim0.npz", "telemanom/labeled_anomalies.csv")
        for name, what in (
            ("smap", "telemetry of a satellite with labelled anomalies, 53 channels"),
            ("msl", "telemetry of the Mars rover with labelled anomalies, 27 channels"),
        )
    ),
    _series(
        "exchange_rate",
        "eight daily exchange rates, 1990 to 2016, 7,588 days",
        "none stated",
        "https://github.com/laiguokun/multivariate-time-series-data",
        "series/forecasting/exchange_rate.txt.gz",
        "exchange_rate/exchange_rate.txt.gz",
    ),
)


def available() -> list[DataSet]:
    """Every data set that has a name, and whether it is here. Looks at a few paths; reads nothing, imports nothing heavy.

    Besides these names, the loaders take paths of your own files and ids of the Hugging Face hub.

    Example:
        >>> [data.name for data in available() if data.kind == "text" and data.present]
        ['stdlib', 'pydoc']
    """
    paths = [find(*data.places) for data in _TABLE]
    return [
        replace(data, present=not data.places or path is not None, path=path) for data, path in zip(_TABLE, paths, strict=True)
    ]
