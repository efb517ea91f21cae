"""A model of the training class, fitted to each prompt by gradient descent: all prompts and all lengths at once."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from .classes import LINEAR, QUADRATIC, Power, ReLUNet, SigmoidNet
from .references import check_prompts, context_mask

_MODELS = 4096  # fitted together: what a step touches stays near the processor
_HIDDEN = 100


class GDReference:
    r"""Gradient descent on the context with a model of a function class: what the paper holds a transformer against.

    "Can In-context Learning Really Generalize to Out-of-distribution Tasks?", ICLR 2025, https://arxiv.org/abs/2410.09695.

    For each prompt and each k a fresh model, Adam on all k examples:

    .. math:: \theta_{t+1} = \theta_t - \eta\, \mathrm{Adam}\Big(\nabla \tfrac1k \sum_{i \le k} (f_\theta(x_i) - y_i)^2\Big)

    The models share nothing, so their parameters are one array and Adam, which works element by element, is one too.
    With 200 steps of 0.005 no weight moves further than about 1: the fit stops early, which flattens the peak that
    least squares has at k = d.

    Args:
        family: ``"linear"``, ``"quadratic"`` (one weight vector on x or x², no bias), ``"relu"`` (a two-layer net of 100
            with biases), a `Power`, `ReLUNet` or `SigmoidNet`, or a function ``d -> nn.Module`` that maps ``(k, d)`` to
            ``(k, 1)``. Such a function is called once for each prompt and length; it must not depend on the batch.
        steps: Of Adam, ≥ 1. Default 200, for nets 100.
        lr: η > 0.
        seed: Of the initial weights, which are drawn as ``nn.Linear`` draws them.
        name: How reports call it.

    Shapes:
        - ``predict``: ``(B, n, d)``, ``(B, n)``, ks to ``(B, len(ks))``.

    Raises:
        ValueError: an unknown family; steps or lr not positive; prompts not finite; k outside [1, n − 1]: without an
            example there is only the random model that it starts from.

    Example:
        >>> xs = torch.randn(8, 21, 2, generator=torch.Generator().manual_seed(0))
        >>> (GDReference("linear", steps=2000).predict(xs, xs.sum(-1), [20])[:, 0] - xs[:, 20].sum(-1)).abs().max() < 1e-3
        tensor(True)
    """

    def __init__(
        self,
        family: "str | Power | ReLUNet | SigmoidNet | Callable[[int], nn.Module]" = "linear",
        steps: int | None = None,
        lr: float = 5e-3,
        *,
        seed: int = 0,
        name: str = "",
    ):
        known = {"linear": LINEAR, "quadratic": QUADRATIC, "relu": ReLUNet(_HIDDEN)}
        if isinstance(family, str) and family not in known:
            raise ValueError(f"family must be {', '.join(map(repr, known))}, a class or a function, got {family!r}")
        self.family = known[family] if isinstance(family, str) else family
        if not isinstance(self.family, (Power, ReLUNet, SigmoidNet)) and not callable(self.family):
            raise ValueError(f"family must be a name, a function class or a function d -> nn.Module, got {family!r}")
        self.steps = steps if steps is not None else 200 if isinstance(self.family, Power) else 100
        self.lr = lr
        self.seed = seed
        if self.steps < 1 or not 0 < lr < math.inf:
            raise ValueError(f"steps must be at least 1 and lr positive, got {steps} and {lr}")
        self.name = name or f"gd {getattr(self.family, 'name', getattr(self.family, '__name__', 'model'))}"

    def predict(self, xs: Tensor, ys: Tensor, ks: Sequence[int]) -> Tensor:
        check_prompts(xs, ys, ks, least=1)
        fit = self._fit_linear if isinstance(self.family, Power) else self._fit_net
        gen = torch.Generator(xs.device).manual_seed(self.seed)
        rows = max(1, _MODELS // len(ks))
        with torch.no_grad():
            return torch.cat([fit(x, y, ks, gen) for x, y in zip(xs.split(rows), ys.split(rows), strict=True)])

    def _fit_linear(self, xs: Tensor, ys: Tensor, ks: Sequence[int], gen: torch.Generator) -> Tensor:
        """The gradient needs the context through two moments alone: ∇ = 2 (S w − c), S = mean φφᵀ, c = mean φ y."""
        assert isinstance(self.family, Power)
        phi = self.family.features(xs)  # (B, n, p)
        weight = context_mask(ks, phi.shape[1], phi.device) / torch.as_tensor(ks, device=phi.device)[:, None]
        scaled = phi[:, None] * weight[..., None].to(phi.dtype)  # (B, K, n, p)
        S, c = scaled.mT @ phi[:, None], scaled.mT @ ys[:, None, :, None]
        w = _uniform(c.shape, phi.shape[-1], gen, phi)
        adam = _Adam([w], self.lr)
        for _ in range(self.steps):
            adam.step([2 * (S @ w - c)])
        return (phi[:, list(ks), None] @ w)[..., 0, 0]

    def _fit_net(self, xs: Tensor, ys: Tensor, ks: Sequence[int], gen: torch.Generator) -> Tensor:
        batch, n, d = xs.shape
        forward, params = self._models(batch * len(ks), d, gen, xs)
        weight = context_mask(ks, n, xs.device) / torch.as_tensor(ks, device=xs.device)[:, None]
        weight = weight.to(xs.dtype).repeat(batch, 1)  # (B·K, n)
        x, y = (t.repeat_interleave(len(ks), 0) for t in (xs, ys))
        adam = _Adam([p.requires_grad_() for p in params.values()], self.lr)
        for _ in range(self.steps):
            with torch.enable_grad():
                loss = (weight * (forward(params, x) - y).square()).sum()  # the models share nothing: each gets its own ∇
                gradients = torch.autograd.grad(loss, list(params.values()))
            adam.step(list(gradients))
        query = xs[:, list(ks)].reshape(-1, 1, d)
        return forward(params, query).reshape(batch, len(ks))

    def _models(
        self, count: int, d: int, gen: torch.Generator, like: Tensor
    ) -> tuple[Callable[[dict[str, Tensor], Tensor], Tensor], dict[str, Tensor]]:
        """A forward pass ``(params, (count, n, d)) -> (count, n)`` of `count` models, and their initial parameters."""
        if isinstance(self.family, (ReLUNet, SigmoidNet)):
            h, activation = self.family.hidden, getattr(torch, self.family.activation)
            params = {
                "v": _uniform((count, d, h), d, gen, like),
                "b": _uniform((count, 1, h), d, gen, like),
                "a": _uniform((count, h, 1), h, gen, like),
                "c": _uniform((count, 1, 1), h, gen, like),
            }
            return lambda p, x: (activation(torch.baddbmm(p["b"], x, p["v"])) @ p["a"] + p["c"])[..., 0], params
        assert callable(self.family)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**31, (1,), generator=gen, device=gen.device)))
            models = [self.family(d).to(like) for _ in range(count)]
        params, buffers = torch.func.stack_module_state(models)
        base = models[0]

        def one(p: dict[str, Tensor], b: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(base, (p, b), (x,))[:, 0]

        return lambda p, x: torch.func.vmap(one)(p, buffers, x), {k: v.detach() for k, v in params.items()}


def _uniform(shape: Sequence[int], fan_in: int, gen: torch.Generator, like: Tensor) -> Tensor:
    bound = fan_in**-0.5
    return torch.empty(shape, dtype=like.dtype, device=like.device).uniform_(-bound, bound, generator=gen)


class _Adam:
    """torch.optim.Adam with its defaults, for gradients that come as a list."""

    def __init__(self, params: list[Tensor], lr: float):
        for p in params:
            p.grad = None
        self.params = params
        self.optimizer = torch.optim.Adam(params, lr=lr, foreach=True)

    def step(self, gradients: list[Tensor]) -> None:
        for p, g in zip(self.params, gradients, strict=True):
            p.grad = g
        self.optimizer.step()
