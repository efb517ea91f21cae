"""Do block-averaged influences find anomalies and helpful blocks better than attributions that ignore time?

Published: TimeInf detects anomalies better than Isolation Forest, LSTM and transformer detectors on five benchmarks, and
removing the blocks it calls helpful hurts a forecaster more than removing those of any rival (arXiv 2407.15247). Desk: the
labelled series of four NAB groups and channel 0 of NASA's SMAP and MSL (a replicate each, the first 12,000 points of every
file), block lengths 25 and 100; and pruning on ten univariate series (3,000 / 1,000 / 1,000 points to train, value and
test). Metrics are means over a group's files; ``few_`` metrics over the same few evenly spaced files for every arm, since
the LSTM, the gradient-free version and other packages' detectors are slow. Desk cannot show: multichannel SMAP, MSL, SMD, PSM and
SWaT, where the paper has its largest margins, nor its transformers. AUC is not point-adjusted, which would flatter all.

An arm is a callable ``(series, evaluation, block_length, config) -> array | None``. ``series`` and ``evaluation`` are
``(T, channels)``. With ``evaluation=None`` it returns an anomaly score for every time point, ``(T,)``, high = odd, NaN for
none. With an evaluation series it returns a value for every training block, ``(T - block_length,)`` or several rows of
them to be averaged over, high = helpful. None: this arm does not do that.

``prepare`` returns a ``Case``: the series to score, ``(name, values (T, channels), labels (T,) bool or None)`` each, and a
``split``: a train, a validation and a test series, or None. With ``--set data=mine.csv`` your own series is both scored and
split 60/20/20; columns are channels, a column called ``label`` holds the labels. With ``--case`` also pass ``--set data=NAME``.
"""

from functools import partial
from typing import NamedTuple

import numpy as np

from assay.bench import Claim, Config, Study, above, at_least, at_most, require
from assay.data import load_series

from . import arms
from .blocks import time_average
from .figures import draw
from .rivals import lag_matrix, on_windows, standardised
from .scoring import detection, pruning

GROUPS = ("nab/realTraffic", "nab/realKnownCause", "nab/realAWSCloudwatch", "nab/realAdExchange", "smap", "msl")
PRUNED = (
    "nab/realKnownCause/nyc_taxi",
    "nab/realKnownCause/machine_temperature_system_failure",
    *(f"exchange_rate/{i}" for i in range(8)),
)


class TimeInfConfig(Config):
    data: str = ""
    """A series of your own, a path to a CSV file, in place of the groups and the pruned series."""
    groups: tuple[str, ...] = GROUPS
    """Sets whose labelled series are scored, a replicate each."""
    pruned: tuple[str, ...] = PRUNED
    """Series that are pruned, a replicate each; ``exchange_rate/3`` is its fourth channel."""
    block_lengths: tuple[int, ...] = (25, 100)
    """Lags of a block, for scoring."""
    max_points: int = 12_000
    """Longest stretch of a file that is used, from its start."""
    max_files: int = 1000
    """Labelled files of a group that are used."""
    few_files: int = 3
    """Files, evenly spaced over a group, on which the slow arms run: LSTM, gradient-free version, other packages' detectors."""
    packages: bool = True
    """Whether the detectors of other packages run at all."""
    slow_block_length: int = 25
    """Longest block for the LSTM and the gradient-free version."""
    lstm_epochs: int = 10
    """Training of the LSTM, at batches of 128 and a rate of 1e-2."""
    n_subsets: int = 60
    """Trees of the gradient-free version, and models of Data-OOB."""
    prune_block_length: int = 100
    """Lags of a block, for pruning."""
    prune_points: tuple[int, int, int] = (3000, 1000, 1000)
    """Training, validation and test points of a pruned series, from its start."""


class Case(NamedTuple):
    series: list[tuple[str, np.ndarray, np.ndarray | None]]
    split: tuple[np.ndarray, np.ndarray, np.ndarray] | None


def replicates(config) -> list[str]:
    return [config.data] if config.data else [*config.groups, *(f"prune/{name}" for name in config.pruned)]


def prepare(config, log) -> Case:
    if config.data:
        (series,) = load_series(config.data)
        split = _split(series.values, (0.6, 0.2, 0.2))
        m, width = config.prune_block_length, 1 + config.prune_block_length * series.values.shape[1]
        if len(split[0]) - m <= width or min(map(len, split)) <= m + 1:
            log.note(f"{len(series.values)} points are too few to be pruned with blocks of {m}: scored only")
            split = None
        return Case([(series.name, series.values, series.labels)], split)
    if log.replicate.startswith("prune/"):
        name = log.replicate.removeprefix("prune/")
        base, _, channel = name.rpartition("/") if name.startswith("exchange_rate/") else (name, "", "0")
        (series,) = load_series(base)
        return Case([], _split(series.values[:, [int(channel)]], config.prune_points))
    files = []
    for series in load_series(log.replicate):
        values, labels = series.values[: config.max_points], series.labels
        if labels is None or not labels[: config.max_points].any():
            log.note(f"{series.name} has no labelled point among its first {config.max_points}: left out")
        else:
            files.append((series.name, values, labels[: config.max_points]))
    return Case(files[: config.max_files], None)


