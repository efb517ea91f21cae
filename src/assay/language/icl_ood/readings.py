"""What the study reads off a predictor: errors, whom it goes with, weights of components, labels it names rightly."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .cases import Case
from .mixtures import MODES, published_mixture, selected
from .posterior import MixturePosterior
from .references import identity, predict_at
from .report import agreement

SIGMAS = {"tight": 1 / 9, "even": 1.0, "wide": 9.0}  # δ = 1/81, 1, 81


class Learner:
    """An exact Bayesian learner as a predictor; as released, it cuts every w̃ to whole numbers."""

    def __init__(self, mixture: MixturePosterior, features: Callable[[Tensor], Tensor] = identity, *, released: bool = False):
        self.mixture, self.features, self.released = mixture, features, released

    def predict(self, xs, ys, ks):
        phi = self.features(xs)
        found = self.mixture.predict(phi, ys)
        # The released arrays are of integers, and what is written into them loses its fraction.
        w = found["w_tilde"].trunc() if self.released else found["w_tilde"]
        return torch.einsum("bnm,bnmd,bnd->bn", found["weights"], w, phi.double())[:, list(ks)].to(ys.dtype)


def readings(case: Case, predictor: Any, device: torch.device) -> dict[str, Tensor]:
    """Predictions on every set of prompts, ``(B, len(ks))``."""
    moved = {name: (xs.to(device), ys.to(device)) for name, (xs, ys) in case.prompts.items()}
    return {name: predict_at(predictor, xs, ys, case.ks).cpu() for name, (xs, ys) in moved.items()}


def judged(case: Case) -> list[tuple[str, int]]:
    return list(zip(("3d", "4d"), case.judged, strict=True)) if "B" in case.prompts else [("loss", case.ks[-1])]


def errors_on_b(predicted: torch.Tensor, case: Case) -> torch.Tensor:
    return (predicted - case.prompts["B"][1][:, list(case.ks)]).double().square() / case.d


def closeness(predicted: torch.Tensor, case: Case, kind: str) -> dict[str, float]:
    """ρ_A, ρ_B, c and c₀ at the judged lengths; c is left out for the fit of B itself, which has no distance to it."""
    if not {f"{kind}_A", f"{kind}_B"} <= set(case.fits):
        return {}
    metrics: dict[str, float] = {}
    prefix = "" if kind == "ols" else "gd_"
    for label, k in judged(case):
        i = case.ks.index(k)
        a, b = (agreement(predicted[:, i], case.fits[f"{kind}_{letter}"][:, i]) for letter in "AB")
        metrics |= {f"{prefix}rho_A_{label}": a["alignment"], f"{prefix}rho_B_{label}": b["alignment"]}
        metrics[f"{prefix}c0_{label}"] = a["size"] / b["size"]
        if b["gap"] > 0:
            metrics[f"{prefix}c_{label}"] = a["gap"] / b["gap"]
    return metrics


def selection(learners: list[Learner], case: Case) -> dict[str, float]:
    """Weight of the component that a preference should pick, after 1 example and after all; the error after all."""
    metrics: dict[str, float] = {}
    last = case.ks[-1]
    for (name, sigma), learner in zip(SIGMAS.items(), learners, strict=True):
        for mode in () if learner.released else MODES:  # the weights of the released code are right
            xs, ys = case.prompts[mode]
            mixture = published_mixture(mode, sigma)
            weights = mixture.predict(xs, ys)["weights"]
            chosen = selected(mixture, mode, xs, ys)[:, None, None].expand(-1, weights.shape[1], 1)
            weight = weights.gather(2, chosen)[..., 0].mean(0)
            prefix = name if mode == "error" else f"{name}_input"
            metrics |= {f"{prefix}_weight_first": float(weight[1]), f"{prefix}_weight_last": float(weight[last])}
        xs, ys = case.prompts["error"]
        errors = (learner.predict(xs, ys, [last])[:, 0] - ys[:, last]).double().square()
        metrics[f"{name}_loss"] = float(errors.mean()) / case.d
    return metrics


def label_accuracies(model: nn.Module, case: Case, device: torch.device) -> dict[str, float]:
    """Share of labels whose nearest embedding is the right one, at the last place of a prompt."""
    metrics: dict[str, float] = {}
    for name, (xs, ys) in case.prompts.items():
        task: Any = case.classes[name]
        with torch.no_grad():
            predicted = torch.cat(
                [model(x.to(device), y.to(device)).cpu() for x, y in zip(xs.split(256), ys.split(256), strict=True)]
            )
        metrics[f"accuracy_{name}"] = float(task.accuracy(predicted[:, -1], ys[:, -1]).float().mean())
        metrics[f"error_{name}"] = float((predicted[:, -1] - ys[:, -1]).square().sum(-1).mean()) / case.d
    return metrics
