"""Two 4-bit integers a byte, and the matrix product that reads them."""

import functools

import torch
from torch import Tensor
from torch.nn import functional as F


def pack_int4(q: Tensor) -> Tensor:
    """Packs integers in [−8, 7], two a byte: the even column in the low nibble, two's complement.

    Shapes:
        - q: ``(*, K)``, any dtype holding integers, K even; output ``(*, K / 2)`` uint8.

    Raises:
        ValueError: K odd, or values that are not integers in [−8, 7].

    Example:
        >>> pack_int4(torch.tensor([[1, -1, 7, -8]]))
        tensor([[241, 135]], dtype=torch.uint8)
    """
    if q.shape[-1] % 2:
        raise ValueError(f"the number of columns must be even to pack two a byte, got {q.shape[-1]}")
    if q.numel() and (q.min() < -8 or q.max() > 7 or (q.is_floating_point() and (q != q.round()).any())):
        raise ValueError(f"values must be integers in [-8, 7], got {q.min().item()}..{q.max().item()}")
    nibbles = q.to(torch.int8).view(torch.uint8) & 0xF
    return nibbles[..., ::2] | (nibbles[..., 1::2] << 4)


def unpack_int4(packed: Tensor) -> Tensor:
    """Inverse of `pack_int4`: ``(*, K / 2)`` uint8 → ``(*, K)`` int8.

    Raises:
        ValueError: dtype is not uint8.

    Example:
        >>> unpack_int4(torch.tensor([[241, 135]], dtype=torch.uint8))
        tensor([[ 1, -1,  7, -8]], dtype=torch.int8)
    """
    if packed.dtype != torch.uint8:
        raise ValueError(f"packed weights are uint8, got {packed.dtype}")
    # One look-up a byte gives both columns at once: 3x faster on a CPU than shifting and interleaving.
    pairs = _byte_pairs(packed.device).index_select(0, packed.reshape(-1).int())
    return pairs.view(torch.int8).view(*packed.shape[:-1], 2 * packed.shape[-1])


@functools.lru_cache(maxsize=8)
def _byte_pairs(device: torch.device) -> Tensor:
    """int16 ``(256,)``: the two int8 values of each byte, side by side."""
    byte = torch.arange(256)
    pairs = torch.stack([((byte & 0xF) ^ 8) - 8, ((byte >> 4) ^ 8) - 8], -1)
    return pairs.to(torch.int8).view(torch.int16).reshape(256).to(device)


def rrs_gemm(
    xq: Tensor,
    alpha: Tensor,
    s: Tensor | None,
    qweight: Tensor,
    wscale: Tensor,
    *,
    group: int | None = None,
    int32: bool = False,
) -> Tensor:
    r"""The product of quantised activations and packed weights, with the smoothing scales multiplied back in.

    .. math:: y_{tn} = \alpha_t \, \beta_n \sum_G s_G \Big( \sum_{j \in G} X^q_{tj} W^q_{nj} \Big)

    Args:
        xq, alpha: From `quantize_tokens`.
        s: Scales from `runtime_smooth`; None: no smoothing (all 1).
        qweight, wscale: Packed weights and their scale β a row.
        group: None: s is multiplied into `xq` and one float product does the rest, which is the fastest on a CPU. A
            number: the order of work of the fused integer kernel, with channels sorted by `s`, activations and weights gathered
            alike, an exact integer sum in every tile of `group`, and tiles added in floating point. `s` must be
            constant within tiles, as `runtime_smooth` with the same `group` makes it.
        int32: With `group`: `torch._int_mm` does the tiles. Otherwise float32, exact too: \|sum\| ≤ 56·group < 2²⁴.

    Shapes:
        - xq ``(*, tokens, K)``, alpha ``(*, tokens, 1)``, s ``(1, K)``, ``(1, 1, K)`` or ``(batch, 1, K)``.
        - qweight ``(N, K / 2)`` uint8, wscale ``(N, 1)``; output ``(*, tokens, N)`` in alpha's dtype.

    Raises:
        ValueError: K of activations and weights differ; `group` is not a divisor of K.

    Example:
        >>> W = pack_int4(torch.tensor([[1, 2], [3, -4]]))
        >>> rrs_gemm(torch.tensor([[7, 1]]), torch.tensor([[0.5]]), torch.tensor([[1.0, 10.0]]), W, torch.ones(2, 1))
        tensor([[13.5000, -9.5000]])
    """
    K = xq.shape[-1]
    if 2 * qweight.shape[-1] != K:
        raise ValueError(f"activations have {K} channels, the packed weights {2 * qweight.shape[-1]}")
    weight = unpack_int4(qweight)  # (N, K) int8
    dtype = alpha.dtype
    if group is None or s is None:
        scaled = xq.to(dtype) if s is None else xq * s
        return F.linear(scaled, weight.to(dtype)) * (alpha * wscale.T.to(dtype))
    if group < 1 or K % group:
        raise ValueError(f"group must divide the {K} channels, got {group}")
    if xq.ndim == 3 and s.shape[0] > 1:  # every sequence has its own order of channels
        tiles = [_tiled(x, scale, weight, group, int32) for x, scale in zip(xq, s, strict=True)]
        return torch.stack(tiles) * (alpha * wscale.T.to(dtype))
    return _tiled(xq.reshape(-1, K), s.reshape(1, K), weight, group, int32).reshape(*xq.shape[:-1], -1) * (
        alpha * wscale.T.to(dtype)
    )


def _tiled(xq: Tensor, s: Tensor, weight: Tensor, group: int, int32: bool) -> Tensor:
    scales, order = s[0].sort(descending=True, stable=True)
    tile_scales = scales[::group].tolist()
    xq, weight = xq[:, order], weight[:, order]
    total = torch.zeros(xq.shape[0], weight.shape[0], dtype=s.dtype, device=xq.device)
    exact = torch.int8 if int32 else torch.float32
    tiles = zip(xq.to(exact).split(group, 1), weight.to(exact).split(group, 1), tile_scales, strict=True)
    for x_tile, w_tile, scale in tiles:
        product = torch._int_mm(x_tile.contiguous(), w_tile.T) if int32 else x_tile @ w_tile.T
        total.add_(product, alpha=scale)  # (tokens, N)
    return total
