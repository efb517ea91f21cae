"""A matrix cut down to some of its singular directions, for as many cuts as one likes after one decomposition."""

import math
from typing import Literal

import torch
from torch import Tensor

Which = Literal["top", "bottom", "drop"]


def kept_rank(rank_fraction: float, size: int) -> int:
    """``⌊ρ · size⌋``; a share such as 0.29 of 100, which is 28.999… in binary, counts as 29.

    Raises:
        ValueError: ρ outside [0, 1].

    Example:
        >>> kept_rank(0.1, 256), kept_rank(0.29, 100), kept_rank(1, 7)
        (25, 29, 7)
    """
    if not 0 <= rank_fraction <= 1:  # NaN as well
        raise ValueError(f"rank_fraction must be in [0, 1], got {rank_fraction}")
    return math.floor(rank_fraction * size + 1e-9)


def check_matrix(weight: Tensor, name: str) -> None:
    """Refuses what has no singular values that mean anything.

    Raises:
        ValueError: no matrix (or stack of matrices), not floating, on the meta device, not finite.
    """
    if weight.ndim not in (2, 3):
        raise ValueError(f"{name} must be a matrix or a stack of matrices, got shape {tuple(weight.shape)}")
    if not weight.is_floating_point() or weight.element_size() < 2 or type(weight.data) is not Tensor:
        kind = f"{type(weight.data).__name__} of {weight.dtype}"
        raise ValueError(f"{name} must be a plain floating tensor, got {kind}: dequantize the model first")
    if weight.is_meta:
        raise ValueError(f"{name} is on the meta device: load its weights first")
    if not weight.isfinite().all():
        raise ValueError(f"{name} holds NaN or infinity")


class Spectrum:
    r"""The right or left singular vectors of a matrix, whichever are fewer, to cut it at any rank by one projection.

    The eigenvectors ``Q`` of the smaller of ``WᵀW`` and ``WWᵀ``, in float64, are the singular vectors on that side, so
    keeping some of them is ``W Q Qᵀ`` (or ``Q Qᵀ W``): W = UΣVᵀ is never formed. A transposed weight (GPT-2's ``Conv1D``)
    gives the transposed result. A stack ``(E, m, n)``, such as a layer's experts, is cut matrix by matrix.

    Args:
        weight: ``(m, n)`` or ``(E, m, n)``, floating, finite.
        name: What messages call it.

    Raises:
        ValueError: see `check_matrix`.

    Example:
        >>> spectrum = Spectrum(torch.tensor([[3.0, 0.0], [0.0, 1.0]]))
        >>> spectrum.truncate(0.5)
        tensor([[3., 0.],
                [0., 0.]])
    """

    def __init__(self, weight: Tensor, name: str = "weight"):
        check_matrix(weight, name)
        self._weight = weight.detach()
        exact = self._weight.double()
        self._right = weight.shape[-1] <= weight.shape[-2]
        gram = exact.mT @ exact if self._right else exact @ exact.mT
        self._values, self._vectors = torch.linalg.eigh(gram)  # ascending

    @property
    def singular_values(self) -> Tensor:
        """Descending, float64."""
        return self._values.clamp(min=0).sqrt().flip(-1)

    def basis(self, rank_fraction: float, which: Which = "top") -> Tensor:
        """``(…, min(m, n), k)``: the singular vectors that are kept, on the smaller side."""
        size = self._vectors.shape[-1]
        k = 0 if which == "drop" else kept_rank(rank_fraction, size)
        return self._vectors[..., :k] if which == "bottom" else self._vectors[..., size - k :]

    def truncate(self, rank_fraction: float, which: Which = "top") -> Tensor:
        """The matrix with only ``⌊ρ · min(m, n)⌋`` of its singular values: the largest, or the smallest for ``"bottom"``.

        A new tensor of the weight's dtype; at ρ = 1 the weight itself, to the last bit.
        """
        check_which(which, rank_fraction)
        basis = self.basis(rank_fraction, which)
        if basis.shape[-1] == self._vectors.shape[-1]:
            return self._weight.clone()
        if basis.shape[-1] == 0:
            return torch.zeros_like(self._weight)
        exact = self._weight.double()
        cut = (exact @ basis) @ basis.mT if self._right else basis @ (basis.mT @ exact)
        return cut.to(self._weight.dtype)


def check_which(which: str, rank_fraction: float) -> None:
    """Raises ValueError on an unknown `which`, ρ outside [0, 1], and ``"drop"`` with ρ other than 0."""
    if which not in ("top", "bottom", "drop"):
        raise ValueError(f"which must be 'top', 'bottom' or 'drop', got {which!r}")
    kept_rank(rank_fraction, 1)
    if which == "drop" and rank_fraction != 0:
        raise ValueError(f"which='drop' keeps nothing: rank_fraction must be 0, got {rank_fraction}")
