"""Pruning curves and label audits."""

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression, Ridge

from assay.explain import TimeInf, audit_labels, prune_curve
from assay.explain.timeinf.blocks import Blocks
from assay.explain.timeinf.linear import LinearAttribution


def wave(T=300, D=1, seed=0):
    return np.sin(np.arange(T)[:, None] / 4.0) + 0.2 * np.random.default_rng(seed).normal(size=(T, D))


def blocks(z, m):
    return np.stack([z[b : b + m].ravel() for b in range(len(z) - m)]), np.stack([z[b + m] for b in range(len(z) - m)])


@pytest.mark.parametrize("D", [1, 2])
@pytest.mark.parametrize("order", ["most_valuable", "least_valuable"])
def test_dropping_blocks_is_refitting_on_the_rest(D, order):
    train, test, m = wave(120, D), wave(80, D, seed=1), 5
    values = np.random.default_rng(2).normal(size=115)
    values[[3, 70]] = np.nan
    table = prune_curve(values, train, test, [0.0, 0.2, 0.9], LinearRegression(), order=order)
    X, Y = blocks(train, m)
    X_test, Y_test = blocks(test, m)
    ranked = sorted(np.flatnonzero(np.isfinite(values)), key=lambda b: -values[b] if order == "most_valuable" else values[b])
    for removed, mse in zip(table.removed, table.mse, strict=True):
        kept = np.setdiff1d(np.arange(115), ranked[:removed])
        predicted = LinearRegression().fit(X[kept], Y[kept]).predict(X_test)
        assert mse == pytest.approx(np.square(predicted - Y_test).mean(), rel=1e-6)
    assert table.removed.tolist() == [0, 23, 104]
    assert table.relative_mse[0] == 1.0
    np.testing.assert_allclose(table.r2, 1 - table.mse / Y_test.var(axis=0).mean(), rtol=1e-12)


def test_removed_points_become_the_mean_of_those_before():
    train, test, m = wave(100), wave(60, seed=1), 4
    values = np.zeros(100)
    values[[50, 51, 0]] = 1.0
    table = prune_curve(values, train, test, [0.03], LinearRegression(), block_length=m)
    z = train.copy()
    z[50] = z[20:50].mean()
    z[51] = z[21:51].mean()  # with the value just replaced
    X, Y = blocks(z, m)
    X_test, Y_test = blocks(test, m)
    assert table.mse[0] == pytest.approx(np.square(LinearRegression().fit(X, Y).predict(X_test) - Y_test).mean(), rel=1e-9)


def test_valuable_blocks_are_worth_more_than_harmful_ones():
    """A third of the training series obeys another law: its blocks have low value, and dropping them helps."""
    rng = np.random.default_rng(0)
    good = np.sin(np.arange(400) / 3.0)[:, None] + 0.1 * rng.normal(size=(400, 1))
    bad = rng.normal(size=(200, 1))
    train, test = np.concatenate([good, bad]), np.sin(np.arange(700, 1000) / 3.0)[:, None]
    values = TimeInf(8).fit(train).influence_on(np.sin(np.arange(450, 650) / 3.0)[:, None])
    assert values[:390].mean() > values[410:].mean()
    worst = prune_curve(values, train, test, [0.3], Ridge(1e-6), order="least_valuable").relative_mse[0]
    best = prune_curve(values, train, test, [0.3], Ridge(1e-6), order="most_valuable").relative_mse[0]
    assert worst < 0.9 < 1.1 < best


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": np.zeros(100)}, "need block_length"),
        ({"values": np.zeros(100), "block_length": 60}, "60"),
        ({"values": np.zeros(95), "block_length": 7}, "fit neither"),
        ({"values": np.full(95, np.inf)}, "finite"),
        ({"fractions": [1.0]}, r"\[0, 1\)"),
        ({"order": "random"}, "order must be"),
        ({"X_test": wave(60, 2)}, "2 channels"),
        ({"X_train": np.full(100, np.nan)}, "X_train must be a finite series"),
        ({"values": np.zeros(2), "X_train": wave(7), "fractions": [0.9]}, "leaves no block"),
    ],
)
def test_bad_pruning_is_named(change, message):
    arguments = {"values": np.zeros(95), "X_train": wave(100), "X_test": wave(60), "fractions": [0.1], "order": "most_valuable"}
    arguments |= change
    with pytest.raises(ValueError, match=message):
        prune_curve(**arguments, estimator=LinearRegression())


