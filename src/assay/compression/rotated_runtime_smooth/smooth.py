"""Runtime Smooth: divide activations by their run-time channel maxima, then round every token to 4 bits."""

import torch
from torch import Tensor

SINK_RATIO = 20.0  # a token whose norm is this many medians decides everybody's scales


def runtime_smooth(
    x: Tensor, group: int, mask: Tensor | None = None, *, sink: int = 0, scope: str = "sequence"
) -> tuple[Tensor, Tensor]:
    r"""Divides `x` by run-time channel scales that are constant within groups of similar channels.

    From *Rotated Runtime Smooth* (Yi et al., ICLR 2025). With :math:`s_j = \max_t |X_{tj}|`, channels are sorted by
    :math:`s_j`, cut into groups of `group`, every scale is raised to its group's maximum, and

    .. math:: \hat X_{tj} = X_{tj} / s_j .

    A group is one K-tile of the integer matrix product, which can therefore multiply its scale back in.

    Args:
        x: Activations. 3-D input gets one set of scales a batch element (`scope="sequence"`) or one for all of it
            (`scope="batch"`); 2-D input one over its rows.
        group: Channels that share a scale, ≥ 1, a divisor of K. 1: every channel its own.
        mask: Tokens that count, non-zero = counts (padding is left out). None: all.
        sink: This many tokens of largest norm are left out of the scales (they are still divided by them). 0 is the
            published method; 1 keeps an attention-sink token from setting everyone's scales.
        scope: ``"sequence"`` or ``"batch"``.

    Shapes:
        - x: ``(tokens, K)`` or ``(batch, tokens, K)``, any float dtype; scales and output are float32, float64 for float64.
        - mask: ``(tokens,)`` or ``(batch, tokens)``.
        - output: ``x_hat`` like `x`; ``s`` is ``(1, K)``, ``(batch, 1, K)`` or ``(1, 1, K)``. Where no token counts, 1.

    Raises:
        ValueError: `x` of another rank or not finite; `group` not a divisor of K; `mask` of another shape; bad `sink`
            or `scope`.

    Example:
        >>> x_hat, s = runtime_smooth(torch.tensor([[1.0, -40.0], [0.5, 20.0]]), group=1)
        >>> s
        tensor([[ 1., 40.]])
    """
    _check(x, group, mask, sink, scope)
    x = x if x.dtype == torch.float64 else x.float()  # float16 maxima overflow when they are divided and multiplied
    magnitude = x.abs()
    counted = None if mask is None else mask.bool().unsqueeze(-1)
    if counted is not None:
        magnitude = magnitude * counted
    over = (0, 1) if x.ndim == 3 and scope == "batch" else (-2,)
    if sink:
        magnitude = magnitude * ~_largest_tokens(magnitude, sink, flat=len(over) == 2)
    s = magnitude.amax(over, keepdim=True)
    # A set without any counted token (all padding, or a lone decoded token that is its own sink) is not smoothed.
    s = torch.where(s.amax(-1, keepdim=True) == 0, torch.ones_like(s), s.clamp_min(1e-5))
    if group > 1:
        s = _group_maxima(s, group)
    if not torch.compiler.is_compiling() and not torch.isfinite(s).all():
        raise ValueError("activations must be finite: the run-time scales contain NaN or infinity")
    return x / s, s


def quantize_tokens(x: Tensor, bits: int = 4) -> tuple[Tensor, Tensor]:
    r"""Symmetric rounding of every token to `bits` bits: :math:`\alpha_t = \max_j |x_{tj}| / q_{\max}`, ties to even.

    Args:
        x: ``(*, K)``.
        bits: 2 to 8; :math:`q_{\max} = 2^{bits-1} - 1`.

    Shapes:
        - output: integers in x's dtype, ready for a matrix product, like `x`; ``alpha`` ``(*, 1)``, 1 for a zero token.

    Raises:
        ValueError: `x` not finite.

    Example:
        >>> quantize_tokens(torch.tensor([[7.0, -3.4, 0.2]]))
        (tensor([[ 7., -3.,  0.]]), tensor([[1.]]))
    """
    q_max = 2 ** (bits - 1) - 1
    alpha = x.abs().amax(-1, keepdim=True) / q_max
    if not torch.compiler.is_compiling() and not torch.isfinite(alpha).all():
        raise ValueError("activations must be finite: a token contains NaN or infinity")
    alpha = torch.where(alpha > 0, alpha, torch.ones_like(alpha))
    # The clamp to [-q_max - 1, q_max] is left out: with alpha from the maximum itself no value can leave the grid.
    return (x / alpha).round_(), alpha


def sink_ratio(x: Tensor) -> Tensor:
    """Largest token norm over the median token norm: ``(batch, tokens, K)`` or ``(tokens, K)`` → scalar, the worst sequence."""
    norms = x.flatten(0, -3).float().norm(dim=-1) if x.ndim > 2 else x.float().norm(dim=-1)[None]
    return (norms.amax(-1) / norms.median(-1).values.clamp_min(1e-12)).max()


def victim_rate(x: Tensor, q: Tensor) -> Tensor:
    """Share of non-zero entries of `x` that were rounded to 0 in `q`, a scalar."""
    nonzero = x != 0
    return ((q == 0) & nonzero).sum() / nonzero.sum().clamp_min(1)


def smoothness(x: Tensor) -> Tensor:
    """``max |x| / rms(x)`` of every token, ``(*, K)`` → ``(*)``: what 4 bits have to span. 1 is flat, √K one spike."""
    x = x.float()
    return x.abs().amax(-1) / x.square().mean(-1).sqrt().clamp_min(1e-12)


def _group_maxima(s: Tensor, group: int) -> Tensor:
    ordered, order = s.sort(dim=-1, descending=True, stable=True)
    # Descending, so the first of a group is its maximum.
    maxima = ordered[..., ::group].repeat_interleave(group, dim=-1)
    return torch.empty_like(s).scatter_(-1, order, maxima)


def _largest_tokens(magnitude: Tensor, count: int, flat: bool) -> Tensor:
    """Boolean ``(*, tokens, 1)``: the `count` tokens of largest norm, of each sequence or of the whole batch."""
    norms = magnitude.norm(dim=-1)
    pool = norms.reshape(1, -1) if flat else norms
    top = pool.topk(min(count, pool.shape[-1]), dim=-1).indices
    return torch.zeros_like(pool, dtype=torch.bool).scatter_(-1, top, True).reshape(norms.shape).unsqueeze(-1)


def _check(x: Tensor, group: int, mask: Tensor | None, sink: int, scope: str) -> None:
    if x.ndim not in (2, 3) or not x.is_floating_point():
        raise ValueError(f"x must be a float tensor (tokens, K) or (batch, tokens, K), got {x.dtype} of shape {tuple(x.shape)}")
    if group < 1 or x.shape[-1] % group:
        raise ValueError(f"group must divide the {x.shape[-1]} channels, got {group}")
    if mask is not None and mask.shape != x.shape[:-1]:
        raise ValueError(f"mask must have shape {tuple(x.shape[:-1])}, got {tuple(mask.shape)}")
    if sink < 0:
        raise ValueError(f"sink must be at least 0, got {sink}")
    if scope not in ("sequence", "batch"):
        raise ValueError(f"scope must be 'sequence' or 'batch', got {scope!r}")
