"""Caps on the unit sphere: their angles, a simplex beside given centres, random points in them, how far they overlap."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

_COLLAPSED = 1e-3  # a singular value this far below the largest: the centres do not span a simplex


def simplex_angle(classes: int) -> float:
    r"""The angle between any two of K unit vectors as far apart as K can be, :math:`\psi = \arccos(-1/(K-1))`.

    Example:
        >>> round(math.degrees(simplex_angle(2))), round(math.degrees(simplex_angle(4)), 2)
        (180, 109.47)
    """
    if classes < 2:
        raise ValueError(f"classes must be at least 2, got {classes}")
    return math.acos(-1 / (classes - 1))


def _several(centers: Tensor) -> tuple[int, int]:
    if centers.ndim != 2 or len(centers) < 2 or not bool(torch.isfinite(centers).all()):
        raise ValueError(f"centers must be finite and (K, d) with K at least 2, got shape {tuple(centers.shape)}")
    return centers.shape[0], centers.shape[1]


def _drawn_on(x: Tensor, generator: torch.Generator | None) -> torch.device:
    """A generator draws on its own device; a seed on the CPU gives the same features wherever the statistics are."""
    return x.device if generator is None else generator.device


def angle_between(a: Tensor, b: Tensor) -> Tensor:
    """Angle of unit vectors along the last dimension; exact to rounding near 0 and near π, where arccos is not."""
    return 2 * torch.atan2(torch.linalg.vector_norm(a - b, dim=-1), torch.linalg.vector_norm(a + b, dim=-1))


def aligned_simplex(centers: Tensor) -> Tensor | None:
    r"""The simplex nearest to given centres (orthogonal Procrustes), or None where they have collapsed.

    With the centres as columns of :math:`U`,
    :math:`T = \sqrt{K/(K-1)}\; \mathrm{polar}(U (I - 11^\top/K))`, and :math:`T^\top T` has 1 on its diagonal and
    :math:`-1/(K-1)` off it.

    Args:
        centers: ``(K, d)``, ``d ≥ K − 1``.

    Returns:
        Vertices ``(K, d)``; None if the centred centres have a rank below K − 1, where the nearest simplex is not unique.

    Example:
        >>> T = aligned_simplex(torch.eye(4))
        >>> (T @ T.T)[0].round(decimals=3)
        tensor([ 1.0000, -0.3330, -0.3330, -0.3330])
    """
    K, d = _several(centers)
    if d < K - 1:
        raise ValueError(f"a simplex of {K} classes needs at least {K - 1} feature dimensions, there are {d}")
    u = centers.double()
    a, s, b = torch.linalg.svd(u - u.mean(0), full_matrices=False)  # rows are classes: the transpose of the formula
    if not float(s[K - 2]) > _COLLAPSED * float(s[0]):
        return None
    polar = a[:, : K - 1] @ b[: K - 1]
    return (math.sqrt(K / (K - 1)) * polar).to(centers.dtype)


def simplex_gap(centers: Tensor) -> float:
    """How far centres ``(K, d)`` are from a simplex: root mean square of their cosines' distance from −1/(K−1).

    Example:
        >>> round(simplex_gap(torch.eye(3)), 4)
        0.5
    """
    K, _ = _several(centers)
    cosines = F.normalize(centers.double(), dim=1) @ F.normalize(centers.double(), dim=1).T
    off = ~torch.eye(K, dtype=torch.bool, device=centers.device)
    return (cosines[off] + 1 / (K - 1)).square().mean().sqrt().item()


def mean_cosine(centers: Tensor) -> float:
    """Mean cosine over the pairs of rows of ``(n, d)``, n ≥ 2: −1/(K−1) on a simplex, 1 where all coincide."""
    n = len(centers)
    if n < 2:
        raise ValueError(f"a mean over pairs needs at least 2 centres, got {n}")
    unit = F.normalize(centers.double(), dim=1)
    return ((unit.sum(0).square().sum().item()) - n) / (n * (n - 1))


def cap_overlap(z: Tensor, y: Tensor, centers: Tensor, radii: Tensor) -> float:
    """Of all pairs of a row and a foreign class, the share where the row lies in that class's cap.

    0 where no row lies in any foreign cap, 1 where each lies in all of them.

    Args:
        z: Unit features ``(n, d)``, n ≥ 1.
        y: Their classes, ``(n,)``.
        centers: Unit vectors ``(K, d)``, K ≥ 2.
        radii: Angles ``(K,)``.

    Example:
        >>> cap_overlap(torch.eye(3), torch.arange(3), torch.eye(3), torch.tensor([0.1, 0.1, 3.0]))  # the last holds all
        0.333...
    """
    K, _ = _several(centers)
    if len(z) == 0:
        raise ValueError("z must hold at least one row")
    cosines = z.double() @ centers.double().T
    inside = cosines >= radii.double().clamp(0, math.pi).cos()
    return inside.scatter(1, y.long()[:, None], False).double().sum().item() / (len(z) * (K - 1))


def truncated_normal(mean: Tensor, std: Tensor, high: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One draw from each ``Normal(mean, std)`` cut to ``[0, high]``, by the inverse of its distribution function.

    In double precision and in the lower tail, where the distribution function keeps its digits: an interval above the mean
    is mirrored. Where ``std`` is nearly zero, or the interval holds no mass that double precision can see, the draw is the
    mean moved into the interval.
    """
    m, s, r = mean.double(), std.double(), high.double()
    floor = s.clamp_min(1e-12)
    low, up = -m / floor, (r - m) / floor
    mirror = low > 0
    low, up = torch.where(mirror, -up, low), torch.where(mirror, -low, up)
    below = torch.special.log_ndtr(low).exp()  # ndtr itself is 0 beyond −8
    within = torch.special.log_ndtr(up).exp() - below
    u = torch.rand(m.shape, dtype=torch.float64, device=_drawn_on(m, generator), generator=generator).to(m.device)
    x = torch.special.ndtri(below + u * within)
    draw = m + s * torch.where(mirror, -x, x)
    clipped = torch.minimum(m.clamp_min(0), r)
    usable = (s > 1e-6) & (within > 0) & torch.isfinite(draw)
    return torch.where(usable, torch.minimum(draw.clamp_min(0), r), clipped).to(mean.dtype)


def points_at(centers: Tensor, theta: Tensor, generator: torch.Generator | None = None) -> Tensor:
    r"""Unit vectors at given angles from their centres, in directions that are uniform around them.

    :math:`\cos\theta\, \mu + \sin\theta\, \nu` with :math:`\nu = (g - (g \cdot \mu) \mu) / \|\cdot\|`, :math:`g \sim N(0, I)`.

    Args:
        centers: ``(n, d)``, d ≥ 2.
        theta: ``(n,)``.
    """
    on = _drawn_on(centers, generator)
    g = torch.randn(centers.shape, dtype=centers.dtype, device=on, generator=generator).to(centers.device)
    nu = F.normalize(g - (g * centers).sum(1, keepdim=True) * centers, dim=1)
    # Normalised once more: rounding would otherwise leave lengths of 1 ± 1e-7, and the caller is promised exactly one.
    return F.normalize(theta.cos()[:, None] * centers + theta.sin()[:, None] * nu, dim=1)
