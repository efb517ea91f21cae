"""POWER on a bandit with a table of logits: every expectation exact, whole sweeps in one batch of tensors."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .loss import checked_beta, checked_eta, checked_gamma

Gradient = Callable[[Tensor], Tensor]
"""Of log π ``(runs, arms)``: the loss's slope in each log π, as if they were free, ``(runs, arms)``."""


class BanditFit(NamedTuple):
    """Where gradient descent ended. Shapes: policy ``(runs, arms)``; labels ``(runs, pairs)``; path: step to policy."""

    policy: Tensor
    labels: Tensor
    path: dict[int, Tensor]


class Counts(NamedTuple):
    """Pairs of a bandit as matrices.

    Shapes: winner, loser ``(pairs, arms)`` of 0 and 1; share ``(runs, pairs)``, rows sum to 1.
    """

    winner: Tensor
    loser: Tensor
    share: Tensor


@torch.no_grad()
def descend(
    theta0: Tensor, gradient: Gradient, *, steps: int, lr: float, at: Iterable[int] = ()
) -> tuple[Tensor, dict[int, Tensor]]:
    """Full-batch gradient descent on softmax logits: the last policy, and those at the steps asked for.

    ``dL/dθ = G − π Σ G`` for a slope ``G`` in ``log π``.

    Raises:
        FloatingPointError: the policy is no longer finite.
    """
    theta, path, wanted = theta0.clone(memory_format=torch.contiguous_format), {}, {int(step) for step in at}
    for step in range(steps):
        logp = theta.log_softmax(-1)
        slope = gradient(logp)
        theta.sub_(torch.addcmul(slope, logp.exp_(), slope.sum(-1, keepdim=True), value=-1), alpha=lr)
        if step + 1 in wanted:
            path[step + 1] = theta.softmax(-1)
    policy = theta.softmax(-1)
    if not bool(torch.isfinite(policy).all()):
        raise FloatingPointError(f"{int((~policy.isfinite()).any(-1).sum())} of {len(policy)} runs have diverged at lr={lr}")
    return policy, path


