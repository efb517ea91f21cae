"""What a study is: arms that are compared, one trial of one arm, and the claims that the trials decide."""

import dataclasses
import inspect
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from .claims import Claim, Replicate
from .config import Config, UsageError

TUNING_SEED = 1000  # far from 0, 1, 2 …: no reported replicate shares its draws


@dataclass(frozen=True)
class Tune:
    """The same grid for every arm, on a replicate kept apart from the reported ones; each arm keeps its best.

    Args:
        field: The config field that is tuned.
        grid: Its values.
        select: The metric that picks the best.
        mode: ``"min"`` or ``"max"``.
        follow: Arms that take another arm's best instead of a grid of their own: ``{"ablation": "method"}``.
        replicate: Name of the replicate it is tuned on, one that is not reported.
    """

    field: str
    grid: tuple[Any, ...]
    select: str
    mode: str = "min"
    follow: Mapping[str, str] = dataclasses.field(default_factory=dict)
    replicate: str = str(TUNING_SEED)

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode must be 'min' or 'max', got {self.mode!r}")
        if not self.grid:
            raise ValueError("grid must hold at least one value")

    def best(self, scores: Mapping[Any, float | None]) -> Any:
        """The grid value with the best finite score; None when every one failed."""
        finite = {value: score for value, score in scores.items() if score is not None}
        if not finite:
            return None
        return (min if self.mode == "min" else max)(finite, key=lambda value: finite[value])


@dataclass(frozen=True, kw_only=True)
class Study:
    """A paper's claim as an experiment: arms × replicates, tuned alike, judged by claims fixed beforehand.

    Args:
        trial: ``(arm, shared, config, log) -> {metric: number}``: one arm on one replicate.
        arms: Name to arm, in the protocol that the study's module docstring states.
        scales: ``smoke``, ``desk`` and ``paper`` configurations, at least the first two.
        claims: What is decided, from a replicate's outcomes.
        prepare: ``(config, log) -> shared``: what the arms of a replicate share. Cached on disk.
        gates: What has to be true before the claims mean anything.
        tune: The grid every arm is tuned on.
        replicates: ``config -> names``; by default the seeds ``0 … seeds - 1``.
        figure: ``(replicates) -> Figure`` or ``{name: Figure}``, drawn once all trials are in.
        compare: The metrics that matter most, first in every table.
        paper: What the published setting takes: hub names, sizes, hours. ``--dry-run`` prints it.
    """

    trial: Callable[..., Mapping[str, float]]
    arms: Mapping[str, Any]
    scales: Mapping[str, Config]
    claims: Sequence[Claim] = ()
    prepare: Callable[..., Any] | None = None
    gates: Sequence[Claim] = ()
    tune: Tune | None = None
    replicates: Callable[[Any], Sequence[str]] | None = None
    figure: Callable[[list[Replicate]], Any] | None = None
    compare: tuple[str, ...] = ()
    paper: str = ""

    def __post_init__(self) -> None:
        missing = {"smoke", "desk"} - set(self.scales)
        if missing:
            raise ValueError(f"scales must hold 'smoke' and 'desk', missing: {', '.join(sorted(missing))}")
        if not self.arms:
            raise ValueError("arms must hold at least one arm")
        unfit = [name for name in self.arms if not _is_arm_name(name)]
        if unfit:
            raise ValueError(
                f"arms: a name has no commas, which separate the names of --only, and no blanks around it; got {unfit}"
            )
        if any(gate.holds is None for gate in self.gates):
            raise ValueError("a gate needs a bound: gates decide whether the claims mean anything")
        if self.tune:
            for scale, config in self.scales.items():
                if self.tune.field not in type(config).model_fields:
                    raise ValueError(f"tune.field {self.tune.field!r} is no field of the {scale} configuration")
            for arm in {*self.tune.follow, *self.tune.follow.values()}:
                if arm not in self.arms:
                    raise ValueError(f"tune.follow names {arm!r}, which is no arm")

    def scale(self, name: str) -> Config:
        if name not in self.scales:
            raise UsageError(f"no scale is called {name!r}; this study has {', '.join(self.scales)}")
        return self.scales[name]

    def replicate_names(self, config: Config) -> list[str]:
        names = [str(n) for n in (self.replicates(config) if self.replicates else range(config.seeds))]
        if not names or len(set(names)) != len(names):
            raise UsageError(f"a study needs distinct replicates, got {names}")
        return names


