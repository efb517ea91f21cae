import subprocess
import sys
from functools import partial

import pytest
import torch

from assay.bench.fingerprint import arm_fingerprint, digest, source_of
from assay.bench.loading import load_object

SOURCE = '''
"""A study."""
from assay.bench import Claim, Config, Study, at_most
LIMIT = 3
class C(Config):
    n: int = 1
    """How many."""
def arm(x):
    return x
def trial(arm, shared, config, log):
    """One trial."""
    return {"x": float(LIMIT)}
def ratio(r):
    return r["a"].x
def picture(replicates):
    return None
claims = [Claim("c", ratio, holds=at_most(1))]
study = Study(trial=trial, arms={"a": arm}, scales={"smoke": C(), "desk": C()}, claims=claims, figure=picture)
'''


def source_hash(tmp_path, text):
    folder = tmp_path / digest(text)
    folder.mkdir(exist_ok=True)
    (folder / "study.py").write_text(text)
    load_object(f"{folder / 'study.py'}:study", "--case")
    return source_of(sys.modules["assay_user_study"])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""One trial."""', '"""One run."""'),
        ("LIMIT = 3", "LIMIT = 3  # three"),
        ("at_most(1)", "at_most(2)"),
        ('return r["a"].x', 'return 2 * r["a"].x'),
        ("return None", "return 1"),
        ("n: int = 1", "n: int = 2"),  # a config's values are in the key themselves
        ('{"x": float(LIMIT)}', "{'x':   float(LIMIT)}"),
    ],
)
def test_wording_claims_and_pictures_run_nothing_again(tmp_path, old, new):
    assert old in SOURCE
    assert source_hash(tmp_path, SOURCE) == source_hash(tmp_path, SOURCE.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [("LIMIT = 3", "LIMIT = 4"), ("    return x", "    return 2 * x"), ("float(LIMIT)", "float(LIMIT + 1)")],
)
def test_code_that_decides_a_number_does(tmp_path, old, new):
    assert source_hash(tmp_path, SOURCE) != source_hash(tmp_path, SOURCE.replace(old, new))


def test_a_methods_whole_folder_counts(tmp_path):
    before = source_hash(tmp_path, SOURCE)
    folder = tmp_path / digest(SOURCE)
    (folder / "about.toml").write_text("")
    (folder / "method.py").write_text("x = 1\n")
    first = source_of(sys.modules["assay_user_study"])
    (folder / "method.py").write_text("x = 20\n")
    assert len({before, first, source_of(sys.modules["assay_user_study"])}) == 3


def scaled(x, factor=1):
    return factor * x


class Arm:
    def __init__(self, rate):
        self.rate = rate

    def __call__(self, x):
        return x


def test_arms_differ_by_what_is_bound_to_them():
    def closing_over(n):
        return lambda x: n * x

    arms = [scaled, partial(scaled, factor=2), partial(scaled, factor=3), Arm(1), Arm(2), Arm, closing_over(1), closing_over(2)]
    arms += [torch.ones(2), torch.zeros(2), partial(scaled, factor=torch.ones(3)), partial(scaled, factor=torch.zeros(3))]
    arms += [lambda x: x + 1, lambda x: x + 2, 0.5, ("a", 1), {"k": 2}]
    assert len({digest(arm_fingerprint(arm)) for arm in arms}) == len(arms)
    assert digest(arm_fingerprint(Arm(1))) == digest(arm_fingerprint(Arm(1)))


def test_keys_are_the_same_in_every_process():
    program = (
        "from assay.bench.fingerprint import arm_fingerprint, digest;"
        "print(digest(arm_fingerprint(lambda x: x in {'a', 'b', 'c', 'd', 'e'})))"
    )
    keys = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(keys) == 1
