"""The scikit-learn wrapper of logit adjustment."""

import warnings

import numpy as np
import pytest
import scipy.sparse
import torch
from scipy.special import softmax
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import make_classification
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from sklearn.model_selection import GridSearchCV
from sklearn.multiclass import OneVsRestClassifier
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, LinearSVC
from sklearn.utils.estimator_checks import parametrize_with_checks

from assay.perception import AdditiveLogitAdjustment, LogitAdjustedClassifier


@pytest.mark.filterwarnings("ignore::UserWarning")
@parametrize_with_checks([LogitAdjustedClassifier(), LogitAdjustedClassifier(method="multiplicative")])
def test_scikit_learn_conformance(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def rows():
    X, y = make_classification(
        4000, 10, n_informative=6, n_classes=4, weights=[0.8, 0.13, 0.05], class_sep=0.7, flip_y=0, random_state=0
    )
    return X[:2000], y[:2000], X[2000:], y[2000:]


def test_balances_a_long_tail_and_equals_the_module(rows):
    X, y, test_X, test_y = rows
    plain, adjusted = LogisticRegression(max_iter=1000).fit(X, y), LogitAdjustedClassifier().fit(X, y)
    gain = balanced_accuracy_score(test_y, adjusted.predict(test_X)) - balanced_accuracy_score(test_y, plain.predict(test_X))
    assert gain > 0.1
    scores = torch.from_numpy(plain.decision_function(test_X))
    expected = AdditiveLogitAdjustment(np.bincount(y))(scores).numpy()
    np.testing.assert_allclose(adjusted.decision_function(test_X), expected)
    np.testing.assert_array_equal(adjusted.class_counts_, np.bincount(y))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("method", ["additive", "multiplicative", "one_vs_one"])
def test_zero_strength_is_the_estimator_itself(rows, method):
    X, y, test_X, _ = rows
    adjusted = LogitAdjustedClassifier(method=method, strength=0.0).fit(X, y)
    np.testing.assert_array_equal(adjusted.predict(test_X), adjusted.estimator_.predict(test_X))


def test_works_in_a_pipeline_and_a_search(rows):
    X, y, _, _ = rows
    pipeline = make_pipeline(StandardScaler(), LogitAdjustedClassifier())
    grid = {"logitadjustedclassifier__strength": [0.0, 1.0]}
    search = GridSearchCV(pipeline, grid, scoring="balanced_accuracy", cv=3).fit(X, y)
    assert search.best_params_ == {"logitadjustedclassifier__strength": 1.0}
    assert clone(search.best_estimator_).get_params()["logitadjustedclassifier__strength"] == 1.0


def test_counts_before_resampling_can_be_given(rows):
    X, y, test_X, _ = rows
    counts = np.bincount(y)
    half = LogitAdjustedClassifier(class_counts=[1, 1, 1, 1]).fit(X, y)
    np.testing.assert_array_equal(half.predict(test_X), half.estimator_.predict(test_X))
    given = LogitAdjustedClassifier(class_counts=counts).fit(X, y)
    np.testing.assert_array_equal(given.predict(test_X), LogitAdjustedClassifier().fit(X, y).predict(test_X))


def test_two_classes_move_with_additive_only():
    X, y = make_classification(2000, weights=[0.95], flip_y=0, class_sep=0.5, random_state=0)
    plain = LogisticRegression(max_iter=1000).fit(X, y).predict(X)
    assert LogitAdjustedClassifier().fit(X, y).predict(X).sum() > 2 * plain.sum()
    with pytest.warns(UserWarning, match="two classes"):
        multiplicative = LogitAdjustedClassifier(method="multiplicative", strength=3.0).fit(X, y)
    np.testing.assert_array_equal(multiplicative.predict(X), plain)


@pytest.mark.filterwarnings("ignore:the distribution is too skewed")
def test_bad_arguments_are_named(rows):
    X, y, _, _ = rows
    with pytest.raises(ValueError, match="method must be"):
        LogitAdjustedClassifier(method="product").fit(X, y)
    with pytest.raises(ValueError, match="class_counts must hold 4 numbers, got 2"):
        LogitAdjustedClassifier(class_counts=[3, 1]).fit(X, y)
    for method in ("multiplicative", "one_vs_one"):
        with pytest.raises(ValueError, match=f"'{method}' needs raw scores, and GaussianNB has no decision_function"):
            LogitAdjustedClassifier(GaussianNB(), method).fit(X, y)
    with pytest.raises(ValueError, match="NearestNeighbors has neither"):
        LogitAdjustedClassifier(NearestNeighbors()).fit(X, y)
    with pytest.raises(ValueError, match="6 columns for 4 classes"):
        LogitAdjustedClassifier(SVC(decision_function_shape="ovo"), strength=1.0).fit(X[:300], y[:300]).predict(X)
    with pytest.raises(ValueError, match="at least 3 classes"):
        LogitAdjustedClassifier(method="one_vs_one").fit(X[y < 2], y[y < 2])


def test_takes_whatever_the_estimator_takes(rows):
    X, y, test_X, _ = rows
    dense = LogitAdjustedClassifier().fit(X, y)
    sparse = LogitAdjustedClassifier().fit(scipy.sparse.csr_matrix(X), y)
    np.testing.assert_array_equal(sparse.predict(scipy.sparse.csr_matrix(test_X)), dense.predict(test_X))
    assert dense.n_features_in_ == 10
    holes = np.where(X > 2, np.nan, X)
    boosted = LogitAdjustedClassifier(HistGradientBoostingClassifier(max_iter=5)).fit(holes, y)
    assert np.isfinite(boosted.decision_function(holes)).all()
    texts = ["cheap pills", "cheap offer", "lunch at noon", "see you at lunch", "noon works", "lunch again"] * 5
    spam = LogitAdjustedClassifier(make_pipeline(TfidfVectorizer(), LogisticRegression()))
    assert spam.fit(texts, [text.startswith("cheap") for text in texts]).predict(["cheap lunch pills", "at noon"]).tolist() == [
        True,
        False,
    ]
    assert not hasattr(spam, "n_features_in_") or spam.n_features_in_ == spam.estimator_.n_features_in_


def test_takes_data_frames_and_keeps_their_names(rows):
    pandas = pytest.importorskip("pandas")
    X, y, test_X, _ = rows
    names = [f"column {i}" for i in range(10)]
    frame, test_frame = pandas.DataFrame(X, columns=names), pandas.DataFrame(test_X, columns=names)
    fitted = LogitAdjustedClassifier().fit(frame, pandas.Series(y))
    assert fitted.feature_names_in_.tolist() == names
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no names lost on the way to the estimator
        predicted = fitted.predict(test_frame)
    np.testing.assert_array_equal(predicted, LogitAdjustedClassifier().fit(X, y).predict(test_X))


def test_probabilities_alone_are_adjusted_by_their_logarithm(rows):
    X, y, test_X, test_y = rows
    forest = LogitAdjustedClassifier(RandomForestClassifier(30, min_samples_leaf=5, random_state=0)).fit(X, y)
    plain = forest.estimator_.predict_proba(test_X)
    assert (plain == 0).any()
    expected = (plain / np.bincount(y)).argmax(1)  # balanced posterior
    np.testing.assert_array_equal(forest.predict(test_X), expected)
    assert np.isfinite(forest.decision_function(test_X)).all()
    gain = balanced_accuracy_score(test_y, expected) - balanced_accuracy_score(test_y, plain.argmax(1))
    assert gain > 0.1
    two = LogitAdjustedClassifier(GaussianNB()).fit(X[y < 2], y[y < 2])
    odds = two.estimator_.predict_proba(X[y < 2]) / np.bincount(y[y < 2])
    np.testing.assert_array_equal(two.predict(X[y < 2]), odds.argmax(1))


class InSmallUnits(LogisticRegression):
    """Its decision function has another scale than log-odds, as an ensemble's share of votes has."""

    def decision_function(self, X):
        return 0.05 * super().decision_function(X)

    def predict_proba(self, X):
        return softmax(20 * self.decision_function(X), axis=1)


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (LinearSVC(), "LinearSVC has no predict_proba"),
        (make_pipeline(StandardScaler(), LinearSVC()), "Pipeline has no predict_proba"),
        (InSmallUnits(), "InSmallUnits's probabilities are not those of its decision function"),
    ],
)
def test_margins_are_warned_about_at_the_default_strength_only(rows, estimator, message):
    X, y, _, _ = rows
    with pytest.warns(UserWarning, match=message):
        LogitAdjustedClassifier(estimator).fit(X, y)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        LogitAdjustedClassifier(estimator, strength=0.3).fit(X, y)
    assert [str(warning.message) for warning in said] == []


@pytest.mark.parametrize(
    "estimator",
    [
        LogisticRegression(),
        OneVsRestClassifier(LogisticRegression()),
        HistGradientBoostingClassifier(max_iter=5),
        GaussianNB(),
        CalibratedClassifierCV(LinearSVC(), cv=2),
        make_pipeline(StandardScaler(), LogisticRegression()),
    ],
)
@pytest.mark.parametrize("classes", [2, 4])
def test_log_odds_are_not(rows, estimator, classes):
    X, y, _, _ = rows
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        LogitAdjustedClassifier(estimator).fit(X[y < classes], y[y < classes])
    assert [str(warning.message) for warning in said] == []
