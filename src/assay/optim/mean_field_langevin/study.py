"""Is the error of mean-field Langevin dynamics at a fixed sample size set by the effective dimension, and does a sphere help?

Published: theory without experiments (arXiv 2408.07254). For ``y = g(Ux) + noise`` about ``d_eff = tr Σ / ‖Σ^½Uᵀ‖²`` samples
suffice whatever ``g``, and on a compact manifold of positive curvature polynomially many steps do, where Euclidean space may
take exponentially many. Desk: ``tanh(2 z₁ z₂)`` of Gaussian inputs with variance 1 in the two relevant directions and ``a`` in
the others (``d_eff = 1 + (d - 2) a / 2``), noise of 0.1 on the training targets; three of scikit-learn's tables, with 0 and 100
columns of Gaussian noise appended. Errors are relative test errors: the mean squared error over the test target's
variance, so R² is one minus them. Desk cannot show: the growth of the sample size over decades of ``d``, nor the exponential
regime. On isotropic inputs fixed features and one pass over the rows stay near the error of a constant, 1. A table that an arm
fits badly to begin with has less to lose to columns of noise: read C5 beside the errors without them. The method's defaults were
chosen by trials on this target, so its arms are tuned by hand; rivals are tuned on their training rows. A teacher of two directions is not spread out over the sphere as the theorem for manifolds assumes.

An arm is a callable ``(config, seed) -> regressor`` with scikit-learn's ``fit`` and ``predict``. If the regressor has
``index_directions(k)``, its directions are compared with the true ones; if it has ``free_energy_path_``, steps are counted on it.
An arm with an attribute ``kinds`` runs on problems of these kinds only.

``prepare`` returns a ``dict`` of ``Problem(X, y, test_x, test_y)`` by name: ``U (k, d)`` and ``kinds`` may be added. With ``--set
table=mine.csv`` your own table takes the place of all problems; ``--set column=price`` names what is learnt, else the last column.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from scipy.stats import beta, kstest, norm, spearmanr
from sklearn.ensemble import HistGradientBoostingRegressor

from assay.bench import Claim, Config, Replicate, Study, above, at_least, at_most, below

from . import rivals
from .estimators import MeanFieldLangevinRegressor
from .manifolds import Sphere
from .optimizer import MeanFieldLangevin
from .problems import Problem, multi_index, own_table, real_table

AT_REST = {"lr": 0.02, "beta": 10.0}


class LangevinConfig(Config):
    table: str = ""
    """A table of your own, a path to a CSV file with a header, in place of all problems."""
    column: str = ""
    """The column of it that is learnt; the last one by default."""
    dims: tuple[Annotated[int, Field(ge=3)], ...] = Field((30, 15), min_length=1)
    """Inputs of the synthetic problems: the first for all of them, the others for the effect of the dimension."""
    sizes: tuple[Annotated[int, Field(ge=20)], ...] = Field((200, 400, 1200), min_length=1)
    """Rows to fit; anisotropic inputs at the second of them only."""
    variances: tuple[Annotated[float, Field(ge=0)], ...] = Field((1.0, 0.1, 0.03), min_length=1)
    """Variance of the irrelevant directions."""
    noise: float = Field(0.1, ge=0)
    """Standard deviation of the noise on the targets to fit."""
    hard: tuple[Literal["he3", "parity"], ...] = ("he3", "parity")
    """Targets of higher exponents, on the largest isotropic problem of replicate 0."""
    tables: tuple[str, ...] = ("diabetes", "breast_cancer", "digits")
    """Real tables."""
    columns: tuple[Annotated[int, Field(ge=0)], ...] = Field((0, 100), min_length=1)
    """Noise columns appended to a real table."""
    column_scale: float = Field(1.0, gt=0)
    """Their standard deviation; the real columns have 1."""
    max_rows: int = Field(400, ge=20)
    """Most rows of a real table to fit."""
    test_rows: int = Field(2000, ge=10)
    """Rows of a synthetic problem to test on."""
    width: int = Field(100, ge=1)
    """Particles; rivals have as many pairs of neurons."""
    steps: int = Field(2500, ge=1)
    """Full-batch steps."""
    beta: float = Field(2e3, gt=0)
    """Inverse temperature."""
    rest_steps: int = Field(2000, ge=1)
    """Steps of the chain without data."""


def prepare(config, log) -> dict[str, Problem]:
    rng = np.random.default_rng(log.seed)
    problems = {}
    for p in config.columns:
        for table in [config.table] if config.table else config.tables:
            if config.table:
                problem = own_table(config.table, config.column, p, config.column_scale, config.max_rows, rng)
            else:
                problem = real_table(table, p, config.column_scale, config.max_rows, rng)
            problems[f"own_p{p}" if config.table else f"{table}_p{p}"] = problem._replace(kinds=("real",))
    if config.table:
        return problems
    make = partial(multi_index, n_test=config.test_rows, noise=config.noise, rng=rng)
    middle, d = focus_size(config), config.dims[0]
    for n in config.sizes:
        kinds = ("isotropic", "focus") if n == middle else ("isotropic",)
        problems[tanh(d, n, 1.0)] = make("tanh", d, 1.0, n)._replace(kinds=kinds)
    for other in config.dims:
        for a in config.variances:
            if tanh(other, middle, a) not in problems:
                kinds = ("anisotropic",) if other == d else ("other dimension",)
                problems[tanh(other, middle, a)] = make("tanh", other, a, middle)._replace(kinds=kinds)
    for target in config.hard if log.seed == 0 else ():
        problem = make(target, config.dims[0], 1.0, max(config.sizes))
        problems[f"{target}_d{config.dims[0]}_n{max(config.sizes)}_a1"] = problem._replace(kinds=("hard",))
    return problems


def tanh(d: int, n: int, a: float) -> str:
    return f"tanh_d{d}_n{n}_a{a:g}"


def focus_size(config) -> int:
    """The size that effective dimensions are compared at: the second."""
    return config.sizes[min(1, len(config.sizes) - 1)]


def trial(arm, problems: dict[str, Problem], config, log) -> dict[str, float]:
    metrics = {}
    wanted = set(getattr(arm, "kinds", ()))
    chosen = {name: p for name, p in problems.items() if not p.kinds or not wanted or wanted & set(p.kinds)}
    for name, problem in log.track(chosen.items(), "fit"):
        model = arm(config, log.seed).fit(problem.X, problem.y)
        error = np.square(model.predict(problem.test_x) - problem.test_y).mean() / problem.test_y.var()
        metrics[f"error_{name}"] = float(error)
        if problem.U is not None and hasattr(model, "index_directions"):
            found = model.index_directions(len(problem.U))
            metrics[f"overlap_{name}"] = float(np.square(problem.U @ found.T).sum() / len(problem.U))
        path = getattr(model, "free_energy_path_", None)
        if path is not None and {"isotropic", "focus"} & set(problem.kinds):
            metrics[f"steps_{name}"] = float(steps_to_end(path))
            if "focus" in problem.kinds:
                for step in range(0, len(path), max(1, len(path) // 50)):
                    log.metric("free_energy", float(path[step]), step)
                metrics["energy_fall"] = float(path[-max(1, len(path) // 20) :].mean() / path[0])
    if getattr(arm, "at_rest", False) and not config.table:
        metrics["rest_p"] = rest_p_value(arm.manifold, config.rest_steps, log.seed)
    return metrics


def steps_to_end(path: np.ndarray) -> int:
    """First step at which the free energy is within a tenth of where it ends, the mean over the last twentieth."""
    return int(np.argmax(path <= 1.1 * path[-max(1, len(path) // 20) :].mean()))


def rest_p_value(manifold: str, steps: int, seed: int) -> float:
    """Kolmogorov-Smirnov p-value of particles without data against the law that they should have."""
    D = 8
    options: dict[str, Any] = dict(AT_REST)
    if manifold == "sphere":
        start = torch.zeros(2000, D, dtype=torch.float64)
        start[:, 0] = 1.0
        options["manifold"] = Sphere()
        law = beta((D - 1) / 2, (D - 1) / 2, loc=-1, scale=2)  # of one coordinate of a uniform point
    else:
        start = torch.full((2000, D), 3.0, dtype=torch.float64)
        options["weight_decay"] = 1.0
        law = norm(0, np.sqrt(2 * options["lr"] / options["beta"] / (1 - (1 - options["lr"]) ** 2)))
    p = torch.nn.Parameter(start)
    optimizer = MeanFieldLangevin([p], generator=torch.Generator().manual_seed(seed), **options)
    for _ in range(steps):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    sample = p.detach()[:, 0] if manifold == "sphere" else p.detach().flatten()
    return float(kstest(sample.numpy(), law.cdf).pvalue)


# -- arms ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Particles:
    """Mean-field Langevin dynamics with the estimator's defaults but for width, steps and temperature."""

    manifold: Any = "sphere"
    cold: bool = False
    pooled: bool = False
    kinds: tuple[str, ...] = ()
    at_rest: bool = False

    def __call__(self, config, seed):
        temperature = float("inf") if self.cold else config.beta
        model = MeanFieldLangevinRegressor(
            config.width, self.manifold, beta=temperature, max_iter=config.steps, random_state=seed
        )
        return Pooled(model) if self.pooled else model


