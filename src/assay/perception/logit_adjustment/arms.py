"""The study's arms: this method, the theory's optimum and their rivals on one case."""

from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from .adjust import AdditiveLogitAdjustment, MultiplicativeLogitAdjustment
from .angles import boundary_angles, mean_gap
from .case import Case, Features, needed
from .collapse import class_means, neural_collapse
from .one_vs_one import OneVsOneAdjuster
from .rivals import tau_normalised


def none(case: Case):
    if case.features is None:
        return case.test_logits
    f = case.features
    collapse = neural_collapse(f.train, f.train_labels, f.weight)
    fits = (F.linear(f.train, f.weight, f.bias).argmax(-1) == f.train_labels).double().mean().item()
    return case.test_logits, {**collapse, "train_accuracy": 100 * fits}


def ala(case: Case, tau: float | None = 1.0):
    """Additive; its boundaries beside theory's, at the length that the features have."""
    if tau is None:
        rule = AdditiveLogitAdjustment.tuned(case.class_counts, case.tune_logits, case.tune_labels)
    else:
        rule = AdditiveLogitAdjustment(case.class_counts, tau)
    extra = {"strength": rule.tau.item()}
    if case.features is not None:
        extra["angle_error"] = angle_error(case, "ala", rule.tau.item())
    return rule(case.test_logits), extra


def mla(case: Case, gamma: float | None = 0.5):
    """Multiplicative."""
    if gamma is None:
        rule = MultiplicativeLogitAdjustment.tuned(case.class_counts, case.tune_logits, case.tune_labels)
    else:
        rule = MultiplicativeLogitAdjustment(case.class_counts, gamma)
    extra = {"strength": rule.gamma.item(), "angle_error": angle_error(case, "mla", rule.gamma.item())}
    return rule(case.test_logits), extra


def one_vs_one(case: Case, tau: float | None = 0.5, norms: bool = False):
    """The reference: every pair at its optimal boundary, with or without the class means' lengths."""
    m = class_norms(needed(case.features, "features")) if norms else None
    if tau is None:
        rule = OneVsOneAdjuster.tuned(case.class_counts, case.tune_logits, case.tune_labels, feature_norms=m)
    else:
        rule = OneVsOneAdjuster(case.class_counts, tau, m)
    return rule(case.test_logits), {"strength": rule.tau.item()}


def ala_loss(case: Case):
    """A sceptic's question: train with the additive loss instead, with the head that loss was made for."""
    return needed(case.loss_logits, "network trained with the additive loss")


def tau_norm(case: Case):
    """A sceptic's: longer weights are frequent classes', so take their length away (Kang et al., ICLR 2020). A simplex
    head's weights are of one length: there it changes nothing."""
    scores, tau = tau_normalised(needed(case.features, "features"), case.tune_labels)
    return scores, {"strength": tau}


def class_norms(f: Features) -> Tensor:
    return class_means(f.train, f.train_labels, len(f.weight)).norm(dim=1)


def angle_error(case: Case, kind: Literal["mla", "ala"], strength: float) -> float:
    """Mean distance in radians of a rule's boundaries from the optimal ones, over pairs of classes."""
    norms = class_norms(case.features) if kind == "ala" and case.features is not None else None
    n = case.class_counts
    return mean_gap(boundary_angles(n, kind, strength=strength, feature_norms=norms), boundary_angles(n))
