"""Whether a model learns an unseen class in context, or runs the algorithm that it has."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from .classes import FunctionClass, sample_prompts
from .references import Reference, predict_at


def agreement(predicted: Tensor, reference: Tensor) -> dict[str, float]:
    r"""How alike two predictors are over prompts, ``(B,)`` each.

    Returns:
        ``gap``, :math:`E(\hat y - \hat y_R)^2`; ``size``, :math:`E \hat y_R^2`, the gap of a predictor that says 0;
        ``alignment``, the correlation of the two, which shrinking either does not change (0 where one is constant).

    Example:
        >>> agreement(torch.tensor([1.0, 2.0, 2.0]), torch.tensor([2.0, 4.0, 3.0]))
        {'gap': 2.0, 'size': 9.666..., 'alignment': 0.866...}
    """
    p, r = predicted.double(), reference.double()
    p0, r0 = p - p.mean(), r - r.mean()
    norm = (p0.norm() * r0.norm()).clamp_min(torch.finfo(torch.float64).tiny)
    return {
        "gap": float((p - r).square().mean()),
        "size": float(r.square().mean()),
        "alignment": float((p0 @ r0 / norm).clamp(-1, 1)),
    }


def bootstrap(errors: Tensor, *, draws: int = 1000, level: float = 0.9, seed: int = 0) -> tuple[float, float]:
    """Interval of the mean of ``(B,)`` errors: the middle `level` of the means of `draws` resamples.

    Example:
        >>> bootstrap(torch.ones(10))
        (1.0, 1.0)
    """
    gen = torch.Generator().manual_seed(seed)
    errors = errors.double().cpu()
    means = torch.stack([errors[torch.randint(len(errors), (len(errors),), generator=gen)].mean() for _ in range(draws)])
    low, high = torch.quantile(means, torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=means.dtype)).tolist()
    return low, high


def ood_report(
    predictor: Any,
    train_class: FunctionClass,
    test_classes: Sequence[FunctionClass],
    references: Sequence[Reference],
    ks: Sequence[int],
    n_prompts: int = 1280,
    *,
    d: int | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    r"""Errors of a predictor on its own class and on unseen ones, and which reference it behaves like.

    "Can In-context Learning Really Generalize to Out-of-distribution Tasks?", ICLR 2025, https://arxiv.org/abs/2410.09695.

    A model that learns a new class in context approaches a fit of *that* class; one that runs what it has stays with a
    fit of the *training* class. Predicting 0 is nearer to some fits than to others, so each gap comes with the gap that
    0 would have.

    Args:
        predictor: A `Reference`, or a callable ``(xs (B, n, d), ys (B, n)) -> (B, n)`` that for every i uses y₁ … y_{i−1}
            alone: a trained model, or a language model behind a function that writes numbers as text.
        train_class: What it was trained on; reported first.
        test_classes: What it was not.
        references: Fits of the training class and of the test classes, and whatever else.
        ks: Examples before the query, ≥ 0 (≥ 1 for a `GDReference`).
        n_prompts: Prompts a class, ≥ 2, all of them distinct.
        d: Dimensions of x; default ``predictor.d``.
        seed: Of the prompts.

    Returns:
        One row for each class, k and reference: ``class, k, error, low, high, median`` (squared errors over d, the mean
        with its 90 % bootstrap interval); ``reference, reference_error, gap, gap_of_zero`` (over d), ``alignment``;
        ``closest``, the reference of smallest gap there.

    Raises:
        ValueError: no classes, references or ks; `n_prompts` below 2; no d; classes whose labels are vectors or not
            finite; predictions that are not finite.

    Example:
        >>> from assay.language.icl_ood import LINEAR, QUADRATIC, LeastSquares
        >>> fits = [LeastSquares(name="linear"), LeastSquares(QUADRATIC.features, name="quadratic")]
        >>> table = ood_report(LeastSquares(), LINEAR, [QUADRATIC], fits, ks=[12], n_prompts=50, d=3)
        >>> table[["class", "reference", "closest"]].to_dict("list")["closest"]
        ['linear', 'linear', 'linear', 'linear']
    """
    d = getattr(predictor, "d", None) if d is None else d
    if not isinstance(d, int) or d < 1:
        raise ValueError(f"d must be an integer of at least 1, given or known to the predictor, got {d}")
    if not references or not len(ks) or n_prompts < 2:
        raise ValueError(
            f"references and ks must not be empty and n_prompts at least 2, got {len(references)}, {ks}, {n_prompts}"
        )
    device = next((p.device for p in predictor.parameters()), None) if isinstance(predictor, torch.nn.Module) else None
    rows = []
    for function_class in dict.fromkeys([train_class, *test_classes]):
        gen = torch.Generator(device or "cpu").manual_seed(seed)
        xs, ys = sample_prompts(function_class, n_prompts, max(ks) + 1, d, gen)
        if ys.ndim == 3:
            raise ValueError(f"{function_class.name}: labels are vectors; give `accuracy` of the class the predictions instead")
        target = ys[:, list(ks)]
        predicted = predict_at(predictor, xs, ys, ks)
        fits = [predict_at(reference, xs, ys, ks) for reference in references]
        for i, k in enumerate(ks):
            errors = (predicted[:, i] - target[:, i]).square() / d
            low, high = bootstrap(errors)
            alike = [agreement(predicted[:, i], fit[:, i]) for fit in fits]
            closest = references[min(range(len(fits)), key=lambda j: alike[j]["gap"])].name
            for reference, fit, like in zip(references, fits, alike, strict=True):
                rows.append(
                    {
                        "class": function_class.name,
                        "k": k,
                        "error": float(errors.double().mean()),
                        "low": low,
                        "high": high,
                        "median": float(errors.median()),
                        "reference": reference.name,
                        "reference_error": float((fit[:, i] - target[:, i]).double().square().mean()) / d,
                        "gap": like["gap"] / d,
                        "gap_of_zero": like["size"] / d,
                        "alignment": like["alignment"],
                        "closest": closest,
                    }
                )
    return pd.DataFrame(rows)
