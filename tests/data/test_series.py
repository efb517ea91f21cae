import gzip
import json

import numpy as np
import pytest

from assay.data import DataUnavailable, load_series, needs
from assay.data.csv_series import parse_csv
from assay.data.nab_files import GROUPS, SHA256
from assay.data.telemetry import from_npz, from_telemanom


def check(series):
    assert series.values.dtype == np.float64
    assert series.values.ndim == 2
    assert np.isfinite(series.values).all()
    if series.labels is not None:
        assert series.labels.dtype == bool
        assert series.labels.shape == (len(series.values),)
    if series.train is not None:
        assert series.train.shape[1] == series.values.shape[1]


@pytest.mark.slow
def test_the_anomaly_benchmark():
    needs("nab")
    found = load_series("nab")
    for series in found:
        check(series)
    assert [s.name for s in found] == [f"nab/{group}/{name}" for group in GROUPS for name in SHA256[group]]
    assert len(found) == 37
    # the benchmark's windows cover about a tenth of each series that has anomalies (its own rule)
    shares = [s.labels.mean() for s in found if s.labels.any()]
    assert len(shares) == 36
    assert 0.08 < np.mean(shares) < 0.12
    assert [s.name for s in load_series("nab/realTraffic")] == [s.name for s in found if "/realTraffic/" in s.name]


def test_a_name_brings_back_its_series():
    needs("nab/realTraffic")
    series = load_series("nab/realTraffic")[3]
    [again] = load_series(series.name)
    assert again.name == series.name
    assert np.array_equal(again.values, series.values)
    assert np.array_equal(again.labels, series.labels)


def test_both_ends_of_a_window_are_inside(empty_home, monkeypatch):
    home = empty_home / "own" / "series" / "NAB"
    (home / "realTraffic").mkdir(parents=True)
    rows = [f"2020-01-01 00:0{i}:00,{i}" for i in range(8)]
    (home / "realTraffic" / "speed_6005.csv").write_text("timestamp,value\n" + "\n".join(rows))
    spans = [["2020-01-01 00:02:00.000000", "2020-01-01 00:04:00.000000"], ["2020-01-01 00:06:30", "2020-01-01 00:09:00"]]
    (home / "combined_windows.json").write_text(json.dumps({"realTraffic/speed_6005.csv": spans}))
    monkeypatch.setenv("ASSAY_DATA", str(empty_home / "own"))
    [series] = load_series("nab/realTraffic/speed_6005")
    assert np.flatnonzero(series.labels).tolist() == [2, 3, 4, 7]
    assert series.values[:, 0].tolist() == list(range(8))


@pytest.mark.parametrize(("name", "count"), [("smap", 53), ("msl", 27)])
def test_telemetry(name, count):
    needs(name)
    found = load_series(name)
    assert len(found) == count
    for series in found:
        check(series)
        assert series.values.shape[1] == 1
        assert series.labels.any()
    [one] = load_series(found[5].name)
    assert np.array_equal(one.train, found[5].train)
    with pytest.raises(DataUnavailable, match="no channel 'Z-9'"):
        load_series(f"{name}/Z-9")


def test_telemetry_in_its_published_layout(empty_home, monkeypatch):
    home = empty_home / "own" / "telemanom"
    for part, n in (("train", 20), ("test", 30)):
        (home / "data" / part).mkdir(parents=True)
        np.save(home / "data" / part / "P-2.npy", np.arange(n * 3, dtype=float).reshape(n, 3))
    table = (
        "chan_id,spacecraft,anomaly_sequences,class,num_values\n"
        'P-2,SMAP,"[[3, 5], [29, 29]]","[point, point]",30\nP-2,SMAP,"[[10, 11]]",[point],30\nM-1,MSL,"[[1, 2]]",[point],9\n'
    )
    (home / "labeled_anomalies.csv").write_text(table)
    monkeypatch.setenv("ASSAY_DATA", str(empty_home / "own"))
    [series] = load_series("smap")
    assert series.name == "smap/P-2"
    assert np.flatnonzero(series.labels).tolist() == [3, 4, 5, 10, 11, 29]
    assert series.values[:, 0].tolist() == [3.0 * i for i in range(30)]
    assert series.train.shape == (20, 1)
    with pytest.raises(DataUnavailable, match=r"test/M-1\.npy"):
        load_series("msl")
    (home / "labeled_anomalies.csv").write_text(table.replace("[[3, 5]", "__import__('os')"))
    with pytest.raises(ValueError, match="a row that cannot be read"):
        list(from_telemanom(home / "labeled_anomalies.csv", "smap"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"SMAP_A_test": np.array([0.0, np.nan, 1.0])}, "1 values are not finite"),
        ({"SMAP_A_test_label": np.array([0, 1])}, "one for each"),
        ({"SMAP_A_test_label": np.array([0, 1, 2])}, "0 or 1"),
        ({"SMAP_A_train": np.array(["a"])}, "expected numbers"),
    ],
)
def test_telemetry_that_is_wrong_is_told_so(tmp_path, changed, message):
    arrays = {"SMAP_A_test": np.zeros(3), "SMAP_A_train": np.zeros(2), "SMAP_A_test_label": np.array([0, 1, 0])}
    np.savez(tmp_path / "t.npz", **{**arrays, **changed})
    with pytest.raises(ValueError, match=message):
        list(from_npz(tmp_path / "t.npz", "smap"))


