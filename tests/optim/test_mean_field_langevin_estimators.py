"""Mean-field Langevin dynamics as scikit-learn estimators."""

import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from assay.optim import MeanFieldLangevinClassifier, MeanFieldLangevinRegressor, Sphere
from assay.optim.mean_field_langevin import training
from assay.optim.mean_field_langevin.activation import Activation
from assay.optim.mean_field_langevin.closed_form import ClosedForm
from assay.optim.mean_field_langevin.losses import SQUARED


@pytest.mark.slow
@parametrize_with_checks(
    [
        MeanFieldLangevinRegressor(max_iter=200),
        MeanFieldLangevinRegressor(max_iter=200, manifold="euclidean"),
        MeanFieldLangevinClassifier(max_iter=200),
    ]
)
def test_scikit_learn_conformance(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def rows():
    X = np.random.default_rng(0).normal(size=(500, 8)) * np.r_[1, 1, np.full(6, 0.5)]
    return X[:300], 5 + 3 * np.tanh(2 * X[:300, 0] * X[:300, 1]), X[300:], 5 + 3 * np.tanh(2 * X[300:, 0] * X[300:, 1])


def regressor(**options):
    return MeanFieldLangevinRegressor(**{"n_particles": 40, "max_iter": 300, "random_state": 0, **options})


@pytest.mark.parametrize("manifold", ["sphere", "joint_sphere", "euclidean"])
def test_learns_a_product_and_finds_its_directions(rows, manifold):
    X, y, test_x, test_y = rows
    fit = regressor(manifold=manifold, max_iter=600).fit(X, y)
    assert LinearRegression().fit(X, y).score(test_x, test_y) < 0.1
    assert fit.score(test_x, test_y) > 0.5
    U = fit.index_directions(2)
    np.testing.assert_allclose(U @ U.T, np.eye(2), atol=1e-10)
    assert np.square(U[:, :2]).sum() / 2 > 0.9
    assert fit.free_energy_path_[-50:].mean() < 0.7 * fit.free_energy_path_[0]
    assert fit.n_iter_ == len(fit.loss_curve_) == 600
    assert fit.particles_.shape == (40, 2, 9)
    norms = np.linalg.norm(fit.particles_, axis=(1, 2) if manifold == "joint_sphere" else 2)
    assert np.allclose(norms, 1, atol=1e-5) is (manifold != "euclidean")


def test_the_bias_and_the_mean_are_kept(rows):
    X, y, test_x, _ = rows
    fit = regressor().fit(X, y)
    assert fit.target_mean_ == pytest.approx(y.mean())
    moved = regressor().fit(X, y + 1000)
    np.testing.assert_allclose(moved.predict(test_x) - 1000, fit.predict(test_x), atol=1e-6)
    scaled = regressor().fit(X, 10 * y)
    np.testing.assert_allclose(scaled.predict(test_x) / 10, fit.predict(test_x), rtol=1e-4)
    assert regressor(scale_target=False).fit(X, y).target_scale_ == 1
    assert regressor(fit_intercept=False).fit(X, y).particles_.shape == (40, 2, 8)
    offset = regressor(max_iter=1500, n_particles=100).fit(X, np.maximum(X[:, 0] - 0.5, 0))  # a kink away from 0 needs a bias
    assert offset.score(test_x, np.maximum(test_x[:, 0] - 0.5, 0)) > 0.9


@pytest.mark.parametrize("manifold", ["sphere", "euclidean"])
def test_whole_weights_are_repeated_rows(rows, manifold):
    X, y, test_x, _ = rows
    times = np.random.default_rng(1).integers(0, 3, 100)
    options = {"manifold": manifold, "dtype": "float64", "max_iter": 50}
    weighted = regressor(**options).fit(X[:100], y[:100], sample_weight=times)
    repeated = regressor(**options).fit(X[:100].repeat(times, axis=0), y[:100].repeat(times))
    np.testing.assert_allclose(weighted.predict(test_x), repeated.predict(test_x), rtol=1e-9)
    np.testing.assert_allclose(weighted.direction_strengths_, repeated.direction_strengths_, rtol=1e-6, atol=1e-12)
    assert weighted.effective_dimension_ == pytest.approx(repeated.effective_dimension_, rel=1e-6)


def test_seeds_and_temperature(rows):
    X, y, test_x, _ = rows
    a, b, other = (regressor(random_state=seed).fit(X, y).predict(test_x) for seed in (0, 0, 1))
    np.testing.assert_array_equal(a, b)
    assert np.abs(a - other).max() > 1e-3
    spread = [regressor(beta=beta, max_iter=600).fit(X, y).loss_curve_[-200:].std() for beta in (math.inf, 50.0)]
    assert spread[1] > 3 * spread[0]
    hot = regressor(beta=50.0, anneal="geometric", max_iter=600).fit(X, y).loss_curve_
    assert hot[-100:].mean() < regressor(beta=50.0, max_iter=600).fit(X, y).loss_curve_[-100:].mean()
    state = torch.get_rng_state()
    regressor(max_iter=2).fit(X, y)
    assert torch.equal(state, torch.get_rng_state())


def test_an_average_over_late_iterates_is_the_mean_of_their_predictions(rows):
    X, y, test_x, _ = rows
    averaged = regressor(average_last=3, max_iter=30).fit(X, y).predict(test_x)
    alone = [regressor(max_iter=steps).fit(X, y).predict(test_x) for steps in (28, 29, 30)]
    np.testing.assert_allclose(averaged, np.mean(alone, axis=0), rtol=1e-6)


def test_mini_batches_see_every_row_once_an_epoch(rows):
    X, y, test_x, test_y = rows
    sample = training.Sample(torch.arange(12.0)[:, None], torch.arange(12.0), torch.full((12,), 1 / 12))
    batches = training._batches(sample, 4, torch.Generator().manual_seed(0))
    for _ in range(2):
        epoch = [next(batches) for _ in range(3)]
        assert sorted(torch.cat([b.target for b in epoch]).tolist()) == list(range(12))
        assert all(torch.equal(b.x[:, 0], b.target) and float(b.weight.sum()) == pytest.approx(1) for b in epoch)
    assert regressor(batch_size=50, max_iter=600).fit(X, y).score(test_x, test_y) > 0.4


def test_the_mean_gradient_of_an_epoch_is_that_of_all_rows():
    form, noise = ClosedForm(Activation(), 4.0), torch.Generator().manual_seed(0)
    W, x, y = (torch.randn(shape, generator=noise).double() for shape in ((1, 6, 2, 5), (12, 5), (12,)))
    weight = torch.rand(12, generator=noise).double()  # uneven, so parts weigh unequally
    sample = training.Sample(x, y, weight / weight.sum())
    batches = training._batches(sample, 4, noise)
    parts = [form.drift(W, b.x, b.target, b.weight, SQUARED) for b in (next(batches) for _ in range(3))]
    whole = form.drift(W, x, y, sample.weight, SQUARED)
    for at in (0, 1):
        torch.testing.assert_close(torch.stack([part[at] for part in parts]).mean(0), whole[at])


def test_early_stopping_keeps_the_best(rows):
    X, y, test_x, test_y = rows
    stopped = regressor(early_stopping=True, validation_fraction=0.2, max_iter=600, beta=math.inf).fit(X, y)
    assert stopped.score(test_x, test_y) > 0.4
    noise = np.random.default_rng(0).normal(size=300)  # nothing to learn: stops soon
    assert regressor(early_stopping=True, max_iter=3000, manifold="euclidean").fit(X, noise).n_iter_ < 1500


def test_early_stopping_gives_back_the_particles_of_the_best_look():
    form, noise = ClosedForm(Activation(), 4.0), torch.Generator().manual_seed(0)
    x, y = torch.randn((60, 4), generator=noise).double(), torch.randn(60, generator=noise).double()
    shares = torch.full((30,), 1 / 30, dtype=torch.float64)
    fitted, held_out = (training.Sample(x[part], y[part], shares) for part in (slice(30), slice(30, 60)))
    W = torch.randn((1, 20, 2, 4), generator=noise).double() / 2

    def outside(W):
        return float(SQUARED(form.outputs(W, held_out.x), held_out.target)[0] @ shares)

    def go(steps, **kept):
        dynamics = training.Dynamics(form, SQUARED, 0.02, 200.0, 0.0, None, steps)
        seeds = (torch.Generator().manual_seed(seed) for seed in (1, 2))
        return training.run(W.clone(), fitted, dynamics, *seeds, kept.get("held_out"))

    stopped = go(5000, held_out=held_out)
    steps = len(stopped.loss)
    assert steps < 5000
    looks = [outside(go(at).W) for at in range(training.LOOK_EVERY, steps + 1, training.LOOK_EVERY)]
    assert outside(stopped.W) == pytest.approx(min(looks))
    assert int(np.argmin(looks)) == len(looks) - 1 - training.PATIENCE


def test_standardising_takes_units_away(rows):
    X, y, test_x, _ = rows
    units = np.logspace(-2, 2, 8)
    a = regressor(standardize=True, dtype="float64").fit(X, y)
    b = regressor(standardize=True, dtype="float64").fit(X * units, y)
    np.testing.assert_allclose(a.predict(test_x), b.predict(test_x * units), rtol=1e-6)
    pipeline = make_pipeline(StandardScaler(), regressor(dtype="float64")).fit(X, y)
    np.testing.assert_allclose(a.predict(test_x), pipeline.predict(test_x), rtol=1e-6)


@pytest.mark.parametrize("activation", ["relu", "tanh", torch.sin])
@pytest.mark.parametrize("loss", ["squared", "pseudo_huber"])
def test_other_activations_and_losses(rows, activation, loss):
    X, y, test_x, test_y = rows
    fit = regressor(activation=activation, loss=loss, max_iter=1500).fit(X, y)
    assert fit.score(test_x, test_y) > 0.3


def test_pseudo_huber_shrugs_at_outliers(rows):
    X, y, test_x, test_y = rows
    spoilt = y.copy()
    spoilt[::30] += 100
    scores = [regressor(loss=loss, max_iter=1000).fit(X, spoilt).score(test_x, test_y) for loss in ("squared", "pseudo_huber")]
    assert scores[1] > scores[0]


def test_a_manifold_object_is_the_named_one(rows):
    X, y, test_x, _ = rows
    a, b = (regressor(manifold=manifold).fit(X, y).predict(test_x) for manifold in ("sphere", Sphere()))
    np.testing.assert_array_equal(a, b)


def test_classes():
    X, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    three = MeanFieldLangevinClassifier(40, standardize=True, max_iter=800, random_state=0).fit(X[::2], names[::2])
    assert three.score(X[1::2], names[1::2]) > 0.9
    assert three.particles_.shape == (40, 3, 2, 5)
    probabilities = three.predict_proba(X)
    np.testing.assert_allclose(probabilities.sum(1), 1)
    assert probabilities.shape == three.decision_function(X).shape == (150, 3)
    two = MeanFieldLangevinClassifier(40, standardize=True, max_iter=500, random_state=0).fit(X[50:], names[50:])
    assert two.particles_.shape == (40, 2, 5)
    np.testing.assert_allclose(two.predict_proba(X[50:])[:, 1], 1 / (1 + np.exp(-two.decision_function(X[50:]))))
    assert two.score(X[50:], names[50:]) > 0.9
    assert two.index_directions(2).shape == (2, 4)
    with pytest.raises(ValueError, match="at least two classes"):
        two.fit(X[:50], names[:50])
    with pytest.raises(ValueError, match="at least two classes"):
        two.fit(X, names, sample_weight=(y == 0).astype(float))


def test_pickles_and_searches(rows):
    X, y, test_x, _ = rows
    search = GridSearchCV(regressor(max_iter=30), {"beta": [100.0, 2000.0]}, cv=2).fit(X, y)
    again = pickle.loads(pickle.dumps(search))
    np.testing.assert_array_equal(again.predict(test_x), search.predict(test_x))
    fit = regressor(max_iter=30).fit(X, y)
    before = fit.predict(test_x)
    fit.set_params(kappa=1.0, output_scale=9.0)  # waits for the next fit
    np.testing.assert_array_equal(fit.predict(test_x), before)


@pytest.mark.parametrize("kind", [MeanFieldLangevinRegressor, MeanFieldLangevinClassifier])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_particles": 0}, "n_particles must be an integer of at least 1"),
        ({"n_particles": 2.5}, "n_particles must be an integer"),
        ({"beta": 0.0}, "beta must be > 0"),
        ({"beta": math.nan}, "beta must be > 0"),
        ({"lr": 0.0}, "lr must be 'auto' or positive"),
        ({"lr": "fast"}, "lr must be 'auto' or positive"),
        ({"max_iter": 0}, "max_iter must be"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"manifold": "torus"}, "manifold must be 'sphere'"),
        ({"manifold": Sphere}, "manifold must be 'sphere'"),
        ({"manifold": "euclidean", "weight_decay": "auto"}, "weight_decay must be finite"),
        ({"radius": None}, "radius must be positive"),
        ({"validation_fraction": None}, "validation_fraction must lie"),
        ({"manifold": "sphere", "weight_decay": 1e-4}, "weight_decay has no meaning on a manifold"),
        ({"manifold": "euclidean", "weight_decay": -1.0}, "weight_decay must be finite"),
        ({"activation": "gelu"}, "activation must be"),
        ({"kappa": 0.0}, "kappa must be positive"),
        ({"kappa": math.inf}, "kappa must be positive and finite"),
        ({"iota": -1.0}, "iota must be > 0"),
        ({"radius": 0.0}, "radius must be positive"),
        ({"output_scale": math.inf}, "output_scale must be positive"),
        ({"anneal": "slow"}, "anneal must be"),
        ({"average_last": -1}, "average_last must be"),
        ({"validation_fraction": 1.0}, "validation_fraction must lie"),
        ({"dtype": "float16"}, "dtype must be"),
    ],
)
def test_bad_arguments(kind, options, message):
    X, y = np.random.default_rng(0).normal(size=(20, 3)), np.arange(20) % 2
    with pytest.raises(ValueError, match=message):
        kind(**{"max_iter": 3, **options}).fit(X, y)