def _split(values, parts):
    """Three stretches one after another, in units of the first; ``parts``: points, or shares of the whole."""
    points = [int(p * len(values)) if isinstance(p, float) else p for p in parts]
    train, valid, test = np.split(values[: sum(points)], np.cumsum(points)[:2])
    mean, scale = train.mean(axis=0), np.where(np.ptp(train, axis=0) == 0, 1.0, train.std(axis=0))
    return (train - mean) / scale, (valid - mean) / scale, (test - mean) / scale


def trial(arm, case: Case, config, log) -> dict[str, float]:
    metrics: dict[str, float] = {}
    if case.series:
        metrics |= detection(arm, case.series, config, log)
    if case.split is not None:
        metrics |= pruning(arm, *case.split, config, log)
    return metrics


def pyod_detector(series, evaluation, m, config, *, module, name):
    if evaluation is not None or not config.packages:
        return None
    detector = getattr(require(f"pyod.models.{module}", extra="explain"), name)()
    return on_windows(standardised(series), m, lambda w: detector.fit(w).decision_scores_)


def matrix_profile(series, evaluation, m, config):
    if evaluation is not None or not config.packages:
        return None
    stumpy = require("stumpy", extra="explain")
    distances = [np.asarray(stumpy.stump(channel.copy(), m)[:, 0], dtype=float) for channel in series.T]
    distance = np.mean([np.where(np.isfinite(d), d, 0.0) for d in distances], axis=0)
    return time_average(distance, m - 1, "all")[0]


def cooks_distance(series, evaluation, m, config):
    if evaluation is not None or not config.packages:
        return None
    models = require("statsmodels.api", extra="explain")
    influence = require("statsmodels.stats.outliers_influence", extra="explain")
    X, Y = lag_matrix(standardised(series), m)
    A = np.c_[np.ones(len(X)), X]
    with np.errstate(all="ignore"):
        distance = np.mean([influence.OLSInfluence(models.OLS(y, A).fit()).cooks_distance[0] for y in Y.T], axis=0)
    return time_average(distance, m, "all")[0]


def without_labels(r) -> bool:
    """Whether this is a user's series in which no arm could be held against labels."""
    return bool(r.config.data) and not any("auc_" in metric for outcome in r.outcomes.values() for metric in outcome.metrics)


def gain(metric: str, arm: str, rival: str):
    """How much higher an arm's metric is than a rival's; None on a replicate that has no such metric."""

    def statistic(r) -> float | None:
        if "auc_" in metric and without_labels(r):
            return None
        if metric not in r[arm].metrics or metric not in r[rival].metrics:
            return None
        return r[arm].metrics[metric] - r[rival].metrics[metric]

    return statistic


def value_of(metric: str, arm: str = "timeinf-linear"):
    return lambda r: r[arm].metrics.get(metric)


def distance_from_chance(r) -> float | None:
    """How far the AUC of random scores is from ½, in units of what is allowed: 0.05, or three standard errors if more."""
    if without_labels(r):
        return None
    metrics = r["random"].metrics
    if "auc_m25" not in metrics:
        return None
    return abs(metrics["auc_m25"] - 0.5) / max(0.05, 3 * metrics["chance_error_m25"])


def forecast(r) -> float | None:
    """R² of the forecaster on a pruned series of the study's own; a user's series is pruned whatever it is."""
    return None if r.config.data else r["timeinf-linear"].metrics.get("r2_full")


