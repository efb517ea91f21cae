r"""How much of its width a layer still uses: rank of its features, dead units and duplicates."""

import torch
from torch import Tensor, nn

RANK_TOLERANCE = 1e-3
"""Singular values below this share of the largest do not count: at 1e-6 a collapsed tanh network looks full-rank."""
DEAD_BELOW = 1e-6
"""Standard deviation over the batch, in units of activation, below which a unit says nothing."""


@torch.no_grad()
def symmetry_diagnostics(
    module: nn.Module, x: Tensor, hook: str = "last_hidden", *, duplicate_at: float = 0.999
) -> dict[str, float]:
    r"""Rank, effective rank, dead and duplicate units of a layer's features on a batch.

    A network on a symmetric point shows it here: after *Remove Symmetries to Control Model Expressivity and Improve
    Optimization* (ICLR 2025), whose "low-capacity states" are dead units and lost rank. With the features centred over
    the batch and :math:`s` their singular values, the numerical rank is :math:`\#\{s_i > 10^{-3} s_1\}` and the effective
    rank :math:`\exp H(s/\sum s)`.

    Args:
        module: The network. It is run once in evaluation mode and each part left in the mode it was in.
        x: Its input. Take more rows than units.
        hook: ``"last_hidden"``: the input of the last linear layer; else a submodule's name: that one's output.
        duplicate_at: Absolute cosine of two units' centred features from which the later is a duplicate, in (0, 1].

    Shapes: ``x (batch, …)``; features ``(batch, …, units)``, all but the last axis taken as samples.

    Returns:
        ``units``, ``numerical_rank``, ``effective_rank``, ``dead_units``, ``duplicate_units``, as numbers.

    Raises:
        ValueError: no linear layer and no name given, an unknown name, fewer than two samples, features that are not finite,
            or a bad argument.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
        >>> with torch.no_grad(): _ = net[0].weight.copy_(torch.tensor([[1., 0], [2, 0], [0, 0]])), net[0].bias.zero_()
        >>> symmetry_diagnostics(net, torch.tensor([[1., 0.], [2., 0.], [3., 1.]]))
        {'units': 3, 'numerical_rank': 1, 'effective_rank': 1.0, 'dead_units': 1, 'duplicate_units': 1}
    """
    if not 0 < duplicate_at <= 1:
        raise ValueError(f"duplicate_at must lie in (0, 1], got {duplicate_at!r}")
    features = _features(module, x, hook)
    if len(features) < 2:
        raise ValueError("x must hold at least two samples: one says nothing about rank or dead units")
    if not torch.isfinite(features).all():
        raise ValueError("the features are not finite")
    return feature_diagnostics(features, duplicate_at)


def feature_diagnostics(features: Tensor, duplicate_at: float = 0.999) -> dict[str, float]:
    """The same from features ``(samples, units)``."""
    centred = features.double() - features.double().mean(0)
    spread = centred.square().mean(0).sqrt()  # (units,)
    alive = spread > DEAD_BELOW
    s = torch.linalg.svdvals(centred)
    s = s[s > DEAD_BELOW * len(centred) ** 0.5]
    share = s / s.sum()
    directions = centred[:, alive] / centred[:, alive].norm(dim=0)
    cosines = (directions.T @ directions).abs().triu(1)
    return {
        "units": features.shape[1],
        "numerical_rank": int((s > RANK_TOLERANCE * s[0]).sum()) if len(s) else 0,
        "effective_rank": round(float(torch.exp(-(share * share.log()).sum())), 6) if len(s) else 0.0,
        "dead_units": int((~alive).sum()),
        "duplicate_units": int((cosines >= duplicate_at - 1e-9).any(0).sum()),
    }


def _features(module: nn.Module, x: Tensor, hook: str) -> Tensor:
    kept: list[Tensor] = []
    if hook == "last_hidden":
        linear = [m for m in module.modules() if isinstance(m, nn.Linear)]
        if not linear:
            raise ValueError("module has no linear layer to take the input of; pass hook='<name of a submodule>'")
        handle = linear[-1].register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    else:
        named = dict(module.named_modules())
        if hook not in named:
            raise ValueError(
                f"hook must be 'last_hidden' or a submodule's name, got {hook!r}; names: {', '.join(filter(None, named))}"
            )
        handle = named[hook].register_forward_hook(lambda _, __, out: kept.append(out))
    modes = [(m, m.training) for m in module.modules()]
    try:
        module.eval()
        module(x)
    finally:
        for m, training in modes:
            m.training = training
        handle.remove()
    if not kept or not isinstance(kept[-1], Tensor):
        raise ValueError(f"{hook!r} gave no tensor on this input")
    features = kept[-1].detach()
    return features.flatten(0, -2) if features.ndim > 1 else features[None]