def test_bad_data():
    X, y = np.random.default_rng(0).normal(size=(20, 3)), np.arange(20.0)
    for bad_x, bad_y in ((np.where(X > 1, np.nan, X), y), (X, np.where(y > 18, np.nan, y)), (X, np.where(y > 18, np.inf, y))):
        with pytest.raises(ValueError, match=r"NaN|infinity"):
            regressor().fit(bad_x, bad_y)
    for manifold in ("sphere", Sphere()):
        with pytest.raises(ValueError, match="at least two columns"):
            regressor(manifold=manifold).fit(X[:, :1], y)
    with pytest.raises(ValueError, match="squares are too large"):
        regressor().fit(1e200 * X, y)
    assert np.isfinite(regressor(manifold="euclidean", max_iter=5).fit(X[:, :1], y).predict(X[:, :1])).all()
    with pytest.raises(ValueError, match="loss must be 'squared' or 'pseudo_huber', got 'logistic'"):
        regressor(loss="logistic").fit(X, y)
    with pytest.raises(ValueError, match=r"positive number|non-zero"):
        regressor().fit(X, y, sample_weight=np.zeros(20))
    with pytest.raises(ValueError, match=r"k must lie in \[1, 3\], got 4"):
        regressor(max_iter=3).fit(X, y).index_directions(4)