def test_audit_by_brute_force():
    rng = np.random.default_rng(0)
    scores, labels = rng.exponential(size=400), np.zeros(400, dtype=bool)
    labels[100:120] = labels[300:320] = True
    scores[100:120] += 3  # a true label
    scores[200:220] += 4  # an anomaly without one
    scores[300:320] *= 0.1  # a label on nothing
    scores[5] = np.nan
    table = audit_labels(scores, labels)
    found = {row.start: row for row in table.itertuples()}
    assert found[100].finding == "agrees"
    assert found[300].finding == "label doubtful"
    assert next(row.finding for row in table.itertuples() if not row.labelled) == "label missing?"
    assert any(abs(row.start - 200) <= 2 for row in table.itertuples() if not row.labelled)
    means = [np.nanmean(scores[s : s + 20]) for s in range(381) if not labels[s : s + 20].any()]
    for start in (100, 300):
        mean = scores[start : start + 20].mean()
        assert found[start].mean_score == pytest.approx(mean)
        assert found[start].percentile == pytest.approx(100 * np.mean(np.array(means) < mean))
    bar = np.median([found[100].percentile, found[300].percentile])
    spans = [(row.start, row.end) for row in table.itertuples() if not row.labelled]
    assert all(row.percentile > bar for row in table.itertuples() if not row.labelled)
    assert all(b <= c or d <= a for i, (a, b) in enumerate(spans) for c, d in spans[i + 1 :])
    assert not any(labels[a:b].any() for a, b in spans)


def test_audit_takes_given_windows():
    scores = np.zeros(100)
    scores[40:50] = 1.0
    table = audit_labels(scores, np.zeros(100, dtype=bool), windows=[(40, 50)])
    assert table[["start", "end", "finding"]].values.tolist() == [[40, 50, "agrees"]]


@pytest.mark.parametrize(
    ("scores", "labels", "windows", "message"),
    [
        (np.zeros(10), np.zeros(9), None, r"\(10,\) and \(9,\)"),
        (np.zeros(10), np.zeros(10), None, "no labelled window"),
        (np.zeros(10), np.zeros(10), [(5, 11)], "must lie in 0..10"),
        (np.zeros(10), np.zeros(10), [(5, 5)], "start < end"),
        (np.zeros(10), np.ones(10), None, "no unlabelled window of 10 points"),
    ],
)
def test_bad_audit_is_named(scores, labels, windows, message):
    with pytest.raises(ValueError, match=message):
        audit_labels(scores, labels, windows)


@pytest.mark.parametrize("mode", ["first_order", "loo"])
@pytest.mark.parametrize(("m", "length"), [(25, 1000), (100, 1000), (100, 3000)])
def test_a_new_series_like_the_old_one_is_flagged_no_more_often_than_asked(mode, m, length):
    rng = np.random.default_rng(0)
    z = np.zeros(length + 6000)
    for t in range(2, len(z)):
        z[t] = 1.2 * z[t - 1] - 0.5 * z[t - 2] + rng.normal()
    detector = TimeInf(m, contamination=0.05, mode=mode).fit(z[:length])
    flagged = (detector.predict(z[length + 500 :]) == -1).mean()
    assert flagged < 0.1  # with the training threshold a third of all points were flagged at m = 100
    assert (detector.predict(z[:length]) == -1).mean() == pytest.approx(0.05, abs=0.01)


def test_held_out_scores_are_those_of_a_fit_without_the_block():
    z = np.random.default_rng(1).normal(size=(60, 1))
    blocks = Blocks([z], 4)
    held_out = LinearAttribution(blocks).held_out_self()
    ((_, lags, targets),) = blocks.chunks(100)
    A = np.c_[np.ones(len(lags)), lags]
    for b in (0, 17, len(A) - 1):
        rest = np.delete(np.arange(len(A)), b)
        G = np.linalg.inv(A[rest].T @ A[rest])
        r = targets[b] - A[b] @ G @ A[rest].T @ targets[rest]
        assert held_out[b] == pytest.approx(float(r @ r) * (A[b] @ G @ A[b]), rel=1e-9)


@pytest.mark.parametrize("labels", [np.array([-1, 1, 1, 1]), np.array(["0", "1", "0", "0"]), np.array([0, 2, 0, 0])])
def test_labels_that_are_no_labels_are_refused(labels):
    with pytest.raises(ValueError, match="booleans, or 0 and 1"):
        audit_labels(np.arange(4.0), labels)


def test_an_audit_without_any_score_says_so():
    scores = np.r_[np.full(5, np.nan), np.arange(10.0)]
    with pytest.raises(ValueError, match="NaN in every labelled window"):
        audit_labels(scores, np.arange(15) < 5)
