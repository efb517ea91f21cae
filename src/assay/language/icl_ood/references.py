"""Classical predictors of a prompt's next label: each sees the first k examples and is asked for the label of the next x."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

Features = Callable[[Tensor], Tensor]
_PROMPTS = 256  # given to a model at once
_ENTRIES = 1 << 24  # numbers of one working array: 128 MB in float64


@runtime_checkable
class Reference(Protocol):
    """What a prediction is compared with."""

    @property
    def name(self) -> str: ...

    def predict(self, xs: Tensor, ys: Tensor, ks: Sequence[int]) -> Tensor:
        """``(B, n, d)``, ``(B, n)`` and lengths of context, below n, to ``(B, len(ks))``."""
        ...


def predict_at(predictor: Any, xs: Tensor, ys: Tensor, ks: Sequence[int]) -> Tensor:
    """Predictions after k examples, of a `Reference` or of any callable ``(xs, ys) -> (B, n)``; without gradients.

    A callable is given a few hundred prompts at a time.

    Args:
        predictor: Either; a module is put into evaluation mode for the call.
        xs: ``(B, n, d)``.
        ys: ``(B, n)``.
        ks: Lengths of context, 0 ≤ k < n.

    Shapes:
        - output: ``(B, len(ks))``.

    Raises:
        ValueError: predictions of another shape, or not finite.

    Example:
        >>> predict_at(lambda xs, ys: xs[..., 0], torch.ones(2, 4, 3), torch.zeros(2, 4), [1, 3]).shape
        torch.Size([2, 2])
    """
    check_prompts(xs, ys, ks)
    training = getattr(predictor, "training", False)
    if training:
        predictor.eval()
    try:
        with torch.no_grad():
            if hasattr(predictor, "predict"):
                predicted = predictor.predict(xs, ys, ks)
            else:
                parts = [predictor(x, y) for x, y in zip(xs.split(_PROMPTS), ys.split(_PROMPTS), strict=True)]
                predicted = torch.cat(parts)
                if predicted.shape == ys.shape:
                    predicted = predicted[:, list(ks)]
    finally:
        if training:
            predictor.train()
    if predicted.shape != (len(xs), len(ks)):
        raise ValueError(
            f"predictor: gave {tuple(predicted.shape)} for xs {tuple(xs.shape)}, ys {tuple(ys.shape)}, ks {list(ks)}"
        )
    if not torch.isfinite(predicted).all():
        raise ValueError(f"predictor: {int((~torch.isfinite(predicted)).sum())} of {predicted.numel()} predictions not finite")
    return predicted


def check_prompts(xs: Tensor, ys: Tensor, ks: Sequence[int], *, least: int = 0) -> None:
    """Raises ValueError unless ``xs (B, n, d)`` and ``ys (B, n)`` are finite and every k lies in [least, n)."""
    if xs.ndim != 3 or ys.shape != xs.shape[:2]:
        raise ValueError(f"xs must be (B, n, d) and ys (B, n), got {tuple(xs.shape)} and {tuple(ys.shape)}")
    if not len(ks) or min(ks) < least or max(ks) >= xs.shape[1]:
        raise ValueError(f"ks must lie in [{least}, {xs.shape[1] - 1}] for {xs.shape[1]} examples a prompt, got {list(ks)}")
    if not (torch.isfinite(xs).all() and torch.isfinite(ys).all()):
        raise ValueError("xs and ys must be finite")


def context_mask(ks: Sequence[int], n: int, device: torch.device) -> Tensor:
    """``(K, n)``: which examples a context of each length holds."""
    return torch.arange(n, device=device) < torch.as_tensor(list(ks), device=device)[:, None]


def identity(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class LeastSquares:
    r"""Least squares on the context, of least norm where it leaves a choice; or ridge.

    .. math:: \hat y = \phi(x_{k+1})^\top w, \qquad w = \arg\min \sum_{i \le k} (y_i - \phi(x_i)^\top w)^2 + \lambda \|w\|^2

    Solved in float64 through the singular values: near k = p (as many examples as features) they spread over many
    decades, and the error has no variance. Means explode there; look at medians.

    Args:
        features: φ, ``(..., d)`` to ``(..., p)``; `Power.features` of a class fits that class.
        ridge: λ ≥ 0.
        name: How reports call it.

    Shapes:
        - ``predict``: ``(B, n, d)``, ``(B, n)``, ks to ``(B, len(ks))``.

    Raises:
        ValueError: a ridge that is negative; prompts not finite; k outside [0, n − 1].

    Example:
        >>> xs = torch.eye(2)[None].repeat(1, 2, 1)                       # e1, e2, e1, e2
        >>> LeastSquares().predict(xs, torch.tensor([[3.0, 5.0, 0.0, 0.0]]), [1, 2, 3])
        tensor([[0., 3., 5.]])
    """

    features: Features = identity
    ridge: float = 0.0
    name: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.ridge < float("inf"):
            raise ValueError(f"ridge must be at least 0, got {self.ridge}")
        if not self.name:
            object.__setattr__(self, "name", f"ridge {self.ridge:g}" if self.ridge else "least squares")

    def predict(self, xs: Tensor, ys: Tensor, ks: Sequence[int]) -> Tensor:
        check_prompts(xs, ys, ks)
        phi, y = self.features(xs).double(), ys.double()
        rows = max(1, _ENTRIES // (len(ks) * phi[0].numel()))
        parts = [self._solve(p, t, ks) for p, t in zip(phi.split(rows), y.split(rows), strict=True)]
        return torch.cat(parts).to(ys.dtype)

    def _solve(self, phi: Tensor, y: Tensor, ks: Sequence[int]) -> Tensor:
        _, n, p = phi.shape
        # A row of zeros changes neither the fit nor its norm, so that contexts of all lengths make one batch.
        seen = phi[:, None] * context_mask(ks, n, phi.device)[..., None]  # (B, K, n, p)
        if self.ridge:
            gram = seen.mT @ seen + self.ridge * torch.eye(p, dtype=phi.dtype, device=phi.device)
            w = torch.linalg.solve(gram, seen.mT @ y[:, None, :, None])
        else:
            # Not torch.linalg.lstsq: on a CPU its default driver returns 0 for some matrices that lack rank, and CUDA
            # has full rank alone.
            w = torch.linalg.pinv(seen) @ y[:, None, :, None]  # (B, K, p, 1)
        return (phi[:, list(ks), None] @ w)[..., 0, 0]


@dataclass(frozen=True)
class KNearest:
    """The mean label of the nearest examples; 0 without examples.

    Args:
        neighbors: ≥ 1; fewer where the context has fewer.

    Shapes:
        - ``predict``: ``(B, n, d)``, ``(B, n)``, ks to ``(B, len(ks))``.

    Raises:
        ValueError: `neighbors` below 1; prompts not finite; k outside [0, n − 1].

    Example:
        >>> xs, ys = torch.tensor([[[0.0], [9.0], [1.0]]]), torch.tensor([[3.0, 5.0, 0.0]])
        >>> KNearest(1).predict(xs, ys, [2])
        tensor([[3.]])
    """

    neighbors: int = 3
    name: str = field(default="nearest neighbours", kw_only=True)

    def __post_init__(self) -> None:
        if self.neighbors < 1:
            raise ValueError(f"neighbors must be at least 1, got {self.neighbors}")

    def predict(self, xs: Tensor, ys: Tensor, ks: Sequence[int]) -> Tensor:
        check_prompts(xs, ys, ks)
        mask = context_mask(ks, xs.shape[1], xs.device)
        distance = torch.cdist(xs[:, list(ks)], xs, compute_mode="donot_use_mm_for_euclid_dist")
        near = distance.masked_fill(~mask, torch.inf).topk(min(self.neighbors, xs.shape[1]), largest=False)  # (B, K, m)
        counts = near.values.isfinite()
        labels = ys[:, None].expand(-1, len(ks), -1).gather(2, near.indices)
        return (labels * counts).sum(-1) / counts.sum(-1).clamp_min(1)


@dataclass(frozen=True)
class Averaging:
    r"""One step of gradient descent from 0: :math:`\hat y = x_{k+1}^\top \tfrac1k \sum_{i \le k} y_i x_i`; 0 for k = 0.

    Shapes:
        - ``predict``: ``(B, n, d)``, ``(B, n)``, ks to ``(B, len(ks))``.

    Raises:
        ValueError: prompts not finite; k outside [0, n − 1].

    Example:
        >>> Averaging().predict(torch.ones(1, 3, 1), torch.tensor([[1.0, 3.0, 0.0]]), [0, 2])
        tensor([[0., 2.]])
    """

    name: str = field(default="averaging", kw_only=True)

    def predict(self, xs: Tensor, ys: Tensor, ks: Sequence[int]) -> Tensor:
        check_prompts(xs, ys, ks)
        index = torch.as_tensor(list(ks), device=xs.device)
        sums = torch.cumsum(xs * ys[..., None], 1)  # (B, n, d)
        w = sums[:, (index - 1).clamp_min(0)] * (index > 0)[:, None] / index.clamp_min(1)[:, None]
        return (xs[:, index] * w).sum(-1)


@dataclass(frozen=True)
class Zero:
    """Predicts 0: the null that any closeness has to be held against.

    Example:
        >>> Zero().predict(torch.ones(1, 3, 1), torch.ones(1, 3), [1, 2])
        tensor([[0., 0.]])
    """

    name: str = field(default="zero", kw_only=True)

    def predict(self, xs: Tensor, ys: Tensor, ks: Sequence[int]) -> Tensor:
        check_prompts(xs, ys, ks)
        return ys.new_zeros(len(ys), len(ks))
