"""The references and the Bayesian learner beside the loops they replace, and a training step beside a stock GPT-2's."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model

from assay.bench.speed import Contest
from assay.language import LINEAR, QUADRATIC, GDReference, ICLTransformer, LeastSquares, sample_prompts
from assay.language.icl_ood.mixtures import published_mixture, unseen_prompts

GD_STEPS = 20  # of the published 200 and 100: both sides are linear in them
xs, ys = sample_prompts(QUADRATIC, 64, 41, 20, torch.Generator().manual_seed(0))
KS = [10, 20, 30, 40]


def one_module_a_prompt(make: Callable[[], nn.Module]) -> Callable[[], Tensor]:
    """For each k a list of modules, one a prompt, run in turn, with one optimizer for all of them."""

    def call() -> Tensor:
        predictions = []
        for k in KS:
            models = nn.ModuleList(make() for _ in range(len(xs)))
            optimizer = torch.optim.Adam(models.parameters(), lr=5e-3)
            for _ in range(GD_STEPS):
                optimizer.zero_grad()
                outputs = torch.stack([model(x[:k])[:, 0] for model, x in zip(models, xs, strict=True)])
                (outputs - ys[:, :k]).square().mean().backward()
                optimizer.step()
            predictions.append(torch.stack([model(x[k : k + 1])[0, 0] for model, x in zip(models, xs, strict=True)]))
        return torch.stack(predictions, 1)

    return call


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 100), nn.ReLU(), nn.Linear(100, 1))


linear, relu = GDReference("linear", steps=GD_STEPS), GDReference("relu", steps=GD_STEPS)
ols = LeastSquares()


def least_squares_one_by_one() -> list[Tensor]:
    return [xs[:, k] @ torch.linalg.lstsq(xs[:, :k], ys[:, :k, None], driver="gelsd").solution[0] for k in range(1, 41)]


mixture = published_mixture("error", 1.0)
few_xs, few_ys = unseen_prompts("error", 40, 65, torch.Generator().manual_seed(0))


def posterior_one_by_one() -> list[float]:
    """Every prompt and every length by itself, in NumPy."""
    mu, w = mixture.mu.numpy(), mixture.w.numpy()
    found = []
    for x, y in zip(few_xs.double().numpy(), few_ys.double().numpy(), strict=True):
        for k in range(x.shape[0]):
            inverse = np.linalg.inv(np.eye(3) + x[:k].T @ x[:k])
            shift, drawn = x[: k + 1].sum(0), x[:k].T @ y[:k]
            logs, means = [], []
            for m in range(4):
                a = (mu[m] @ mu[m] - (mu[m] + shift) @ (mu[m] + shift) / (k + 2)) / 2
                b = (w[m] @ w[m] - (w[m] + drawn) @ inverse @ (w[m] + drawn)) / 2
                logs.append(-a - b)
                means.append(inverse @ (w[m] + drawn))
            weights = np.exp(np.array(logs) - max(logs))
            found.append(float(weights / weights.sum() @ np.array(means) @ x[k]))
    return found


class StockGPT2(nn.Module):
    """The released form: GPT-2 as it comes, its table of 50,257 tokens among it, on all 2n tokens."""

    def __init__(self) -> None:
        super().__init__()
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        self.backbone = GPT2Model(GPT2Config(n_positions=82, n_embd=64, n_layer=2, n_head=2, use_cache=False, **drops))
        self.read_in, self.read_out = nn.Linear(20, 64), nn.Linear(64, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        tokens = torch.stack((x, nn.functional.pad(y[..., None], (0, 19))), 2).flatten(1, 2)
        return self.read_out(self.backbone(inputs_embeds=self.read_in(tokens)).last_hidden_state)[:, ::2, 0]


def training_step(model: nn.Module) -> Callable[[], None]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    gen = torch.Generator().manual_seed(0)

    def call() -> None:
        x, y = sample_prompts(LINEAR, 64, 41, 20, gen)
        optimizer.zero_grad(set_to_none=True)
        (model(x, y) - y).square().mean().backward()
        optimizer.step()

    return call


MODULES = "one module a prompt, one loop a length"
contests = [
    Contest("linear fits by gradient descent, 64 prompts, 4 lengths", lambda: linear.predict(xs, ys, KS),
            one_module_a_prompt(lambda: nn.Linear(20, 1, bias=False)), MODULES, 0.02, rounds=5),
    Contest("ReLU nets by gradient descent, 64 prompts, 4 lengths", lambda: relu.predict(xs, ys, KS),
            one_module_a_prompt(net), MODULES, rounds=5),
    Contest("least squares, 64 prompts, 40 lengths", lambda: ols.predict(xs, ys, range(1, 41)), least_squares_one_by_one,
            "torch.linalg.lstsq, one call a length"),
    Contest("Bayesian learner, 40 prompts, 65 lengths", lambda: mixture.predict(few_xs, few_ys), posterior_one_by_one,
            "NumPy, one prompt and length at a time", 0.05),
    Contest("training step, 64 prompts of 41 examples", training_step(ICLTransformer(20, 41, 64, 2, 2)),
            training_step(StockGPT2()), "transformers' GPT2Model as it comes", 1.0),
]  # fmt: skip
