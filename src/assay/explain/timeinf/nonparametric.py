"""Influence of blocks without gradients: models that saw a block against models that did not."""

import itertools

import numpy as np
from sklearn.base import RegressorMixin, clone

from .blocks import Blocks

ROWS = 16_384  # blocks a model predicts at once


class SubsetAttribution:
    r"""Influence from ``n_subsets`` regressors, each fitted on a draw of blocks with replacement.

    .. math:: I(b, c) = \operatorname{mean}_{k:\, b \notin S_k} \ell_k(c) - \operatorname{mean}_{k:\, b \in S_k} \ell_k(c)

    A draw of a fraction :math:`f` contains a given block with probability :math:`1 - e^{-f}`. A block that every draw or
    no draw contains has no estimate: NaN.
    """

    def __init__(
        self, regressor: RegressorMixin, blocks: Blocks, *, n_subsets: int, fraction: float, random_state: np.random.RandomState
    ):
        n = blocks.n
        size = int(fraction * n)
        if size < 2:
            raise ValueError(
                f"subset_fraction={fraction} of {n} blocks leaves {size} to fit a regressor on, at least 2 are needed"
            )
        self.blocks = blocks
        self.models = []
        self.inside = np.zeros((n_subsets, n), dtype=bool)
        total = np.zeros((2, n))  # summed loss of the models that did not, and that did, see each block
        lags = [chunk for _, chunk, _ in blocks.chunks(n)]  # one view a series
        targets = np.concatenate([chunk for _, _, chunk in blocks.chunks(n)])
        starts = np.cumsum([0, *blocks.lengths])
        for k in range(n_subsets):
            drawn = np.sort(random_state.randint(n, size=size))
            self.inside[k, drawn] = True
            model = clone(regressor)
            seeds = [name for name in sorted(model.get_params()) if name == "random_state" or name.endswith("__random_state")]
            model.set_params(**{name: random_state.randint(2**31 - 1) for name in seeds})
            # sorted, so that the rows of each series are one stretch of the draw
            cuts = np.searchsorted(drawn, starts)
            pairs = itertools.pairwise(cuts)
            X = np.concatenate([lags[i][drawn[a:b] - starts[i]] for i, (a, b) in enumerate(pairs)])
            model.fit(X, _target(targets[drawn]))
            self.models.append(model)
            losses = _losses(model, blocks)
            total[0] += np.where(self.inside[k], 0.0, losses)
            total[1] += np.where(self.inside[k], losses, 0.0)
        seen = self.inside.sum(axis=0)
        self.counts = np.stack([n_subsets - seen, seen])
        self._self = self._difference(total)

    def self_influence(self) -> np.ndarray:
        return self._self

    def influence_on(self, evaluation: Blocks) -> np.ndarray:
        losses = np.array([_losses(model, evaluation).mean() for model in self.models])  # (n_subsets,)
        inside = losses @ self.inside
        return self._difference(np.stack([losses.sum() - inside, inside]))

    def score_new(self, blocks: Blocks) -> np.ndarray:
        raise ValueError(
            "a regressor without gradients gives influence to the blocks it was trained on only: "
            "fit the new series, or use influence_on for the training blocks' effect on it"
        )

    def _difference(self, total: np.ndarray) -> np.ndarray:
        means = total / np.where(self.counts > 0, self.counts, np.nan)
        return means[0] - means[1]


def _target(Y: np.ndarray) -> np.ndarray:
    return Y[:, 0] if Y.shape[1] == 1 else Y


def _losses(model: RegressorMixin, blocks: Blocks) -> np.ndarray:
    """Half the squared error of every block, ``(n,)``."""
    losses = np.empty(blocks.n)
    for where, lags, targets in blocks.chunks(ROWS):
        predicted = np.asarray(model.predict(np.ascontiguousarray(lags))).reshape(targets.shape)
        losses[where] = 0.5 * np.square(targets - predicted).sum(axis=1)
    return losses