def test_a_step_that_is_too_long_is_reported_and_undone():
    X = np.random.default_rng(0).normal(size=(50, 3))
    with pytest.warns(RuntimeWarning, match=r"free energy stopped being finite .* Try an lr below 1e\+06"):
        fit = regressor(manifold="euclidean", activation="relu", lr=1e6, weight_decay=0.1).fit(X, X[:, 0])
    assert np.isfinite(fit.predict(X)).all()
    assert fit.n_iter_ < 300
    with pytest.warns(RuntimeWarning, match=r"the loss ended at .* Try an lr below 1e\+03"):
        regressor(manifold="euclidean", lr=1000.0).fit(X, X[:, 0])  # bounded neurons: no infinity, and no fit either
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        regressor(max_iter=100).fit(X, X[:, 0])
        regressor(max_iter=100).fit(X, np.ones(50))


def test_wide_data_keeps_no_square_of_its_width():
    X = np.random.default_rng(0).normal(size=(30, 600))
    fit = regressor(max_iter=2).fit(X, X[:, 0])
    assert fit.directions_.shape == (30, 600)
    assert fit.index_directions(30).shape == (30, 600)
    with pytest.raises(ValueError, match=r"k must lie in \[1, 30\], got 31"):
        fit.index_directions(31)


def test_a_column_without_information_and_a_constant_target():
    X = np.random.default_rng(0).normal(size=(40, 3))
    X[:, 2] = 7.0
    fit = regressor(standardize=True, max_iter=20).fit(X, np.full(40, 3.0))
    assert np.isfinite(fit.predict(X)).all()
    assert fit.target_scale_ == 1
    for number in (0.1, 1e9 / 3):  # constant but for rounding
        X[:, 2] = number
        assert regressor(max_iter=1).fit(X, np.full(40, number)).target_scale_ == 1
        fit = regressor(standardize=True, max_iter=20).fit(X, X[:, 0])
        moved = np.c_[X[:, :2], np.full(40, number * 1.001)]
        np.testing.assert_allclose(fit.predict(moved), fit.predict(X), rtol=0.2 * number, atol=0.2 * number)
    constant = regressor(max_iter=5).fit(np.zeros((10, 2)), np.arange(10.0))
    assert np.isfinite(constant.predict(np.zeros((3, 2)))).all()