# fmt: off
study = Study(
    prepare=prepare,
    trial=trial,
    replicates=replicates,
    arms={
        "timeinf-linear": arms.timeinf,
        "timeinf-paper-scaling": arms.timeinf_paper_scaling,
        "timeinf-official-code": arms.timeinf_official,
        "timeinf-lstm": arms.timeinf_lstm,
        "timeinf-nonparametric": arms.timeinf_nonparametric,
        "residual-point": partial(arms.residual, block_mean=False),
        "residual-block": partial(arms.residual, block_mean=True),
        "leverage-block": partial(arms.residual, block_mean=True, leverage=True),
        "cooks-distance": cooks_distance,
        "isolation-forest-point": partial(arms.isolation_forest, windows=False),
        "isolation-forest-window": partial(arms.isolation_forest, windows=True),
        "ecod": partial(pyod_detector, module="ecod", name="ECOD"),
        "lof": partial(pyod_detector, module="lof", name="LOF"),
        "knn": partial(pyod_detector, module="knn", name="KNN"),
        "matrix-profile": matrix_profile,
        "random": arms.random_values,
        "self-influence": arms.self_influence_value,
        "knn-shapley": arms.knn_shapley_value,
        "data-oob": arms.data_oob_value,
        "leave-one-out": arms.leave_one_out_value,
    },
    scales={
        "smoke": TimeInfConfig(
            groups=("nab/realTraffic",), pruned=PRUNED[:1], block_lengths=(25,), max_points=1200, max_files=2, few_files=1,
            packages=False, lstm_epochs=1, n_subsets=20, prune_block_length=25, prune_points=(900, 300, 300),
        ),
        "desk": TimeInfConfig(),
        "paper": TimeInfConfig(
            block_lengths=(100,), max_points=1_000_000, few_files=1000, slow_block_length=100, lstm_epochs=100,
            n_subsets=1000,
        ),
    },
    paper="Every file whole, all rivals on all of them: about a day on two cores. The paper also has the multichannel SMAP, MSL, "
    "SMD, PSM and SWaT (the last two by request), and Traffic, Solar and Electricity for pruning: give them as CSV files.",
    gates=[
        Claim("random scores are at chance: AUC off ½ by at most 0.05 or three standard errors", statistic=distance_from_chance, holds=at_most(1)),
        Claim("the forecaster works on the pruned series: R² on the test stretch", statistic=forecast, holds=at_least(0.5)),
    ],
    claims=[
        Claim("leave-one-out score = gradient × retrained change (relative error)", published="identity",
              statistic=value_of("loo_gradient_error"), holds=at_most(1e-9)),
        Claim("change of a block's own loss = ½ r² (1/(1−h)² − 1) (relative error)", published="identity",
              statistic=value_of("loo_loss_error"), holds=at_most(1e-9)),
        Claim("self-influence ranks blocks as that change does: least Spearman of a file", statistic=value_of("loo_spearman"),
              holds=at_least(0.99)),
        Claim("AUC above the squared residual of the point, blocks of 25", published="better than i.i.d. attributions",
              statistic=gain("auc_m25", "timeinf-linear", "residual-point"), holds=above(0)),
        Claim("AUC above the squared residual of the point, blocks of 100", published="better than i.i.d. attributions",
              statistic=gain("auc_m100", "timeinf-linear", "residual-point"), holds=above(0)),
        Claim("AUC above the block-averaged residual, blocks of 100", published="influence adds to averaging",
              statistic=gain("auc_m100", "timeinf-linear", "residual-block"), holds=above(0)),
        Claim("dropping the top 10 % by test influence raises test error more than dropping at random", published="every data set",
              statistic=gain("most_10", "timeinf-linear", "random"), holds=above(0)),
        Claim("AUC beside the block-averaged residual's, blocks of 25", statistic=gain("auc_m25", "timeinf-linear", "residual-block")),
        Claim("AUC beside leverage alone, blocks of 100", statistic=gain("auc_m100", "timeinf-linear", "leverage-block")),
        Claim("AUC beside Isolation Forest on points, blocks of 100", published="better on five benchmarks",
              statistic=gain("auc_m100", "timeinf-linear", "isolation-forest-point")),
        Claim("AUC beside Isolation Forest on windows of 25", statistic=gain("auc_m25", "timeinf-linear", "isolation-forest-window")),
        Claim("AUC beside Isolation Forest on windows of 100", statistic=gain("auc_m100", "timeinf-linear", "isolation-forest-window")),
        Claim("AUC that the official scaling costs, blocks of 25", statistic=gain("auc_m25", "timeinf-linear", "timeinf-paper-scaling")),
        Claim("AUC of the LSTM beside the linear model, blocks of 25", statistic=gain("few_auc_m25", "timeinf-lstm", "timeinf-linear")),
        Claim("AUC of the gradient-free version beside the linear model, blocks of 25",
              statistic=gain("few_auc_m25", "timeinf-nonparametric", "timeinf-linear")),
        Claim("test error over full data's after dropping the least valuable 10 % by test influence", published="falls",
              statistic=value_of("least_10")),
        Claim("test error over full data's after dropping KNN-Shapley's top 50 %", published="near that of random",
              statistic=value_of("most_50", "knn-shapley")),
        Claim("test error over full data's after dropping test influence's top 50 %", statistic=value_of("most_50")),
    ],
    figure=draw,
    compare=("auc_m25", "auc_m100", "few_auc_m25", "few_auc_m100", "most_10", "most_50"),
)
# fmt: on
