"""The networks and losses on which the study looks for lost capacity."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def mlp(sizes: list[int], activation: type[nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), activation()]
    return nn.Sequential(*layers[:-1])


class TwoFactorLinear(nn.Module):
    """``y = Σ u_i w_i x_i``: flipping the signs of a pair changes nothing, and ``u = w = 0`` lies on every mirror."""

    def __init__(self, features: int):
        super().__init__()
        self.u, self.w = nn.Parameter(torch.zeros(features)), nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:  # (batch, features) → (batch,)
        return x @ (self.u * self.w)


class VAE(nn.Module):
    """A Gaussian code of a digit; returns the means of the code, its log variances, and the reconstruction."""

    def __init__(self, pixels: int, width: int, code: int):
        super().__init__()
        self.encoder = mlp([pixels, width, 2 * code], nn.Tanh)
        self.decoder = mlp([code, width, pixels], nn.Tanh)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.encoder(x).chunk(2, dim=1)
        return mean, log_var, self.decoder(mean + torch.randn_like(mean) * (0.5 * log_var).exp() * self.training)


class Contrastive(nn.Module):
    """An encoder and the projection head on which the contrastive loss is taken."""

    def __init__(self, pixels: int, width: int, out: int):
        super().__init__()
        self.encoder = mlp([pixels, width, width], nn.ReLU)
        self.head = mlp([width, width, out], nn.ReLU)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.encoder(x)))


def class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def square_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return 0.5 * (model(batch[0]) - batch[1]).square().mean()


class EvidenceLoss:
    """Squared error of a pixel and β times the divergence from the prior, both as means over pixels."""

    def __init__(self, beta: float):
        self.beta = beta

    def __call__(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        x = batch[0]
        mean, log_var, y = model(x)
        divergence = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1).mean()
        return F.mse_loss(y, x) + self.beta * divergence / x.shape[1]


class ContrastiveLoss:
    """NT-Xent between two views of each image: shifted by up to a pixel, with noise."""

    def __init__(self, temperature: float, noise: float):
        self.temperature, self.noise = temperature, noise

    def view(self, x: Tensor) -> Tensor:
        side = round(x.shape[1] ** 0.5)
        padded = F.pad(x.view(-1, 1, side, side), (1, 1, 1, 1))
        windows = padded.unfold(2, side, 1).unfold(3, side, 1)  # (batch, 1, 3, 3, side, side)
        rows, columns = torch.randint(3, (2, len(x)))
        shifted = windows[torch.arange(len(x)), 0, rows, columns].flatten(1)
        return shifted + self.noise * torch.randn_like(x)

    def __call__(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        x = batch[0]
        z = F.normalize(model(torch.cat([self.view(x), self.view(x)])), dim=1)
        similar = (z @ z.T / self.temperature).fill_diagonal_(-torch.inf)
        other = torch.arange(2 * len(x), device=x.device).roll(len(x))
        return F.cross_entropy(similar, other)


def linear_probe(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], ridge: float = 1e-3) -> float:
    """Accuracy of ridge regression onto one-hot labels, on features standardised by the training set."""
    mean, std = train[0].mean(0), train[0].std(0).clamp_min(1e-6)
    a, b = ((F.pad((x - mean) / std, (0, 1), value=1.0)).double() for x in (train[0], test[0]))
    targets = F.one_hot(train[1]).double()
    solved = torch.linalg.solve(a.T @ a / len(a) + ridge * torch.eye(a.shape[1], dtype=a.dtype), a.T @ targets / len(a))
    return float(((b @ solved).argmax(1) == test[1]).double().mean())


def dead_units(model: Any, below: float) -> int:
    """Coordinates whose product of factors is (nearly) 0."""
    return int(((model.u * model.w).abs() < below).sum())
