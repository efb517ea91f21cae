"""The exact Bayesian learner of a mixture of regressions: which of its pretraining components a prompt selects."""

from typing import Any

import torch
from torch import Tensor


class MixturePosterior:
    r"""The optimal in-context predictor after pretraining on a mixture of linear regressions.

    "Can In-context Learning Really Generalize to Out-of-distribution Tasks?", ICLR 2025, https://arxiv.org/abs/2410.09695;
    after Lin and Lee, 2024, https://arxiv.org/abs/2402.18819.

    Prior: component m with probability π_m, :math:`\mu \sim N(\mu_m, \sigma_\mu^2 I)`, :math:`w \sim N(w_m, \sigma_w^2 I)`,
    :math:`x_i \sim N(\mu, \sigma_x^2 I)`, :math:`y_i = w^\top x_i + N(0, \sigma_y^2)`. After k examples and the query
    :math:`x_{k+1}`, with :math:`\delta_\mu = \sigma_\mu^2 / \sigma_x^2`, :math:`\delta_w = \sigma_w^2 / \sigma_y^2`:

    .. math::
        \hat y &= \sum_m \tilde\pi_m \tilde w_m^\top x_{k+1}, \qquad
        \tilde w_m = (I + \delta_w \Sigma)^{-1} (w_m + D_w), \qquad \tilde\pi_m \propto \pi_m e^{-a_m - b_m} \\
        a_m &= \big[\|\mu_m\|^2 - \|\mu_m + D_\mu\|^2 / (1 + (k+1) \delta_\mu)\big] / 2\sigma_\mu^2 \\
        b_m &= \big[\|w_m\|^2 - (w_m + D_w)^\top (I + \delta_w \Sigma)^{-1} (w_m + D_w)\big] / 2\sigma_w^2 \\
        D_\mu &= \delta_\mu \sum_{i \le k+1} x_i, \qquad D_w = \delta_w \sum_{i \le k} x_i y_i, \qquad
        \Sigma = \sum_{i \le k} x_i x_i^\top

    b_m is the error of w_m on the context up to shrinkage: with equal μ_m the component of low error wins. a_m measures
    how far the inputs lie from μ_m: with equal w_m the component of similar inputs wins.

    Args:
        mu: μ_m, ``(M, d)``.
        w: w_m, ``(M, d)``.
        pi: π_m, ``(M,)``, ≥ 0 with sum 1; None: all alike.
        s_mu: σ_μ > 0.
        s_w: σ_w > 0.
        s_x: σ_x > 0.
        s_y: σ_y > 0.

    Shapes:
        - ``predict``: xs ``(B, n, d)``, ys ``(B, n)``, whose last column is never looked at; to a dictionary of
          ``pred (B, n)``, ``weights (B, n, M)`` and ``w_tilde (B, n, M, d)``, float64: place k has seen k examples.

    Raises:
        ValueError: shapes that do not match, values not finite, a σ not positive, π no distribution.

    Example:
        >>> learner = MixturePosterior(torch.zeros(2, 1), torch.tensor([[5.0], [-5.0]]), s_w=0.1)
        >>> xs = torch.ones(1, 3, 1)
        >>> learner.predict(xs, 4 * xs[..., 0])["weights"][0, :, 0].round(decimals=3)
        tensor([0.5000, 1.0000, 1.0000], dtype=torch.float64)
    """

    def __init__(
        self,
        mu: Any,
        w: Any,
        pi: Any = None,
        s_mu: float = 1.0,
        s_w: float = 1.0,
        s_x: float = 1.0,
        s_y: float = 1.0,
    ):
        self.mu, self.w = (torch.as_tensor(t, dtype=torch.float64) for t in (mu, w))
        if self.mu.ndim != 2 or self.mu.shape != self.w.shape or not self.mu.numel():
            raise ValueError(f"mu and w must both be (M, d), got {tuple(self.mu.shape)} and {tuple(self.w.shape)}")
        components = len(self.mu)
        self.pi = torch.as_tensor([1 / components] * components if pi is None else pi, dtype=torch.float64)
        if self.pi.shape != (components,) or (self.pi < 0).any() or abs(float(self.pi.sum()) - 1) > 1e-6:
            raise ValueError(f"pi must be {components} probabilities that add up to 1, got {self.pi.tolist()}")
        if not (torch.isfinite(self.mu).all() and torch.isfinite(self.w).all()):
            raise ValueError("mu and w must be finite")
        for name, sigma in {"s_mu": s_mu, "s_w": s_w, "s_x": s_x, "s_y": s_y}.items():
            if not 0 < sigma < float("inf"):
                raise ValueError(f"{name} must be positive, got {sigma}")
        self.s_mu, self.s_w, self.s_x, self.s_y = s_mu, s_w, s_x, s_y

    def predict(self, xs: Tensor, ys: Tensor) -> dict[str, Tensor]:
        d = self.mu.shape[1]
        if xs.ndim != 3 or xs.shape[2] != d or ys.shape != xs.shape[:2]:
            raise ValueError(f"xs must be (B, n, {d}) and ys (B, n), got {tuple(xs.shape)} and {tuple(ys.shape)}")
        if not (torch.isfinite(xs).all() and torch.isfinite(ys[:, :-1]).all()):
            raise ValueError("xs and the labels of the context must be finite")
        x, y = xs.double(), ys.double().nan_to_num()
        mu, w, pi = (t.to(x.device) for t in (self.mu, self.w, self.pi))
        delta_mu, delta_w = (self.s_mu / self.s_x) ** 2, (self.s_w / self.s_y) ** 2

        seen = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)  # k + 1, the query included
        pulled = mu + delta_mu * torch.cumsum(x, 1)[:, :, None]  # (B, n, M, d): μ_m + D_μ
        a = (mu.square().sum(-1) - pulled.square().sum(-1) / (1 + seen * delta_mu)[:, None]) / (2 * self.s_mu**2)

        moment = _before(x[..., :, None] * x[..., None, :])
        precision = torch.eye(d, dtype=x.dtype, device=x.device) + delta_w * moment  # (B, n, d, d)
        drawn = w + delta_w * _before(x * y[..., None])[:, :, None]  # (B, n, M, d): w_m + D_w
        # Cholesky keeps the digits that b's difference of large numbers needs
        w_tilde = torch.cholesky_solve(drawn.mT, torch.linalg.cholesky(precision)).mT
        b = (w.square().sum(-1) - (drawn * w_tilde).sum(-1)) / (2 * self.s_w**2)

        weights = torch.softmax(pi.log() - a - b, -1)  # in logarithms: a and b reach thousands for σ = 1/9
        pred = torch.einsum("bnm,bnmd,bnd->bn", weights, w_tilde, x)
        return {"pred": pred, "weights": weights, "w_tilde": w_tilde}


def _before(terms: Tensor) -> Tensor:
    """Sums along the second axis over what stands in front of each place."""
    return torch.cumsum(terms, 1).roll(1, 1).index_fill(1, torch.zeros(1, dtype=torch.long, device=terms.device), 0.0)
