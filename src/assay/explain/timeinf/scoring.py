"""What an arm's scores and values are worth: against labels, and by what pruning does to a forecaster."""

from collections.abc import Callable

import numpy as np
from sklearn.linear_model import LinearRegression
from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score

from .figures import draw_series
from .pruning import Order, prune_curve
from .verification import leave_one_out

# Arms that are too slow for every file: they run on few_files of a group, and every other arm is measured on these as well.
FEW = ("timeinf-lstm", "timeinf-nonparametric", "ecod", "lof", "knn", "matrix-profile", "cooks-distance")
FRACTIONS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)


def detection(arm, series, config, log) -> dict[str, float]:
    few = set(np.linspace(0, len(series) - 1, min(config.few_files, len(series))).round().astype(int))
    everywhere = log.arm not in FEW
    chosen = range(len(series)) if everywhere else sorted(few)
    measured: dict[str, list[float]] = {}
    for i in log.track(chosen, log.arm):
        name, values, labels = series[i]
        for m in config.block_lengths:
            if len(values) - m <= 2 * m * values.shape[1]:
                log.note(f"{name}: too short for blocks of {m}")
                continue
            scores = arm(values, None, m, config)
            if scores is None:
                continue
            scores = np.where(np.isfinite(scores), scores, np.nanmedian(scores))  # a point without a score is neither
            if log.arm == "timeinf-linear":
                for metric, value in leave_one_out(values, m, refit=i in few).items():
                    measured.setdefault(metric, []).append(value)
            if labels is None or labels.all() or not labels.any():
                log.artifact(f"scores-{name.replace('/', '-')}-m{m}.csv", "\n".join(["score", *(f"{s:.9g}" for s in scores)]))
                measured.setdefault(f"top_percent_share_m{m}", []).append(
                    np.sort(scores)[-len(scores) // 100 :].sum() / scores.sum()
                )
                continue
            found = {
                "auc": roc_auc_score(labels, scores),
                "ap": average_precision_score(labels, scores),
                "f1": best_f1(labels, scores),
            }
            if log.arm == "random":
                measured.setdefault(f"chance_error_m{m}", []).append((1 / labels.sum() + 1 / (~labels).sum()) / 12)
            for metric, value in found.items():
                if everywhere:
                    measured.setdefault(f"{metric}_m{m}", []).append(value)
                if i in few:
                    measured.setdefault(f"few_{metric}_m{m}", []).append(value)
            if log.arm == "timeinf-linear" and i == chosen[0] and m == config.block_lengths[-1]:
                log.figure("series", draw_series(name, values, labels, scores, m))
    how: dict[str, Callable[..., float]] = {"loo_gradient_error": max, "loo_loss_error": max, "loo_spearman": min}
    how |= {f"chance_error_m{m}": _error_of_mean for m in config.block_lengths}
    return {metric: float(how.get(metric, np.mean)(values)) for metric, values in measured.items()}


def _error_of_mean(variances) -> float:
    """Standard error of a mean AUC of random scores, from the variances of its files (Mann and Whitney's)."""
    return np.sqrt(np.sum(variances)) / len(variances)


def best_f1(labels, scores) -> float:
    """The largest F1 over all thresholds, point by point."""
    precision, recall, _ = precision_recall_curve(labels, scores)
    return float(np.max(2 * precision * recall / np.maximum(precision + recall, 1e-12)))


def pruning(arm, train, valid, test, config, log) -> dict[str, float]:
    m = config.prune_block_length
    values = arm(train, valid, m, config)
    if values is None:
        return {}
    metrics = {}
    orders: tuple[tuple[Order, str], ...] = (("most_valuable", "most"), ("least_valuable", "least"))
    for order, label in orders:
        tables = [prune_curve(v, train, test, FRACTIONS, LinearRegression(), order=order) for v in np.atleast_2d(values)]
        curve = np.mean([t.relative_mse for t in tables], axis=0)
        for fraction, value in zip(FRACTIONS, curve, strict=True):
            log.metric(f"relative_mse_{label}", value, 100 * fraction)
        at = dict(zip(FRACTIONS, curve, strict=True))
        metrics[f"{label}_10"], metrics[f"{label}_50"] = at[0.1], at[0.5]
        metrics[f"{label}_area"] = float(np.trapezoid(curve, FRACTIONS) / FRACTIONS[-1])
        metrics["r2_full"] = float(tables[0].r2[0])
    return metrics
