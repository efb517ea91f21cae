"""Single precision or better, whatever the model around is cast to."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def wide(x: Tensor) -> Tensor:
    """As float32, or as it is where it is float64."""
    return x if x.dtype == torch.float64 else x.float()


class WideBuffers(nn.Module):
    """A module whose statistics follow ``.to(device)`` and ``.double()`` but not ``.half()`` or ``.bfloat16()``.

    Running sums in a narrow type stop growing, and variances drown in rounding.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = {name: x for name, x in self._buffers.items() if x is not None and x.is_floating_point()}
        super()._apply(fn, recurse)
        for name, x in before.items():
            after = self._buffers[name]
            if after is not None and torch.finfo(after.dtype).bits < 32:
                self._buffers[name] = x.to(after.device)
        return self