def seed_of(replicate: str) -> int:
    """The seed of a replicate: the number it is named by, else a hash of its name that never changes."""
    return int(replicate) if replicate.isdecimal() else zlib.crc32(replicate.encode())


class NotApplicable(Exception):
    """An arm cannot be asked of this case (it needs something optional that is not there); the bench skips it."""


class MissingExtra(NotApplicable, ImportError):
    """An arm needs a package that is not installed; the bench skips the arm and says how to get it."""


def require(module: str, *, extra: str) -> ModuleType:
    """Imports an optional package.

    Args:
        module: Import name.
        extra: The extra of this package that installs it.

    Raises:
        MissingExtra: the package is not there; names ``pip install 'assay[extra]'``.

    Example:
        >>> require("math", extra="optim").sqrt(4)
        2.0
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name and not module.startswith(error.name):
            raise  # the package is there; something that it imports is not
        raise MissingExtra(f"needs the package {module!r}: pip install 'assay[{extra}]'", name=module) from None


def protocol_text(study: Study) -> str:
    """What the study's module says an arm and ``prepare`` are: the paragraphs that a wrong arm or case is answered with."""
    document = inspect.getdoc(sys.modules[study.trial.__module__]) or ""
    wanted = [p for p in document.split("\n\n") if p.lstrip().startswith("An arm is") or "``prepare``" in p]
    return "\n\n".join(wanted) or f"an arm is what {study.trial.__module__}.trial takes as its first argument"


def _is_arm_name(name: str) -> bool:
    return bool(name) and "," not in name and name.strip() == name


def with_arm(study: Study, name: str, arm: Any) -> dict[str, Any]:
    """The study's arms and one of the user's own.

    Raises:
        UsageError: a name already taken, or an object that does not fit the protocol, which the message shows.
    """
    if not _is_arm_name(name):
        raise UsageError(
            f"--arm {name!r}: an arm's name has no commas, which separate the names of --only, and no blanks around it"
        )
    if name in study.arms:
        raise UsageError(f"an arm is already called {name!r}; choose another name than {', '.join(study.arms)}")
    known = next(iter(study.arms.values()))
    if callable(known) and not callable(arm):
        raise UsageError(f"--arm {name}: {arm!r} is not callable.\n\n{protocol_text(study)}")
    if callable(known):
        wanted, given = _positional(known), _positional(arm)
        if wanted and given and not given[0] <= wanted[1] <= given[1]:
            raise UsageError(
                f"--arm {name}: takes {_count(given)} positional arguments, the protocol gives {_count(wanted)}.\n\n"
                f"{protocol_text(study)}"
            )
    return {**study.arms, name: arm}


def as_case(study: Study, shared: Any) -> Any:
    """A user's case with every field that ``prepare`` promises: those it lacks take the promised type's defaults.

    Raises:
        UsageError: fields without a default are missing; the message shows the protocol.
    """
    promised: Any = inspect.get_annotations(study.prepare, eval_str=True).get("return") if study.prepare else None
    names = getattr(promised, "_fields", None) or getattr(promised, "__dataclass_fields__", None)
    if not names or (isinstance(promised, type) and isinstance(shared, promised)):
        return shared
    absent = [name for name in names if not hasattr(shared, name)]
    missing = [name for name in absent if not _has_default(promised, name)]
    if missing:
        kind = getattr(promised, "__name__", "case")
        raise UsageError(
            f"--case returned {type(shared).__name__} without {', '.join(missing)}; it must be a {kind} "
            f"or have the same fields: {', '.join(names)}.\n\n{protocol_text(study)}"
        )
    return promised(**{name: getattr(shared, name) for name in names if name not in absent}) if absent else shared


def _has_default(promised: Any, name: str) -> bool:
    if name in getattr(promised, "_field_defaults", {}):
        return True
    field = getattr(promised, "__dataclass_fields__", {}).get(name)
    return field is not None and not (field.default is field.default_factory is dataclasses.MISSING)


def _positional(function: Callable[..., Any]) -> tuple[int, int] | None:
    """Fewest and most positional arguments a callable takes; None where Python cannot tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    most = 99 if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(plain)
    return sum(p.default is p.empty for p in plain), most


def _count(bounds: tuple[int, int]) -> str:
    low, high = bounds
    return str(low) if low == high else f"{low} or more" if high == 99 else f"{low} to {high}"