class Pooled:
    """The gradient not multiplied by the width: m times shorter steps, so the same noise is m times as hot."""

    def __init__(self, model):
        self.model = model

    def fit(self, X, y):
        m, beta = self.model.n_particles, self.model.beta
        lr = MeanFieldLangevinRegressor(1, self.model.manifold, max_iter=1).fit(X, y).lr_
        self.model.set_params(lr=lr / m, beta=beta / m).fit(X, y)
        return self

    def predict(self, X):
        return self.model.predict(X)


@dataclass(frozen=True)
class Rival:
    make: Callable[[Any, int], Any]
    kinds: tuple[str, ...] = ()

    def __call__(self, config, seed):
        return self.make(config, seed)


def rbf_ridge(config, seed):
    return rivals.RBFRidge()


def random_features(config, seed):
    return rivals.RandomFeatureRidge(2 * config.width, seed)


def adam_mlp(config, seed):
    return rivals.adam_mlp(2 * config.width, seed)


def one_pass_sgd(config, seed):
    return rivals.one_pass_sgd(config.width, seed)


def boosting(config, seed):
    return HistGradientBoostingRegressor(learning_rate=0.05, max_iter=300, early_stopping=True, random_state=seed)


def trained_second_layer(config, seed):
    return rivals.TrainedSecondLayer(config.width, config.steps, config.beta, seed)


