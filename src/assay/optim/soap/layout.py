"""How SOAP looks at one parameter: which axes are merged, and which of them get a factor and a basis."""

from functools import lru_cache
from typing import Literal, NamedTuple

from torch import Tensor

DataFormat = Literal["channels_first", "channels_last"]


class Layout(NamedTuple):
    """A parameter's shape as the preconditioner sees it. Hashable, so it is part of a bucket's key."""

    order: tuple[int, ...]
    """Permutation of the parameter's axes that comes before merging."""
    permuted: tuple[int, ...]
    """The parameter's shape after that permutation."""
    dims: tuple[int, ...]
    """The shape after merging, ``(d_1, …, d_r)``."""
    factored: tuple[bool, ...]
    """Which of ``dims`` carry a factor; the basis of the others is the identity."""
    rank_one: bool
    """Whether the second moment is kept as row and column averages."""
    identity: bool
    """Whether nothing is permuted or merged."""

    @property
    def plain(self) -> bool:
        """Nothing to rotate and nothing to factorize: the parameter is served by Adam."""
        return not any(self.factored) and not self.rank_one

    def fold(self, x: Tensor) -> Tensor:
        """The parameter's shape → ``dims``; a copy only where permuted axes are merged."""
        return x if self.identity else x.permute(self.order).reshape(self.dims)

    def unfold(self, stack: Tensor) -> tuple[Tensor, ...]:
        """A contiguous stack ``(k, *dims)`` → ``k`` views in the parameter's shape."""
        if not self.identity:
            inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
            stack = stack.view(-1, *self.permuted).permute(0, *(axis + 1 for axis in inverse))
        return stack.unbind()


@lru_cache(maxsize=4096)
def layout_of(
    shape: tuple[int, ...],
    max_precond_dim: int,
    merge_dims: bool,
    precondition_1d: bool,
    data_format: DataFormat,
    one_sided: bool,
    factorized: bool,
) -> Layout:
    order = tuple(range(len(shape)))
    if merge_dims and data_format == "channels_last" and len(shape) == 4:
        order = (0, 3, 1, 2)
    permuted = tuple(shape[axis] for axis in order)
    dims = merged(permuted, max_precond_dim) if merge_dims else permuted
    if len(shape) < 2 and not precondition_1d:
        factored = [False] * len(dims)
    else:
        factored = [1 < d <= max_precond_dim for d in dims]  # a 1×1 basis is ±1: the identity for every purpose here
    if one_sided:
        smallest = min((d for d in dims if d > 1), default=0)
        first = dims.index(smallest) if smallest else -1
        factored = [keep and axis == first for axis, keep in enumerate(factored)]
    identity = dims == shape and order == tuple(range(len(shape)))
    return Layout(order, permuted, dims, tuple(factored), factorized and len(dims) == 2, identity)


def merged(shape: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """Multiplies neighbouring axes from left to right while the product stays within `limit`; axes of size 1 vanish.

    >>> merged((8, 4, 3, 3), 40), merged((8, 4, 3, 3), 9), merged((64, 1, 500), 100)
    ((32, 9), (8, 4, 9), (64, 500))
    """
    dims: list[int] = []
    product = 1
    for size in shape:
        if product * size <= limit:
            product *= size
        elif product > 1:
            dims.append(product)
            product = size
        else:
            dims.append(size)
    if product > 1 or not dims:
        dims.append(product)
    return tuple(dims)
