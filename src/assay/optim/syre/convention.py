"""How an optimizer applies its weight decay: into the gradient or onto the weights, and there when and at which rate."""

from typing import Any, NamedTuple

from torch.optim import Optimizer

from .groups import DECAY

ONTO_THE_WEIGHTS = ("Muon", "Adafactor")
"""Classes of `torch.optim` that decay the weights themselves although no key of their groups says so."""
OWN_RULE = {
    "pytorch_optimizer": (
        "AdaFactor", "AdamS", "Adan", "AdaSmooth", "APOLLO", "BCOS", "DAdaptAdan", "Kron", "LoRARite", "Magma", "MARS",
        "MuonClip", "NovoGrad", "RAdam", "SPlus",
    ),
    "heavyball": ("ADOPT", "HyperBallAdamW", "MSAMLaProp", "Scion"),
}  # fmt: skip
"""Classes whose decay is neither ``λ w`` in the gradient nor ``lr λ w`` off the weights, by measurement."""


class Convention(NamedTuple):
    coupled: bool
    """Into the gradient (L2: SGD, Adam), through momentum and preconditioner; else onto the weights (AdamW)."""
    last: bool
    """Onto the weights after the step's update rather than before it."""

    def rate(self, group: dict[str, Any]) -> Any:
        """Share of the distance to the anchor that a decoupled step takes; `fixed_decay` is pytorch_optimizer's."""
        return group[DECAY] if group.get("fixed_decay") else group["lr"] * group[DECAY]


def convention(optimizer: Optimizer, group: dict[str, Any], coupled: bool | None, decay_last: bool | None) -> Convention:
    """What the caller said, else what the group's keys or the optimizer's class say.

    Raises:
        ValueError: neither does, or they say that its decay follows a rule of its own.
    """
    name, package = type(optimizer).__name__, type(optimizer).__module__.partition(".")[0]
    soap = name == "SOAP"
    if coupled is None:
        coupled = _by_its_keys(group, package)
        if coupled is None and package == "torch":
            coupled = name not in ONTO_THE_WEIGHTS
        elif coupled is None and (soap or package == "heavyball"):
            coupled = False
        own = own_rule(name, package, group, coupled)
        if coupled is None or own:
            raise ValueError(
                f"cannot tell how {type(optimizer).__module__}.{name} applies weight decay{own and f': {own}'}; pass "
                "coupled=True to have it added to the gradient, as SGD and Adam do, or coupled=False to have the weights "
                "shrunk by lr times it, as AdamW does"
            )
    if decay_last is None:
        decay_last = soap and package != "heavyball"
    return Convention(coupled, decay_last and not coupled)


def _by_its_keys(group: dict[str, Any], package: str) -> bool | None:
    if "decoupled_weight_decay" in group and package != "heavyball":  # torch's Adam family, and what derives from it
        return not group["decoupled_weight_decay"]
    if "weight_decouple" in group:  # pytorch_optimizer
        return not group["weight_decouple"]
    return None


def own_rule(name: str, package: str, group: dict[str, Any], coupled: bool | None) -> str:
    """Why this decay cannot be had by either form; empty where it can."""
    if name in OWN_RULE.get(package, ()):
        return "by a rule of its own"
    if coupled:
        return ""
    if package == "pytorch_optimizer" and "d" in group:  # Prodigy, D-Adaptation
        return "at a learning rate that it adapts by itself"
    if package == "heavyball" and group.get("warmup_steps"):  # its groups hold the rate after the warm-up
        return "at a learning rate that it warms up by itself"
    if group.get("cautious_weight_decay"):
        return "only where it agrees with the update"
    if package == "heavyball" and group.get("decoupled_weight_decay") is False:
        return "inside its update"
    return ""