# -- what is read off ---------------------------------------------------------------------------------------------------


def value(r: Replicate, arm: str, name: str, metric: str = "error") -> float | None:
    """None where the replicate does not hold this problem, such as under a case of one's own."""
    return r[arm].metrics.get(f"{metric}_{name}")


def versus(of: str, over: str, metric: str = "error", size: int = 1) -> Callable[[Replicate], float | None]:
    """Ratio of two arms on isotropic data, the focus size (1) or the largest (-1)."""

    def ratio(r: Replicate) -> float | None:
        name = isotropic(r, size)
        a, b = value(r, of, name, metric), value(r, over, name, metric)
        return None if a is None or b is None else a / max(b, 1e-12)

    return ratio


def isotropic(r: Replicate, size: int) -> str:
    n = focus_size(r.config) if size == 1 else max(r.config.sizes)
    return tanh(r.config.dims[0], n, 1.0)


def fall_with_effective_dimension(arm: str, a: int = 1) -> Callable[[Replicate], float | None]:
    def ratio(r: Replicate) -> float | None:
        c = r.config
        if len(c.variances) <= a:
            return None
        low, high = (value(r, arm, tanh(c.dims[0], focus_size(c), v)) for v in (c.variances[a], c.variances[0]))
        return None if low is None or high is None else low / high

    return ratio


