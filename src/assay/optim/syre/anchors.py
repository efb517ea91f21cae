r"""The frozen random points θ₀ and spreads D: a pure function of a seed, a parameter's key and its shape.

Normal numbers are drawn on the CPU in float32 from a private generator, `BLOCK` at a time, so that one parameter's anchor
can be made without holding it whole, is the same on every device and rank, and leaves the global generators alone.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor

BLOCK = 1 << 16
"""Elements drawn at once: a quarter of a megabyte, which stays in a core's cache. Part of what a seed means."""

Scale = Literal["fan_in", "absolute"]
Named = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


def anchor_std(shape: tuple[int, ...], sigma: float, scale: Scale = "fan_in") -> float:
    r"""σ₀ of a parameter: `sigma` itself, or :math:`c/\sqrt d` with ``d`` its fan-in (a vector's length).

    >>> anchor_std((10, 4, 5, 5), 0.3), anchor_std((4,), 0.3), anchor_std((), 0.3), anchor_std((4,), 0.3, "absolute")
    (0.03, 0.15, 0.3, 0.3)
    """
    if scale == "absolute":
        return sigma
    fan_in = math.prod(shape[1:]) if len(shape) > 1 else math.prod(shape)
    return sigma / math.sqrt(max(1, fan_in))


def generator(seed: int, key: str) -> torch.Generator:
    """A CPU generator of one parameter's own. The Mersenne twister reads 32 bits of a seed."""
    digest = hashlib.sha256(f"{seed}/{key}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))


def normal_blocks(seed: int, key: str, count: int) -> Iterator[Tensor]:
    """`count` standard normal numbers in blocks; a block is overwritten by the next."""
    draws, block = generator(seed, key), torch.empty(min(BLOCK, count))
    for start in range(0, count, BLOCK):
        yield block[: min(BLOCK, count - start)].normal_(generator=draws)


def spread_blocks(seed: int, key: str, count: int, spread: float) -> Iterator[Tensor]:
    """D = 1 + b·ε with ε uniform on (-1, 1), in the same blocks; from a generator of its own."""
    draws, block = generator(seed, f"{key}/D"), torch.empty(min(BLOCK, count))
    for start in range(0, count, BLOCK):
        yield block[: min(BLOCK, count - start)].uniform_(1 - spread, 1 + spread, generator=draws)


def draw(seed: int, key: str, shape: tuple[int, ...], std: float) -> Tensor:
    """θ₀ of one parameter, float32 on the CPU, in the parameter's shape."""
    blocks = [block.mul(std) for block in normal_blocks(seed, key, math.prod(shape))]
    return torch.cat(blocks).view(shape) if blocks else torch.empty(shape)


def draw_spread(seed: int, key: str, shape: tuple[int, ...], spread: float) -> Tensor:
    """D of one parameter, float32 on the CPU, in the parameter's shape."""
    blocks = [block.clone() for block in spread_blocks(seed, key, math.prod(shape), spread)]
    return torch.cat(blocks).view(shape) if blocks else torch.empty(shape)


def pairs(named_params: Named) -> list[tuple[str, Tensor]]:
    return list(named_params.items() if isinstance(named_params, Mapping) else named_params)


def draw_anchors(named_params: Named, sigma: float = 0.01, scale: Scale = "fan_in", seed: int = 0) -> dict[str, Tensor]:
    r"""An anchor for every named parameter: those that `Syre` uses over ``module.named_parameters()`` with the same seed.

    Args:
        named_params: A mapping, or pairs, of name and tensor.
        sigma: c, > 0.
        scale: ``"fan_in"``: :math:`\sigma_0 = c/\sqrt d`; ``"absolute"``: :math:`\sigma_0 = c`.
        seed: Of the anchors.

    Shapes: each anchor has its parameter's shape, dtype and device.

    Raises:
        ValueError: `sigma` is not positive and finite, `scale` is neither word, or a parameter is not floating-point.

    Example:
        >>> layer = torch.nn.Linear(4, 3)
        >>> {name: tuple(x.shape) for name, x in draw_anchors(layer.named_parameters()).items()}
        {'weight': (3, 4), 'bias': (3,)}
    """
    check_sigma(sigma, scale)
    anchors = {}
    for name, p in pairs(named_params):
        check_parameter(p)
        anchors[name] = draw(seed, name, tuple(p.shape), anchor_std(tuple(p.shape), sigma, scale)).to(p.device, p.dtype)
    return anchors


def check_sigma(sigma: float, scale: str) -> None:
    if not 0 < sigma < math.inf:
        raise ValueError(f"sigma must be positive and finite, got {sigma!r}; 0 would be plain weight decay")
    if scale not in ("fan_in", "absolute"):
        raise ValueError(f"scale must be 'fan_in' or 'absolute', got {scale!r}")


def check_parameter(p: Tensor) -> None:
    if p.layout != torch.strided:
        raise ValueError(f"parameters must be dense, got {p.layout} of shape {tuple(p.shape)}")
    if not p.is_floating_point():
        raise ValueError(f"parameters must be real and floating-point, got {p.dtype} of shape {tuple(p.shape)}")


def check_patterns(patterns: Iterable[str], names: Iterable[str], advice: str = "") -> None:
    """Refuses a pattern that excludes nothing: it would leave its parameters anchored without a word."""
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            known = ", ".join(names[:6]) + (", …" if len(names) > 6 else "")
            raise ValueError(f"exclude={pattern!r} matches no parameter; {advice or f'names: {known}'}")
