from typing import Literal

import pytest
from pydantic import Field, ValidationError

from assay.bench import Config, UsageError
from assay.bench.config import parse_settings, with_overrides


class Example(Config):
    width: int = Field(32, ge=1)
    """Hidden units."""
    lr: float = 1e-3
    """Learning rate."""
    corpus: str = "stdlib"
    """A text."""
    blocks: tuple[int, ...] = (25, 100)
    """Lengths."""
    mode: Literal["fast", "exact"] = "fast"
    """How."""
    centre: bool = False
    """Whether."""
    limit: int | None = None
    """At most."""


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("width", "256", 256),
        ("lr", "1e-4", 1e-4),
        ("corpus", "notes.txt", "notes.txt"),
        ("corpus", "123", "123"),
        ("blocks", "10,20,30", (10, 20, 30)),
        ("blocks", "[10, 20]", (10, 20)),
        ("blocks", "7", (7,)),
        ("mode", "exact", "exact"),
        ("centre", "true", True),
        ("limit", "null", None),
        ("limit", "4", 4),
    ],
)
def test_text_is_read_as_the_fields_type(name, text, value):
    assert getattr(with_overrides(Example(), {name: text}), name) == value


def test_an_unknown_name_gets_the_nearest_right_one():
    with pytest.raises(UsageError, match=r"'widht' \(did you mean 'width'\?\); settings: seeds, .*width"):
        with_overrides(Example(), {"widht": "3"})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("width", "0", r"width='0'.*greater than or equal to 1.*Hidden units"),
        ("width", "many", "integer"),
        ("mode", "slow", "'fast' or 'exact'"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(name, text, message):
    with pytest.raises(UsageError, match=message):
        with_overrides(Example(), {name: text})


def test_frozen_closed_and_described():
    with pytest.raises(ValidationError):
        Example().width = 3
    with pytest.raises(ValidationError):
        Example(depth=3)
    assert Example.model_fields["width"].description.strip() == "Hidden units."


def test_settings_need_an_equals_sign_and_keep_the_rest():
    assert parse_settings(["a=b=c", " d = e"]) == {"a": "b=c", "d": " e"}
    with pytest.raises(UsageError, match="NAME=VALUE, got 'width'"):
        parse_settings(["width"])