def rank_correlation(r: Replicate, *, with_d: bool) -> float | None:
    """Of the sphere's errors over dimensions and variances with ``d_eff``, or with ``d``."""
    c = r.config
    cells = [(d, a, value(r, "sphere", tanh(d, focus_size(c), a))) for d in c.dims for a in c.variances]
    if len(c.dims) < 2 or len(c.variances) < 2 or any(error is None for *_, error in cells):
        return None
    against = [d if with_d else 1 + (d - 2) * a / 2 for d, a, _ in cells]
    return float(spearmanr(against, [error for *_, error in cells]).statistic)


def above_rank_with_d(r: Replicate) -> float | None:
    ours, theirs = rank_correlation(r, with_d=False), rank_correlation(r, with_d=True)
    return None if ours is None or theirs is None else ours - theirs


def slower_decline(table: str, arm: str = "sphere") -> Callable[[Replicate], float | None]:
    """What noise columns cost the kernel in R², minus what they cost the arm."""

    def gap(r: Replicate) -> float | None:
        kernel, ours = cost_of_columns(r, "rbf-ridge", table), cost_of_columns(r, arm, table)
        return None if kernel is None or ours is None else kernel - ours

    return gap


def cost_of_columns(r: Replicate, arm: str, table: str) -> float | None:
    without, with_them = (value(r, arm, f"{table}_p{p}") for p in (r.config.columns[0], r.config.columns[-1]))
    return None if without is None or with_them is None else with_them - without


def p_value_at_rest(arm: str) -> Callable[[Replicate], float | None]:
    return lambda r: r[arm].metrics.get("rest_p")


def rows_needed(arm: str, target: float = 0.3) -> Callable[[Replicate], float | None]:
    """Rows to a relative error of ``target`` on isotropic data, between sizes along a straight line in logarithms."""

    def rows(r: Replicate) -> float | None:
        sizes = sorted(r.config.sizes)
        errors = [value(r, arm, tanh(r.config.dims[0], n, 1.0)) for n in sizes]
        known = [error for error in errors if error is not None]
        return crossing(sizes, known, target) if len(known) == len(sizes) else None

    return rows


def crossing(sizes: list[int], errors: list[float], target: float) -> float:
    """Where errors first fall to ``target``, on a straight line in logarithms; infinity if they do not.

    >>> crossing([100, 400], [0.4, 0.1], 0.2)
    200.0
    """
    if errors[0] <= target:
        return float(sizes[0])
    for (n0, e0), (n1, e1) in pairwise(zip(sizes, errors, strict=True)):
        if e1 <= target:
            share = np.log(e0 / target) / np.log(e0 / e1)
            return round(float(n0 * (n1 / n0) ** share), 6)
    return float("inf")


def hard_error(arm: str, target: str) -> Callable[[Replicate], float | None]:
    return lambda r: value(r, arm, f"{target}_d{r.config.dims[0]}_n{max(r.config.sizes)}_a1")


def figure(results: list[Replicate]):
    from matplotlib.figure import Figure

    config = results[0].config
    if config.table:
        return None
    shown = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = shown.subplots(1, 2)
    colours = {"sphere": "#4338ca", "euclidean": "#0f766e", "gd": "#9ca3af", "rbf-ridge": "#b45309", "adam-mlp": "#be123c"}

    def errors(arm: str, name: str) -> list[float]:
        found = [value(r, arm, name) for r in results if arm in r]
        return [error for error in found if error is not None]

    for arm, colour in colours.items():
        for axis, points in (
            (left, [(n, tanh(config.dims[0], n, 1.0)) for n in sorted(config.sizes)]),
            (
                right,
                sorted(
                    (1 + (d - 2) * a / 2, tanh(d, focus_size(config), a))
                    for d in (config.dims if arm == "sphere" else config.dims[:1])
                    for a in config.variances
                ),
            ),
        ):
            known = [(x, errors(arm, name)) for x, name in points if errors(arm, name)]
            if len(known) > 1:
                axis.plot([x for x, _ in known], [np.mean(e) for _, e in known], color=colour, marker="o", lw=2, label=arm)
                axis.vlines(
                    [x for x, _ in known], [min(e) for _, e in known], [max(e) for _, e in known], color=colour, lw=3, alpha=0.3
                )
    left.set(xscale="log", xlabel="rows", ylabel="relative test error", title=f"Isotropic inputs, d = {config.dims[0]}")
    right.set(xscale="log", xlabel="effective dimension", title=f"{focus_size(config)} rows")
    left.legend(frameon=False)
    return shown


