"""What a study claims, and when a claim holds."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Bound:
    """A closed or open interval that a number has to lie in."""

    low: float = -math.inf
    high: float = math.inf
    strict: bool = False

    def __contains__(self, value: float) -> bool:
        return self.low < value < self.high if self.strict else self.low <= value <= self.high

    def __str__(self) -> str:
        if math.isinf(self.low):
            return f"{'<' if self.strict else '≤'} {self.high:g}"
        if math.isinf(self.high):
            return f"{'>' if self.strict else '≥'} {self.low:g}"
        return f"{self.low:g} to {self.high:g}"


def at_most(value: float) -> Bound:
    """Holds for ``x ≤ value``."""
    return Bound(high=value)


def at_least(value: float) -> Bound:
    """Holds for ``x ≥ value``."""
    return Bound(low=value)


def below(value: float) -> Bound:
    """Holds for ``x < value``."""
    return Bound(high=value, strict=True)


def above(value: float) -> Bound:
    """Holds for ``x > value``."""
    return Bound(low=value, strict=True)


def between(low: float, high: float) -> Bound:
    """Holds for ``low ≤ x ≤ high``."""
    if not low <= high:
        raise ValueError(f"low must not exceed high, got {low} and {high}")
    return Bound(low, high)


_NOWHERE = "applies to none of the replicates"


class Verdict(StrEnum):
    """What a study found about a claim."""

    HOLDS = "holds"
    """Every replicate is within the bound."""
    MIXED = "mixed"
    """Some replicates are, some are not."""
    FAILS = "fails"
    """No replicate is."""
    INCONCLUSIVE = "inconclusive"
    """A gate was not met, or a replicate could not be measured."""
    REPORTED = "reported"
    """The claim has no bound: its value is given, nothing is decided."""


@dataclass(frozen=True)
class Outcome:
    """What one arm did on one replicate. Metrics are attributes: ``r["soap"].final_loss``."""

    metrics: Mapping[str, float]
    curves: Mapping[str, tuple[list[float], list[float]]] = field(default_factory=dict)
    seconds: float = math.nan

    def __getattr__(self, name: str) -> float:
        if name.startswith("__") or name not in self.metrics:
            raise AttributeError(f"no metric is called {name!r}; metrics: {', '.join(self.metrics)}")
        return self.metrics[name]

    def curve(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values that the trial logged under ``name``."""
        if name not in self.curves:
            raise KeyError(f"no curve is called {name!r}; curves: {', '.join(self.curves)}")
        steps, values = self.curves[name]
        return np.asarray(steps), np.asarray(values)


class NotMeasured(LookupError):
    """An arm has no outcome on a replicate: it failed or was skipped."""


@dataclass(frozen=True)
class Replicate:
    """All arms' outcomes on one replicate."""

    name: str
    seed: int
    config: Any
    outcomes: Mapping[str, Outcome]

    def __getitem__(self, arm: str) -> Outcome:
        if arm not in self.outcomes:
            raise NotMeasured(f"arm {arm!r} was not measured")
        return self.outcomes[arm]

    def __contains__(self, arm: str) -> bool:
        return arm in self.outcomes


@dataclass(frozen=True)
class Claim:
    """One sentence of a paper as a number for each replicate and a bound that decides it.

    Args:
        text: The sentence.
        statistic: From a replicate to a number. ``None`` where the claim does not apply to that replicate; NaN counts as
            not measured; infinity is a number like any other.
        holds: The bound; without one the claim is reported and not judged.
        published: What the paper states, as text.
        gates: What has to be true before this claim means anything, beside the gates of its study: claims with a bound.
    """

    text: str
    statistic: Callable[[Replicate], float | bool | None]
    holds: Bound | None = None
    published: str = ""
    gates: tuple["Claim", ...] = ()

    def __post_init__(self) -> None:
        if any(gate.holds is None for gate in self.gates):
            raise ValueError(f"a gate needs a bound: gates decide whether the claim {self.text!r} means anything")


