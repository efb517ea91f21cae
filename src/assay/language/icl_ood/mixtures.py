"""The paper's two mixtures of regressions and the prompts from outside of them: which component does a learner select?"""

from typing import Literal

import torch
from torch import Tensor

from .posterior import MixturePosterior

Mode = Literal["error", "input"]
MODES: tuple[Mode, ...] = ("error", "input")
_W = [[5, 5, 5], [-5, 5, 5], [-5, 5, -5], [5, -5, -5]]
_MU = [[5, 5, 5], [-5, 5, 5], [-5, -5, 5], [-5, -5, -5]]  # the released table with its second and third column swapped
_HIDDEN = 100


def published_mixture(mode: Mode, sigma: float) -> MixturePosterior:
    """Four components in R³ that differ in w alone (``"error"``) or in μ alone (``"input"``).

    Args:
        mode: Which of the two preferences it isolates: for low error, or for similar inputs.
        sigma: σ_μ = σ_w > 0; δ = σ².

    Raises:
        ValueError: another mode; sigma not positive.

    Example:
        >>> published_mixture("input", 1.0).w.unique().tolist()
        [1.0]
    """
    _check(mode)
    mu, w = (torch.zeros(4, 3), _W) if mode == "error" else (_MU, torch.ones(4, 3))
    return MixturePosterior(mu, w, s_mu=sigma, s_w=sigma)


def unseen_prompts(mode: Mode, prompts: int, n: int, gen: torch.Generator) -> tuple[Tensor, Tensor]:
    """Prompts that no component makes: one two-layer ReLU net for all, 100 hidden, weights N(0, 1), no noise.

    Args:
        mode: Inputs have mean 0 (``"error"``) or (−4, −4, −4) (``"input"``), and variance 1.
        prompts: B.
        n: Examples a prompt, the query among them.
        gen: Where the randomness comes from.

    Shapes:
        - output: ``(B, n, 3)`` and ``(B, n)``.

    Raises:
        ValueError: another mode.

    Example:
        >>> unseen_prompts("error", 2, 5, torch.Generator())[1].shape
        torch.Size([2, 5])
    """
    _check(mode)
    xs = torch.randn(prompts, n, 3, generator=gen, device=gen.device) - (4 if mode == "input" else 0)
    v = torch.randn(3, _HIDDEN, generator=gen, device=gen.device)
    a = torch.randn(_HIDDEN, generator=gen, device=gen.device)
    return xs, torch.relu(xs @ v) @ a


def selected(learner: MixturePosterior, mode: Mode, xs: Tensor, ys: Tensor) -> Tensor:
    """The component that the preference should pick, ``(B,)``: lowest error of w_m over the prompt, or nearest μ_m."""
    _check(mode)
    if mode == "input":
        return torch.cdist(xs.mean(1).double(), learner.mu.to(xs.device)).argmin(1)
    errors = xs.double() @ learner.w.to(xs.device).T - ys.double()[..., None]  # (B, n, M)
    return errors.square().mean(1).argmin(1)


def _check(mode: str) -> None:
    if mode not in MODES:
        raise ValueError(f"mode must be 'error' or 'input', got {mode!r}")