SYNTHETIC = ("isotropic", "anisotropic", "hard")
study = Study(
    prepare=prepare,
    trial=trial,
    arms={
        "sphere": Particles(at_rest=True),
        "euclidean": Particles("euclidean", kinds=SYNTHETIC, at_rest=True),
        "gd": Particles("euclidean", cold=True, kinds=("isotropic",)),
        "rbf-ridge": Rival(rbf_ridge),
        "random-features": Rival(random_features, (*SYNTHETIC, "real")),
        "adam-mlp": Rival(adam_mlp, ("isotropic", "hard")),
        "one-pass-sgd": Rival(one_pass_sgd, ("isotropic", "hard")),
        "boosting": Rival(boosting, ("real",)),
        "sphere-gd": Particles(cold=True, kinds=("focus",)),
        "sphere-ambient": Particles(rivals.AmbientSphere(), kinds=("focus",)),
        "sphere-pooled": Particles(pooled=True, kinds=("focus",)),
        "sphere-trained-output": Rival(trained_second_layer, ("focus",)),
    },
    scales={
        "smoke": LangevinConfig(
            seeds=1,
            dims=(20,),
            sizes=(300,),
            variances=(1.0, 0.1),
            hard=(),
            tables=("diabetes",),
            columns=(0, 20),
            max_rows=200,
            test_rows=500,
            width=30,
            steps=150,
            rest_steps=400,
        ),
        "desk": LangevinConfig(),
        "paper": LangevinConfig(
            dims=(64, 128, 256, 512, 1024),
            sizes=(512, 2048, 8192, 32768),
            width=2**14,
            steps=20_000,
            columns=(0, 30, 100, 300),
            max_rows=10_000,
            num_gpus=1,
        ),
    },
    paper=(
        "The paper has no experiments; this is its theorem at a scale that would show rates: d from 64 to 1,024, up to 16,384 "
        "particles, up to 64 · d_eff rows, on one GPU. Data are synthetic or scikit-learn's: nothing is fetched. One fit at "
        "d = 1024, 32,768 rows and 16,384 particles takes about 2e12 multiplications for a step in two products, so some "
        "hours at 20,000 steps; expect several days for the grid. The kernel arm needs memory for 32,768² numbers."
    ),
    gates=[
        Claim(
            "the kernel learns where it can: its error at d_eff below 3 is at most half",
            statistic=lambda r: value(r, "rbf-ridge", tanh(r.config.dims[0], focus_size(r.config), r.config.variances[-1])),
            holds=at_most(0.5),
        ),
        Claim(
            "particles on the sphere have trained: their free energy ends below 60 % of where it began",
            statistic=lambda r: r["sphere"].metrics.get("energy_fall"),
            holds=at_most(0.6),
        ),
    ],
    claims=[
        *(
            Claim(
                f"C1 {arm}: error at variance 0.1 over error at 1, same d and rows",
                published="error falls with d_eff",
                statistic=fall_with_effective_dimension(arm),
                holds=at_most(0.6),
            )
            for arm in ("sphere", "euclidean")
        ),
        Claim(
            "C2 Euclidean error over the sphere's, isotropic, focus size",
            published="sphere needs fewer steps",
            statistic=versus("euclidean", "sphere"),
            holds=above(1),
        ),
        Claim(
            "C2 Euclidean error over the sphere's, isotropic, largest size",
            published="sphere needs fewer steps",
            statistic=versus("euclidean", "sphere", size=-1),
            holds=above(1),
        ),
        *(
            Claim(
                f"C2 steps to 1.1 × its last free energy, Euclidean over sphere, isotropic, {label} size",
                published="sphere needs fewer steps",
                statistic=versus("euclidean", "sphere", "steps", size),
                holds=above(1),
            )
            for label, size in (("focus", 1), ("largest", -1))
        ),
        *(
            Claim(
                f"C3 {arm}'s error over the tuned kernel's, isotropic, {label} size",
                published="d_eff rows instead of d^degree",
                statistic=versus(arm, "rbf-ridge", size=size),
                holds=below(1),
            )
            for arm, label, size in (("sphere", "focus", 1), ("sphere", "largest", -1), ("euclidean", "largest", -1))
        ),
        Claim(
            "C4 rank correlation of the sphere's error with d_eff over dimensions and variances",
            published="rows ~ d_eff",
            statistic=partial(rank_correlation, with_d=False),
            holds=at_least(0.8),
        ),
        Claim(
            "C4 that correlation above the one with d",
            published="d_eff, not d",
            statistic=above_rank_with_d,
            holds=above(0),
        ),
        *(
            Claim(
                f"C5 {table}: R² that 100 noise columns cost the kernel, minus what they cost the sphere",
                statistic=slower_decline(table),
                holds=above(0),
            )
            for table in ("diabetes", "breast_cancer", "digits")
        ),
        *(
            Claim(
                f"C6 without data, {law}: Kolmogorov-Smirnov p-value",
                published="the Gibbs measure",
                statistic=p_value_at_rest(arm),
                holds=above(0.01),
            )
            for arm, law in (
                ("euclidean", "Euclidean particles are Gaussian"),
                ("sphere", "particles on the sphere are uniform"),
            )
        ),
        Claim("Kernel: error at variance 0.1 over error at 1", statistic=fall_with_effective_dimension("rbf-ridge")),
        Claim("Sphere: error at variance 0.03 over error at 1", statistic=fall_with_effective_dimension("sphere", 2)),
        Claim("Euclidean error over the kernel's, isotropic, focus size", statistic=versus("euclidean", "rbf-ridge")),
        Claim("Gradient descent's error over the sphere's, isotropic, focus size", statistic=versus("gd", "sphere")),
        Claim("Gradient descent's error over Euclidean Langevin's, isotropic, focus size", statistic=versus("gd", "euclidean")),
        Claim("Error on the sphere without noise over with it", statistic=versus("sphere-gd", "sphere")),
        Claim("Error without tangent projections over with them", statistic=versus("sphere-ambient", "sphere")),
        Claim("Error of a drift not scaled by the width over scaled", statistic=versus("sphere-pooled", "sphere")),
        Claim("Error with trained output weights over frozen ones", statistic=versus("sphere-trained-output", "sphere")),
        Claim(
            "Error of the MLP under Adam over the sphere's, isotropic, largest size",
            statistic=versus("adam-mlp", "sphere", size=-1),
        ),
        Claim("Rows to a relative error of 0.3, sphere, isotropic", statistic=rows_needed("sphere")),
        Claim("Rows to a relative error of 0.3, kernel, isotropic", statistic=rows_needed("rbf-ridge")),
        *(
            Claim(
                f"Sphere's error on {what} (largest isotropic problem, first replicate)", statistic=hard_error("sphere", target)
            )
            for target, what in (("he3", "a cubic Hermite polynomial"), ("parity", "the sign of a product of three"))
        ),
    ],
    figure=figure,
    compare=("error_tanh_d30_n400_a1", "error_tanh_d30_n1200_a1", "error_diabetes_p0", "error_digits_p0"),
)
