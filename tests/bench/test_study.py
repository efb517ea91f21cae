from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from assay.bench import Claim, Config, MissingExtra, Study, Tune, UsageError, require
from assay.bench.loading import load_object
from assay.bench.study import as_case, protocol_text, seed_of, with_arm

TOY = str(Path(__file__).parent / "toy.py")


@pytest.fixture
def study():
    return load_object(f"{TOY}:study", "--case")


def plain_trial(arm, shared, config, log):
    return {"x": 1.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scales": {"smoke": Config()}}, "missing: desk"),
        ({"arms": {}}, "at least one arm"),
        ({"gates": [Claim("g", lambda r: 1.0)]}, "gate needs a bound"),
        ({"tune": Tune("lr", (1, 2), select="x")}, "'lr' is no field"),
        ({"tune": Tune("seeds", (1, 2), select="x", follow={"b": "a"})}, "'b', which is no arm"),
    ],
)
def test_a_study_that_makes_no_sense_is_refused(changes, message):
    good = {"trial": plain_trial, "arms": {"a": len}, "scales": {"smoke": Config(), "desk": Config()}}
    Study(**good)
    with pytest.raises(ValueError, match=message):
        Study(**{**good, **changes})


@pytest.mark.parametrize(("arguments", "message"), [({"mode": "least"}, "mode"), ({"grid": ()}, "grid")])
def test_tune_checks_itself(arguments, message):
    with pytest.raises(ValueError, match=message):
        Tune(**{"field": "lr", "grid": (1,), "select": "loss", **arguments})


def test_best_ignores_what_failed():
    tune = Tune("lr", (1, 2, 3), select="loss")
    assert tune.best({1: None, 2: 5.0, 3: 4.0}) == 3
    assert replace(tune, mode="max").best({1: None, 2: 5.0, 3: 4.0}) == 2
    assert tune.best({1: None, 2: None, 3: None}) is None


def test_an_arm_of_the_users_own(study):
    assert list(with_arm(study, "mine", lambda x: x)) == ["one", "half", "tenth", "mine"]
    for name in ("", " blank", "adam,lr"):
        with pytest.raises(UsageError, match="has no commas"):
            with_arm(study, name, lambda x: x)
    with pytest.raises(UsageError, match="already called 'one'"):
        with_arm(study, "one", lambda x: x)
    with pytest.raises(UsageError, match=r"3 is not callable(?s:.*)An arm is a callable ``\(x\) -> x``"):
        with_arm(study, "mine", 3)
    with pytest.raises(UsageError, match=r"takes 2 positional arguments, the protocol gives 1(?s:.*)An arm is"):
        with_arm(study, "mine", lambda x, y: x)


def test_a_case_without_its_fields_is_shown_the_protocol(study):
    class Enough:
        x = None

    enough = Enough()
    assert as_case(study, enough) is enough
    with pytest.raises(UsageError, match=r"returned dict without x; it must be a Case(?s:.*)``prepare`` returns"):
        as_case(study, {"x": 1})


def test_fields_with_a_default_may_be_left_out(study):
    class Wide(NamedTuple):
        x: int
        extra: int = 7

    def prepare(config, log) -> Wide: ...

    class Given:
        x = 1

    assert as_case(replace(study, prepare=prepare), Given()) == Wide(1, 7)


def test_the_protocol_is_the_modules_own_words(study):
    assert protocol_text(study).startswith("An arm is a callable")


def test_a_missing_package_names_the_extra():
    with pytest.raises(MissingExtra, match=r"pip install 'assay\[optim\]'"):
        require("no_such_package_here", extra="optim")


def test_an_error_inside_a_present_package_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "broken_inside.py").write_text("import no_such_package_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError) as caught:
        require("broken_inside", extra="optim")
    assert not isinstance(caught.value, MissingExtra)


def test_seeds_of_replicates():
    assert seed_of("7") == 7
    assert seed_of("nab/realTraffic") == seed_of("nab/realTraffic") != seed_of("nab/realAdExchange")


@pytest.mark.parametrize("names", [[], ["a", "a"]])
def test_replicates_are_distinct_and_there_are_some(study, names):
    with pytest.raises(UsageError, match="distinct replicates"):
        replace(study, replicates=lambda config: names).replicate_names(study.scale("smoke"))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing", "module:attribute"),
        ("no_file.py:x", "no file no_file.py"),
        ("no_module_here:x", "importing 'no_module_here' failed"),
        (f"{TOY}:stduy", r"no 'stduy' \(did you mean 'study'\?\)"),
    ],
)
def test_paths_that_lead_nowhere(path, message):
    with pytest.raises(UsageError, match=message):
        load_object(path, "--arm")


def test_a_file_that_raises_is_named(tmp_path):
    (tmp_path / "bad.py").write_text("1 / 0\n")
    with pytest.raises(UsageError, match=r"running .*bad\.py failed: ZeroDivisionError"):
        load_object(f"{tmp_path / 'bad.py'}:x", "--case")
