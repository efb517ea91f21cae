"""Where the class centres of a supervised-contrastive loss go when one class has more rows than the others."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .checks import checked_counts


def optimal_centers(
    class_counts: Tensor | Sequence[int], tau: float = 1.0, dim: int | None = None, *, starts: int = 4, seed: int = 0
) -> Tensor:
    r"""Free unit centres that minimise the supervised-contrastive loss of a data set whose classes have collapsed.

    All features of a class sit at its centre, the anchor is left out of its own denominator:

    .. math:: L = \sum_k \frac{n_k}{N} \log \sum_j (n_j - [j = k]) \exp(u_k \cdot u_j / \tau).

    Theorem 2 of the paper: with one head class and K − 1 equal tail classes the angles between tail centres shrink as the
    ratio grows, and past a critical one the tail centres coincide. The critical ratio depends strongly on τ: near 30 to 100
    at τ = 1, in the hundreds at 0.5, and at the 0.1 of training nothing collapses even at 1000.

    Args:
        class_counts: ``(K,)``, positive.
        tau: Temperature, > 0.
        dim: Dimensions of the sphere; K by default.
        starts: Random starts; the best end is returned.
        seed: Of the starts.

    Returns:
        ``(K, dim)`` float64.

    Example:
        >>> u = optimal_centers([10, 10, 10])
        >>> (u @ u.T)[0, 1:].round(decimals=2)
        tensor([-0.5000, -0.5000], dtype=torch.float64)
    """
    n = checked_counts(class_counts).double()
    K = len(n)
    if not tau > 0:
        raise ValueError(f"tau must be positive, got {tau}")
    # The centre of a class of one row is not in its own denominator: log 0, as a number that has a gradient.
    log_weight = (n - torch.eye(K, dtype=torch.float64)).clamp_min(1e-300).log()
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(starts, K, dim or K, dtype=torch.float64, generator=generator).requires_grad_()

    def losses() -> Tensor:
        u = F.normalize(v, dim=-1)
        return (n / n.sum() * torch.logsumexp((u @ u.mT - 1) / tau + log_weight, -1)).sum(-1)

    optimizer = torch.optim.LBFGS(
        [v], max_iter=2000, tolerance_grad=1e-12, tolerance_change=1e-15, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = losses().sum()
        total.backward()
        return total

    optimizer.step(closure)
    with torch.no_grad():
        return F.normalize(v, dim=-1)[losses().argmin()]


def tail_cosines(ratios: Sequence[int], tau: float = 1.0, classes: int = 4, rows: int = 10) -> list[float]:
    """Mean cosine between tail centres at the optimum, for one head class of ``ratio · rows`` rows and tails of ``rows``.

    Example:
        >>> [round(c, 2) for c in tail_cosines([1, 10, 100])]
        [-0.33, 0.35, 1.0]
    """
    found = []
    for ratio in ratios:
        u = optimal_centers([rows * ratio] + [rows] * (classes - 1), tau)[1:]
        cosines = u @ u.T
        found.append(cosines[~torch.eye(classes - 1, dtype=torch.bool)].mean().item())
    return found
