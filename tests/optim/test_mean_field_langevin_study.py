"""The rivals and problems of mean-field Langevin's study, and the pieces of it that compute something."""

import numpy as np
import pytest
from sklearn.kernel_ridge import KernelRidge
from sklearn.model_selection import LeaveOneOut, cross_val_predict

from assay.optim import effective_dimension
from assay.optim.mean_field_langevin import problems, rivals, study


def rows(n=60, d=6, seed=0):
    X = np.random.default_rng(seed).normal(size=(n, d))
    return X, np.tanh(2 * X[:, 0] * X[:, 1])


def test_the_kernel_is_scikit_learns_and_its_leave_one_out_is_real():
    X, y = rows()
    ours = rivals.RBFRidge().fit(X, y)
    theirs = KernelRidge(kernel="rbf", gamma=ours.gamma_, alpha=ours.alpha_)
    fitted = theirs.fit(X, y - y.mean())
    np.testing.assert_allclose(ours.predict(X[:9] + 0.1), y.mean() + fitted.predict(X[:9] + 0.1), rtol=1e-6)
    held_out = cross_val_predict(theirs, X, y - y.mean(), cv=LeaveOneOut())
    assert ours.loo_error_ == pytest.approx(np.square(held_out - (y - y.mean())).mean(), rel=1e-6)


def test_every_arm_fits():
    config = study.study.scale("smoke").model_copy(update={"steps": 30, "width": 10})
    X, y = rows(100)
    for name, arm in study.study.arms.items():
        predicted = arm(config, 0).fit(X, 100 + y).predict(X)
        assert predicted.shape == (100,), name
        assert abs(predicted.mean() - 100) < 1, name


def test_multi_index_has_the_effective_dimension_it_is_said_to_have():
    p = problems.multi_index("tanh", 10, 0.1, 4000, 1000, 0.0, np.random.default_rng(0))
    assert effective_dimension(np.cov(p.X.T), p.U) == pytest.approx(1 + 8 * 0.1 / 2, rel=0.05)
    z = p.test_x @ p.U.T
    np.testing.assert_allclose(p.test_y, np.tanh(2 * z[:, 0] * z[:, 1]))
    assert problems.multi_index("parity", 5, 1.0, 10, 10, 0.1, np.random.default_rng(0)).U.shape == (3, 5)
    z = np.random.default_rng(0).normal(size=(200_000, 1))
    assert problems.TARGETS["he3"][1](z).var() == pytest.approx(1, rel=0.05)


def test_noise_columns_are_noise():
    p = problems.real_table("diabetes", 40, 2.0, 250, np.random.default_rng(0))
    assert p.X.shape == (250, 50)
    assert len(p.test_x) == len(p.test_y) == 133
    np.testing.assert_allclose(p.X[:, :10].std(0), 1)
    assert p.X[:, 10:].std() == pytest.approx(2, rel=0.05)
    with pytest.raises(ValueError, match="tables must be among diabetes, breast_cancer, digits"):
        problems.real_table("iris", 0, 1.0, 100, np.random.default_rng(0))


def test_own_table(tmp_path):
    path = tmp_path / "mine.csv"
    X, y = rows(40, 3)
    lines = [",".join(map(repr, row)) for row in np.c_[X, y].tolist()]
    path.write_text("\n".join(["a,b,c,price", *lines]), encoding="utf-8")
    rng = np.random.default_rng(0)
    p = problems.own_table(str(path), "", 2, 1.0, 400, rng)
    assert p.X.shape == (28, 5)
    assert np.isin(p.y, y).all()
    assert np.isin(problems.own_table(str(path), "b", 0, 1.0, 400, rng).y, X[:, 1]).all()
    with pytest.raises(ValueError, match="has no column 'cost', only a, b, c, price"):
        problems.own_table(str(path), "cost", 0, 1.0, 400, rng)
    path.write_text("\n".join(["a,b,c,price", *lines, "1,2,three,4"]), encoding="utf-8")
    with pytest.raises(ValueError, match="must hold numbers"):
        problems.own_table(str(path), "", 0, 1.0, 400, rng)
    path.write_text("\n".join(["price,b,c,d", *lines, "", ""]), encoding="utf-8-sig")  # as a spreadsheet writes it
    assert np.isin(problems.own_table(str(path), "price", 0, 1.0, 400, rng).y, X[:, 0]).all()
    path.write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="at least 20 complete rows"):
        problems.own_table(str(path), "", 0, 1.0, 400, rng)
    path.write_text("\n".join(["a,b", "1,2"]), encoding="utf-8")
    with pytest.raises(ValueError, match="at least 20 complete rows"):
        problems.own_table(str(path), "", 0, 1.0, 400, rng)


def test_steps_and_rows_are_read_off_right():
    path = np.r_[np.linspace(10, 1, 91), np.ones(200)]
    assert study.steps_to_end(path) == 89  # 1.1, a tenth above the last
    assert study.crossing([200, 400, 1200], [0.9, 0.6, 0.2], 0.3) == pytest.approx(400 * 3 ** (np.log(2) / np.log(3)))
    assert study.crossing([200, 400], [0.2, 0.1], 0.3) == 200
    assert study.crossing([200, 400], [0.9, 0.5], 0.3) == np.inf


def test_the_rank_correlations_differ_where_d_and_d_eff_do():
    """Errors equal to d_eff: correlation 1 with it, less with d."""

    class Sphere:
        metrics = {  # noqa: RUF012
            f"error_{study.tanh(d, 400, a)}": 1 + (d - 2) * a / 2 for d in (30, 15) for a in (1.0, 0.1, 0.03)
        }

    class Run:
        config = study.study.scale("desk")

        def __getitem__(self, arm):
            return Sphere

    assert study.rank_correlation(Run(), with_d=False) == pytest.approx(1)
    assert 0 < study.rank_correlation(Run(), with_d=True) < 0.6
    assert study.fall_with_effective_dimension("sphere")(Run()) == pytest.approx(2.4 / 15)
    assert study.above_rank_with_d(Run()) > 0.4
