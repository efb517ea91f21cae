"""vBoN as a reward function: with the right KL coefficient, any trainer with a reference model optimises it."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor

from .bon import bon_log_ratio, checked_n
from .cdf import RewardCDF
from .sampling import RewardFunction, checked_rewards

Bound = Literal["l1", "exact", "jensen"]
BOUNDS = ("l1", "exact", "jensen")


def kl_coefficient(n: int, bound: str) -> float:
    """The β that belongs to a bound: ``1/(n − 1)`` for ``"l1"``, ``1/n`` for the others.

    Raises:
        ValueError: n < 2, for which there is nothing to learn, or an unknown bound.
    """
    checked_n(n, 2)
    if bound not in BOUNDS:
        raise ValueError(f"bound must be one of {', '.join(BOUNDS)}, got {bound!r}")
    return 1 / (n - 1) if bound == "l1" else 1 / n


class VBoNReward:
    """A TRL reward function whose KL-regularised optimum is the best-of-N distribution.

    Variational Best-of-N Alignment, ICLR 2025 (arXiv 2407.06057). Minimising ``KL(π_θ ‖ π_bon)`` is maximising
    ``E[reward] − β·KL(π_θ ‖ π_ref)`` with::

        "l1"      log F(r(y))                                β = 1/(N − 1)     a lower bound, its first term
        "exact"   (log π_bon(y) − log π_ref(y)) / N          β = 1/N           the objective itself
        "jensen"  (N − 1)/(2N) · (log F(r(y)) + log π_ref(y))  β = 1/N          a bound that also lowers the entropy

    ``"exact"`` and ``"l1"`` differ only where ``π_ref(y)`` is not small beside ``F(r(y))/N``: hardly ever for real text.

    Args:
        reward_fn: Called as TRL calls it; only the order of its rewards matters.
        cdf: The reference's rewards for each prompt.
        bound: See above.
        n: N ≥ 2.
        ref_logp_fn: ``(prompts, completion_ids) -> log π_ref(completion | prompt)``, ``(n,)``; needed by all but ``"l1"``.

    Raises:
        ValueError: n < 2, an unknown bound, no ``ref_logp_fn`` where it is needed. Called: NaN or missing rewards, a prompt
            without a table.

    Example:
        >>> cdf = RewardCDF()
        >>> cdf.add("Once", [1, 2, 3])
        >>> VBoNReward(lambda prompts, completions, **_: [len(c) for c in completions], cdf, n=2)(["Once"], ["ab"])
        [-0.6931471805599453]
    """

    def __init__(
        self,
        reward_fn: RewardFunction,
        cdf: RewardCDF,
        bound: Bound = "l1",
        n: int = 16,
        ref_logp_fn: Callable[[Sequence[Any], Sequence[Any]], Tensor] | None = None,
    ):
        self.beta = kl_coefficient(n, bound)
        if not callable(reward_fn):
            raise ValueError(f"reward_fn must be callable, got {type(reward_fn).__name__}")
        if bound != "l1" and ref_logp_fn is None:
            raise ValueError(f"bound={bound!r} needs ref_logp_fn: (prompts, completion_ids) -> log π_ref of each completion")
        self.reward_fn = reward_fn
        self.cdf = cdf
        self.bound = bound
        self.n = n
        self.ref_logp_fn = ref_logp_fn
        self.__name__ = f"vbon_{bound}"  # what TRL logs it as

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **more: Any) -> list[float | None]:
        raw = self.reward_fn(prompts=prompts, completions=completions, **more)
        log_cdf = self.cdf.log_cdf(prompts, checked_rewards(raw, len(completions)))
        if self.bound == "l1":
            return log_cdf.tolist()
        assert self.ref_logp_fn is not None
        ref_logp = self.ref_logp_fn(prompts, more.get("completion_ids", completions)).detach().cpu().double()
        if self.bound == "exact":
            return (bon_log_ratio(ref_logp, log_cdf, self.n) / self.n).tolist()
        return ((self.n - 1) / (2 * self.n) * (log_cdf + ref_logp)).tolist()
