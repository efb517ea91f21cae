"""Time series by name, with labels of anomalies where the set has them."""

import gzip
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from . import nab, telemetry
from .csv_series import parse_csv
from .download import obtain
from .places import DataUnavailable, find, looked_at

_EXCHANGE = "exchange_rate/exchange_rate.txt.gz"
_EXCHANGE_RAW = (
    "https://raw.githubusercontent.com/laiguokun/multivariate-time-series-data/7f402f185cc2435b5e66aed13a3b560ed142e023"
)
_EXCHANGE_SHA256 = "6a4fbb561dcdee43f071a83badbeec9223a335552278348656738b556f1c2e9d"


class Series(NamedTuple):
    """One series. Shapes: ``values (time, channels)`` float64; ``labels (time,)`` bool, True where anomalous, or None;
    ``train (time', channels)`` float64, an earlier stretch taken as normal, or None. `load_series` accepts its ``name``
    (except for a CSV file) and then returns this series alone."""

    name: str
    values: np.ndarray
    labels: np.ndarray | None = None
    train: np.ndarray | None = None


def load_series(name: str) -> list[Series]:
    """Every series of a set, in the order of their names.

    Args:
        name: ``"nab"``: the 37 real series of the Numenta Anomaly Benchmark from road traffic, cloud servers,
            advertisement exchanges and known causes, with the benchmark's anomaly windows as labels. ``"nab/<group>"``:
            one group, also ``realTweets``, ``artificialNoAnomaly`` and ``artificialWithAnomaly``.
            ``"smap"``, ``"msl"``: channel 0 (the telemetry) of each channel of NASA's satellite and rover sets.
            ``"exchange_rate"``: eight daily exchange rates, 1990 to 2016, as one series. A path to a CSV file: columns
            are channels; a first row of names is optional; a column named ``label``, ``anomaly`` or ``is_anomaly`` of
            0 and 1 gives the labels; a column of time stamps is left out.

    Raises:
        ValueError: a file that is not what its name says, with line and column.
        DataUnavailable: nothing of that name.
    """
    group, _, member = name.partition("/")
    if group == "nab":
        found = [Series(*row) for row in nab.load(member)]
    elif group in ("smap", "msl"):
        found = [Series(*row) for row in telemetry.load(group)]
        found = [series for series in found if not member or series.name == name]
        if not found:
            raise DataUnavailable(name, looked_at(*telemetry.PLACES), telemetry.HOME, f"{group} has no channel {member!r}")
    elif name == "exchange_rate":
        found = [Series(name, _exchange_rate())]
    else:
        path = Path(name).expanduser()
        found_path = path if path.is_file() else find(name) if name else None
        if found_path is None or not found_path.is_file():
            home = "a CSV file, or one of 'nab', 'nab/<group>', 'smap', 'msl', 'exchange_rate'"
            raise DataUnavailable(name, [path.absolute(), *looked_at(name)], home)
        found = [Series(found_path.stem, *parse_csv(found_path.read_bytes(), str(found_path)))]
    return found


def _exchange_rate() -> np.ndarray:
    places = ("series/forecasting/exchange_rate.txt.gz", _EXCHANGE)
    home = "https://github.com/laiguokun/multivariate-time-series-data"
    path = obtain("exchange_rate", places, f"{_EXCHANGE_RAW}/{_EXCHANGE}", _EXCHANGE_SHA256, home)
    try:
        raw = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as wrong:
        raise ValueError(f"{path} is not a whole gzip file: {wrong}") from None
    return parse_csv(raw, str(path))[0]
