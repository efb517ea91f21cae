"""The arms of the study that need no further package: ``(series, evaluation, block_length, config) -> array | None``."""

import numpy as np
import torch
from sklearn.ensemble import IsolationForest
from sklearn.tree import DecisionTreeRegressor
from torch import Tensor, nn

from .blocks import time_average
from .detector import TimeInf
from .linear import LinearAttribution
from .rivals import data_oob, knn_shapley, official_scores, on_windows, retrained_value, standardised


class LSTM(nn.Module):
    """The official black-box forecaster: one layer of eight units, read off at the last step."""

    def __init__(self, channels: int, hidden: int = 8):
        super().__init__()
        self.cell = nn.LSTM(channels, hidden, batch_first=True)
        self.head = nn.Linear(hidden, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


def timeinf(series, evaluation, m, config, **settings):
    detector = TimeInf(m, random_state=0, **settings).fit(series)
    return detector.decision_scores_ if evaluation is None else detector.influence_on(evaluation)


def timeinf_paper_scaling(series, evaluation, m, config):
    return TimeInf(m, scaling="paper").fit(series).decision_scores_ if evaluation is None else None


def timeinf_official(series, evaluation, m, config):
    return official_scores(series, m) if evaluation is None else None


def timeinf_lstm(series, evaluation, m, config):
    if m > config.slow_block_length or evaluation is not None:
        return None
    torch.manual_seed(0)
    training = {"epochs": config.lstm_epochs, "lr": 1e-2, "batch_size": 128}
    return timeinf(series, None, m, config, model=LSTM(series.shape[1]), ridge=1e-4, fit_params=training)


def timeinf_nonparametric(series, evaluation, m, config):
    if m > config.slow_block_length or evaluation is not None:
        return None
    return timeinf(series, None, m, config, model=DecisionTreeRegressor(min_samples_leaf=5), n_subsets=config.n_subsets)


def self_influence_value(series, evaluation, m, config):
    return None if evaluation is None else TimeInf(m).fit(series).self_influence("block")


def residual(series, evaluation, m, config, *, block_mean, leverage=False):
    """Squared residual of a linear autoregression, or leverage: of the target alone, or averaged over the blocks of a point."""
    if evaluation is not None:
        return None
    linear = TimeInf(m).fit(series).attribution_
    assert isinstance(linear, LinearAttribution)
    _, h, squared = linear.diagnostics()
    value = h if leverage else squared
    return time_average(value, m, "all")[0] if block_mean else np.r_[np.full(m, np.nan), value]


def isolation_forest(series, evaluation, m, config, *, windows):
    if evaluation is not None:
        return None
    z = standardised(series)
    forest = IsolationForest(random_state=0)
    return on_windows(z, m, lambda w: -forest.fit(w).score_samples(w)) if windows else -forest.fit(z).score_samples(z)


def random_values(series, evaluation, m, config):
    rng = np.random.default_rng(0)
    return rng.random(len(series)) if evaluation is None else rng.random((5, len(series) - m))


def knn_shapley_value(series, evaluation, m, config):
    return None if evaluation is None else knn_shapley(series, evaluation, m)


def data_oob_value(series, evaluation, m, config):
    return None if evaluation is None else data_oob(series, m, models=config.n_subsets, seed=0)


def leave_one_out_value(series, evaluation, m, config):
    return None if evaluation is None else retrained_value(series, evaluation, m)