@dataclass(frozen=True)
class Finding:
    """A claim after the runs: a value for each replicate, the verdict, and its reason where that is not plain."""

    text: str
    verdict: Verdict
    values: Mapping[str, float]
    bound: str = ""
    published: str = ""
    reason: str = ""

    @property
    def applies(self) -> bool:
        """Whether any replicate is one that the claim speaks about."""
        return self.reason != _NOWHERE

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.values.values()))) if self.values else math.nan

    @property
    def interval(self) -> tuple[float, float] | None:
        return confidence_interval(list(self.values.values()))


def judge(claim: Claim, replicates: Iterable[Replicate], *, closed_gate: str = "") -> Finding:
    """Evaluates a claim on every replicate.

    Args:
        claim: The claim.
        replicates: The replicates with the outcomes of the arms that finished.
        closed_gate: Why no claim of this study can be decided, if so.

    Returns:
        The finding. *Holds* when every replicate is within the bound, *fails* when none is, *mixed* otherwise;
        *inconclusive* when a gate is closed, a replicate is missing or none applies.
    """
    replicates = list(replicates)
    closed_gate = closed_gate or closed_gates(judge(gate, replicates) for gate in claim.gates)
    values: dict[str, float] = {}
    missing: list[str] = []
    for replicate in replicates:
        try:
            value = claim.statistic(replicate)
        except NotMeasured as gap:
            missing.append(f"{replicate.name}: {gap}")
            continue
        except Exception as error:  # a statistic is a study's own code: its error is this claim's, not the run's
            missing.append(f"{replicate.name}: {type(error).__name__}: {error}")
            continue
        if value is None:
            continue
        if math.isnan(value):
            missing.append(f"{replicate.name}: the statistic is not a number")
        else:
            values[replicate.name] = float(value)

    if missing:
        reason = f"{len(missing)} of {len(missing) + len(values)} replicates not measured ({missing[0]})"
    elif not values:
        reason = _NOWHERE
    else:
        reason = closed_gate
    if claim.holds is None:
        verdict = Verdict.REPORTED if values else Verdict.INCONCLUSIVE
    elif reason:
        verdict = Verdict.INCONCLUSIVE
    else:
        within = sum(value in claim.holds for value in values.values())
        verdict = Verdict.HOLDS if within == len(values) else Verdict.FAILS if within == 0 else Verdict.MIXED
    bound = str(claim.holds) if claim.holds else ""
    return Finding(claim.text, verdict, values, bound, claim.published, reason)


def closed_gates(gates: Iterable[Finding]) -> str:
    """The first gate that was not met on every replicate it applies to, in words; empty when all are open."""
    for gate in gates:
        if gate.verdict is not Verdict.HOLDS and gate.applies:
            seen = [", ".join(f"{value:.3g}" for value in gate.values.values()), gate.reason]
            return f"gate not met: {gate.text} (needs {gate.bound}, was {'; '.join(part for part in seen if part)})"
    return ""


def confidence_interval(values: list[float], level: float = 0.95) -> tuple[float, float] | None:
    """Student's interval for the mean; None for fewer than two values or any that is not finite."""
    if len(values) < 2 or not np.isfinite(values).all():
        return None
    from scipy.stats import t

    half = float(t.ppf((1 + level) / 2, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))
    mean = float(np.mean(values))
    return mean - half, mean + half


def steps_to(outcome: Outcome, target: float, curve: str = "val_loss") -> float:
    """The step at which a falling curve first reaches ``target``, linearly interpolated; infinity if it never does.

    Example:
        >>> steps_to(Outcome({}, {"val_loss": ([0, 10, 20], [3.0, 2.0, 1.0])}), 1.5)
        15.0
    """
    steps, values = outcome.curve(curve)
    reached = np.flatnonzero(values <= target)
    if len(reached) == 0:
        return math.inf
    i = int(reached[0])
    if i == 0 or values[i] == target:
        return float(steps[i])
    share = (values[i - 1] - target) / (values[i - 1] - values[i])
    return float(steps[i - 1] + share * (steps[i] - steps[i - 1]))
