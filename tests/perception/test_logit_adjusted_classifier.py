"""The scikit-learn wrapper of logit adjustment."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import make_classification
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from sklearn.model_selection import GridSearchCV
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
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


def test_bad_arguments_are_named(rows):
    X, y, _, _ = rows
    with pytest.raises(ValueError, match="method must be"):
        LogitAdjustedClassifier(method="product").fit(X, y)
    with pytest.raises(ValueError, match="class_counts must hold 4 numbers, got 2"):
        LogitAdjustedClassifier(class_counts=[3, 1]).fit(X, y)
    with pytest.raises(ValueError, match="GaussianNB has none"):
        LogitAdjustedClassifier(GaussianNB()).fit(X, y)
    with pytest.raises(ValueError, match="6 columns for 4 classes"):
        LogitAdjustedClassifier(SVC(decision_function_shape="ovo")).fit(X[:300], y[:300]).predict(X)
    with pytest.raises(ValueError, match="at least 3 classes"):
        LogitAdjustedClassifier(method="one_vs_one").fit(X[y < 2], y[y < 2])