class POWERBandit:
    """POWER and POWER-DL for one state and K arms, by full-batch gradient descent.

    Rashidinejad and Tian, "Sail into the Headwind", ICLR 2025, arXiv 2412.09544.

    ``L = Σ_i s_i · (−[ℓ_i log σ(m_i) + (1 − ℓ_i) log σ(−m_i)]) − η β Σ_y q(y) w(y) log π(y)`` with ``s_i`` the share of pair i
    among all counted ones, ``q`` the baseline policy, ``m_i`` as in `power_margin`, and labels updated at each step as by
    `update_labels`. Every setting may be a vector: its entries are runs, done together.

    Args:
        lr: Step on the logits, > 0.
        steps: How many, ≥ 1.
        weights: ``w`` of each arm, > 0, ``(K,)``; default 1.
        baseline: ``"chosen"`` (``q`` = shares of chosen arms), ``"initial"`` (the initial policy), or a policy, ``(K,)`` or
            ``(runs, K)``.
        gate_sft: Multiply a chosen arm's likelihood by its pair's label; only with ``baseline="chosen"``.
        update: ``"before"`` or ``"after"``: whether a step uses the labels that it has just updated.
        init: Where labels start.
        onpolicy_weight_term: Keep the objective's term ``η β E_π[w]``, which the trainer drops.
        at: Steps whose policies are kept in ``path``.

    Raises:
        ValueError: an argument outside its range, an arm that does not exist, counts that are negative, infinite or all zero.

    Example:
        >>> lucky = [(0, 1, 60), (1, 0, 40), (2, 0, 1)]  # arm 2 has won once, by luck
        >>> fit = POWERBandit().fit(lucky, [0.0, 0.0, -3.0], beta=1.0, eta=1.0)
        >>> fit.policy.round(decimals=3)
        tensor([[0.5860, 0.3940, 0.0190]], dtype=torch.float64)
    """

    def __init__(
        self, *, lr: float = 0.5, steps: int = 4000, weights: Sequence[float] | Tensor | None = None,
        baseline: str | Tensor = "chosen", gate_sft: bool = False, update: str = "before", init: float = 1.0,
        onpolicy_weight_term: bool = False, at: Iterable[int] = (),
    ):  # fmt: skip
        if not lr > 0 or steps < 1:
            raise ValueError(f"lr must be positive and steps at least 1, got lr={lr} and steps={steps}")
        if isinstance(baseline, str) and baseline not in ("chosen", "initial"):
            raise ValueError(f"baseline must be 'chosen', 'initial' or a policy, got {baseline!r}")
        if gate_sft and not (isinstance(baseline, str) and baseline == "chosen"):
            raise ValueError("gate_sft needs baseline='chosen': only then does each pair have a likelihood of its own")
        if update not in ("before", "after") or not 0 <= init <= 1:
            raise ValueError(f"update must be 'before' or 'after' and init in [0, 1], got {update!r} and {init}")
        at = tuple(at)
        if beyond := [step for step in at if not 1 <= step <= steps]:
            raise ValueError(f"at must name steps of 1 … {steps}, got {beyond}")
        self.lr, self.steps, self.weights, self.baseline = lr, steps, weights, baseline
        self.gate_sft, self.update, self.init = gate_sft, update, init
        self.onpolicy_weight_term, self.at = onpolicy_weight_term, at

    def fit(
        self,
        pairs: Sequence[tuple[int, int, Any]],
        theta0: Sequence[float] | Tensor,
        beta: float | Tensor = 1.0,
        eta: float | Tensor = 0.1,
        gamma: float | Tensor = 0.0,
    ) -> BanditFit:
        """Descends from ``theta0``.

        Args:
            pairs: ``(winner, loser, count)``; the count of a pair may differ between runs, ``(runs,)``.
            theta0: Initial logits, ``(K,)`` or ``(runs, K)``.
            beta, eta, gamma: Numbers, or ``(runs,)``.
        """
        beta, eta, gamma = (torch.as_tensor(each, dtype=torch.float64).reshape(-1, 1) for each in (beta, eta, gamma))
        for check, each in ((checked_beta, beta), (checked_eta, eta), (checked_gamma, gamma)):
            for value in each.flatten().tolist():
                check(value)
        theta = torch.as_tensor(theta0, dtype=torch.float64)
        theta = theta if theta.ndim == 2 else theta[None]
        counts = count_matrices(pairs, theta.shape[1])
        runs = torch.broadcast_shapes(beta.shape[:1], eta.shape[:1], gamma.shape[:1], theta.shape[:1], counts.share.shape[:1])[
            0
        ]
        w = torch.ones(theta.shape[1], dtype=torch.float64) if self.weights is None else torch.as_tensor(self.weights).double()
        if w.shape != theta.shape[1:] or not bool((torch.isfinite(w) & (w > 0)).all()):
            raise ValueError(f"weights must be positive and finite, one for each of {theta.shape[1]} arms, got {w.tolist()}")
        share = counts.share.expand(runs, -1)
        lift = (counts.winner - counts.loser) * w  # m = β (lift · log π + lift · 1)
        raise_, lower, winner_w = lift.T.contiguous(), lift.contiguous(), counts.winner * w
        shift, weight, strength = lift.sum(1), beta * share, eta * beta
        pull, keep = strength * (self._baseline_policy(theta, counts) * w), (1 - gamma).expand(runs, 1)
        labels = torch.full((runs, len(pairs)), self.init, dtype=torch.float64)
        learning = bool((gamma > 0).any())

        def gradient(logp: Tensor) -> Tensor:
            nonlocal labels
            belief = torch.addmm(shift, logp, raise_).mul_(beta).sigmoid_()
            used = labels
            if learning:
                labels = torch.lerp(belief, labels, keep)
                used = labels if self.update == "before" else used
            slope = (belief.sub_(used).mul_(weight)) @ lower
            slope -= strength * ((share * used) @ winner_w) if self.gate_sft else pull
            return slope.add_(strength * w * logp.exp()) if self.onpolicy_weight_term else slope

        policy, path = descend(theta.expand(runs, -1), gradient, steps=self.steps, lr=self.lr, at=self.at)
        return BanditFit(policy, labels, path)

    def _baseline_policy(self, theta: Tensor, counts: Counts) -> Tensor:
        if isinstance(self.baseline, str):
            return counts.share @ counts.winner if self.baseline == "chosen" else theta.softmax(-1)
        q = torch.as_tensor(self.baseline, dtype=torch.float64)
        q = q if q.ndim == 2 else q[None]
        if q.shape[-1] != theta.shape[1] or not bool((q >= 0).all()) or not torch.allclose(q.sum(-1), torch.ones(1).double()):
            raise ValueError(f"a baseline policy must have {theta.shape[1]} probabilities that sum to 1, got {tuple(q.shape)}")
        return q


def count_matrices(pairs: Sequence[tuple[int, int, Any]], arms: int) -> Counts:
    """Winners, losers and shares of ``(winner, loser, count)``."""
    for winner, loser, _ in pairs:
        if winner == loser or not 0 <= min(winner, loser) <= max(winner, loser) < arms:
            raise ValueError(f"a pair needs two different arms of 0 … {arms - 1}, got {winner} and {loser}")
    if not pairs:
        raise ValueError("there must be at least one pair, got none")
    columns = torch.broadcast_tensors(*(torch.as_tensor(count, dtype=torch.float64).reshape(-1) for *_, count in pairs))
    count = torch.stack(columns, -1)  # (runs, pairs)
    if not bool((torch.isfinite(count) & (count >= 0)).all()) or not bool((count.sum(-1) > 0).all()):
        raise ValueError("counts must be finite and at least 0, and not all 0")
    eye = torch.eye(arms, dtype=torch.float64)
    chosen, rejected = (torch.tensor([pair[side] for pair in pairs]) for side in (0, 1))
    return Counts(eye[chosen], eye[rejected], count / count.sum(-1, keepdim=True))
