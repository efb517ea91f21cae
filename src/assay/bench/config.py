"""What a study can be told: a frozen, checked configuration, and the ``--set`` that changes it."""

import contextlib
import difflib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class Config(BaseModel):
    """Base of every study's configuration: a subclass adds its fields, each with a docstring.

    Frozen, and closed to names it does not know. The fields below are common to all studies.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    seeds: int = Field(3, ge=1)
    """Replicates, where the study names none of its own."""
    num_cpus: float = Field(1, gt=0)
    """Processor cores a trial uses: torch's threads, and what Ray sets aside."""
    num_gpus: float = Field(0, ge=0)
    """GPUs that Ray sets aside for a trial; a fraction shares one."""


class UsageError(ValueError):
    """Something the caller asked for is not possible; the message says what is. The command exits with 2."""


def with_overrides(config: Config, overrides: Mapping[str, Any]) -> Config:
    """A copy of ``config`` with fields replaced and everything checked again.

    Args:
        config: The configuration of a scale.
        overrides: Field name to value. A string is read as the field's type: ``"256"``, ``"1e-3"``, ``"[1, 2]"``, ``"1,2"``.

    Raises:
        UsageError: an unknown field (with the nearest right name) or a value the field does not allow.

    Example:
        >>> with_overrides(Config(), {"seeds": "5"}).seeds
        5
    """
    known = type(config).model_fields
    for name in overrides:
        if name not in known:
            raise UsageError(f"no setting is called {name!r}{nearest(name, known)}; settings: {', '.join(known)}")
    values = config.model_dump()
    for name, value in overrides.items():
        values[name] = _first_valid(type(config), {**values}, name, value)
    return type(config)(**values)


def parse_settings(settings: list[str]) -> dict[str, str]:
    """``["width=256", "corpus=notes.txt"]`` as a dictionary.

    Raises:
        UsageError: an item without ``=``.
    """
    parsed = {}
    for item in settings:
        name, equals, value = item.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"--set takes NAME=VALUE, got {item!r}")
        parsed[name.strip()] = value
    return parsed


def nearest(name: str, known: Any) -> str:
    """``" (did you mean 'width'?)"``, or nothing when no name is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _first_valid(kind: type[Config], values: dict[str, Any], name: str, value: Any) -> Any:
    """The first reading of ``value`` that the field accepts: as it came, as JSON, as a comma-separated list."""
    readings = [value]
    if isinstance(value, str):
        with contextlib.suppress(json.JSONDecodeError):
            readings.append(json.loads(value))
        readings.append([part.strip() for part in value.split(",")])
    problem: ValidationError | None = None
    for reading in readings:
        try:
            return getattr(kind(**{**values, name: reading}), name)
        except ValidationError as error:
            problem = problem or error
    assert problem is not None
    first = problem.errors()[0]
    described = kind.model_fields[name].description
    hint = f" ({described.strip()})" if described else ""
    raise UsageError(f"{name}={value!r}: {first['msg'].lower()}{hint}") from None