def test_exchange_rates():
    needs("exchange_rate")
    [series] = load_series("exchange_rate")
    check(series)
    assert series.values.shape == (7588, 8)
    assert (series.values > 0).all()


def test_exchange_rates_that_are_broken(empty_home, monkeypatch):
    path = empty_home / "own" / "exchange_rate" / "exchange_rate.txt.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress(b"1,2\n3,4\n")[:-3])
    monkeypatch.setenv("ASSAY_DATA", str(empty_home / "own"))
    with pytest.raises(ValueError, match="not a whole gzip file"):
        load_series("exchange_rate")


def test_a_csv_of_ones_own(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("timestamp,a,label,b\n2020-01-01,1,0,2\n2020-01-02,3.5,1,-4e3\n")
    [series] = load_series(str(path))
    check(series)
    assert series.name == "mine"
    assert series.values.tolist() == [[1, 2], [3.5, -4000]]
    assert series.labels.tolist() == [False, True]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,2\n3,4\n", [[1, 2], [3, 4]]),
        ("x\n5\n6", [[5], [6]]),
        (",x\n0,5\n1,6\n", [[5], [6]]),  # as pandas writes it
        ("2020-01-01 10:00,7\n2020-01-01 11:00,8\n", [[7], [8]]),
        ('"a,b",c\r\n1,2\r\n', [[1, 2]]),
        ("﻿a\n1\n", [[1]]),
    ],
)
def test_forms_of_csv(text, values):
    got, labels = parse_csv(text.encode())
    assert got.tolist() == values
    assert labels is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no rows"),
        ("a,b\n", "holds no rows"),
        ("a,b\n1,2\n3\n", "line 3: 1 columns, expected 2"),
        ("a,b\n1,x\n", "line 2, column 2: expected a finite number, got 'x'"),
        ("a\n1\nnan\n", "line 3, column 1: expected a finite number, got 'nan'"),
        ("a\n1\n\n1e999\n", "line 4, column 1: expected a finite number, got '1e999'"),
        ("label\n1\n", "no column of numbers"),
        ("a,label\n1,2\n", "must hold 0 and 1 alone"),
        ("a,label,anomaly\n1,1,1\n", "2 label columns"),
        ("timestamp\n2020-01-01\n", "no column of numbers"),
        ('a\n"1\n', "not a CSV file"),
    ],
)
def test_csv_that_is_wrong_is_told_so(text, message):
    with pytest.raises(ValueError, match=message):
        parse_csv(text.encode())


def test_unknown_names():
    with pytest.raises(DataUnavailable, match="its groups are artificialNoAnomaly"):
        load_series("nab/realNothing")
    for name in ("nab/realTraffic/none", "no-such.csv", ""):
        with pytest.raises(DataUnavailable):
            load_series(name)


def test_a_group_that_is_absent_is_fetched_file_by_file_and_checked(site, empty_home, own_data, monkeypatch):
    """The real files, served from here: their hashes are those pinned in the source, and a changed one is refused."""
    from assay.data import nab
    from assay.data.places import find

    with monkeypatch.context() as with_own:
        with_own.setenv("ASSAY_DATA", own_data)
        needs("nab/realAdExchange")
        expected = load_series("nab/realAdExchange")
        for name in SHA256["realAdExchange"]:
            file = f"realAdExchange/{name}.csv"
            site.files[f"/data/{file}"] = find(f"series/NAB/{file}", f"NAB/data/{file}").read_bytes()
        windows = find("series/NAB/combined_windows.json", "NAB/labels/combined_windows.json")
        site.files["/labels/combined_windows.json"] = windows.read_bytes()
    monkeypatch.setattr(nab, "HOME", site.url)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    got = load_series("nab/realAdExchange")
    assert [s.name for s in got] == [s.name for s in expected]
    assert all(
        np.array_equal(a.values, b.values) and np.array_equal(a.labels, b.labels) for a, b in zip(got, expected, strict=True)
    )
    assert len(site.requests) == 7
    needs("nab/realAdExchange")
    load_series("nab/realAdExchange")
    assert len(site.requests) == 7
    (empty_home / "cache/assay/NAB/data/realAdExchange/exchange-2_cpc_results.csv").unlink()
    site.files["/data/realAdExchange/exchange-2_cpc_results.csv"] += b"\n2020-01-01 00:00:00,1"
    with pytest.raises(ValueError, match="the file was not kept"):
        load_series("nab/realAdExchange")
