"""The closed forms held against what they stand for: really leaving a block out and fitting again."""

import numpy as np
from scipy.stats import spearmanr

from .detector import TimeInf
from .linear import LinearAttribution
from .rivals import lag_matrix

ROUND_OFF = 1e-9  # a residual below this, in standard deviations of the series, is no residual


def leave_one_out(values, m, *, refit) -> dict[str, float]:
    """Self-influence against leaving a block out: rank correlation, and the two identities against a real refit.

    Blocks whose leverage is 1 cannot be left out; a series that the fit reproduces exactly has nothing to rank.
    """
    exact = TimeInf(m, mode="loo").fit(values)
    linear = exact.attribution_
    assert isinstance(linear, LinearAttribution)
    s, h, squared = linear.diagnostics()
    open_to = np.flatnonzero((1 - h > 1e-6) & (squared > ROUND_OFF**2))
    if len(open_to) < 3 or np.ptp(s[open_to]) == 0:
        return {}
    change = 0.5 * squared * (1 / (1 - h) ** 2 - 1)
    found = {"loo_spearman": spearmanr(s[open_to], change[open_to])[0]}
    if not refit:
        return found
    X, Y = lag_matrix(exact.blocks_.series[0], m)
    A = np.c_[np.ones(len(X)), X]
    B, typical = linear.B, change[open_to].mean()
    errors = []
    for b in open_to[
        np.argsort(s[open_to])[[len(open_to) // 2, -len(open_to) // 50, -1]]
    ]:  # a usual block, an odd one, the oddest
        kept = np.arange(len(A)) != b
        B_without = np.linalg.lstsq(A[kept], Y[kept], rcond=None)[0]
        gradient = -np.outer(A[b], Y[b] - A[b] @ B)
        by_gradient = np.sum(gradient * (B_without - B)) - linear.self_influence()[b]
        by_loss = 0.5 * np.square(Y[b] - A[b] @ B_without).sum() - 0.5 * squared[b] - change[b]
        errors.append((abs(by_gradient) / max(change[b], typical), abs(by_loss) / max(change[b], typical)))
    return found | dict(zip(("loo_gradient_error", "loo_loss_error"), np.max(errors, axis=0).tolist(), strict=True))
