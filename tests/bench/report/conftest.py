"""A small study on real digits that really runs: arms that finish, one that raises, one that diverges, one that is skipped."""

import copy
import html
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from assay.bench import Claim, Config, Study, Tune, at_least, at_most, require, steps_to
from assay.bench.display import Quiet
from assay.bench.records import Records
from assay.bench.runner import Job, run
from assay.catalog import Method


class DigitsConfig(Config):
    steps: int = 24
    """Full-batch steps."""
    lr: float = 0.1
    """Step size."""


class Digits(NamedTuple):
    net: nn.Module
    images: Tensor
    labels: Tensor


def prepare(config, log) -> Digits:
    images, labels = load_digits(return_X_y=True)
    return Digits(nn.Linear(64, 10), torch.tensor(images / 16, dtype=torch.float32), torch.as_tensor(labels))


def trial(arm, shared, config, log):
    net = copy.deepcopy(shared.net)
    optimizer = arm(net.parameters(), config.lr)
    for step in log.track(range(config.steps), "train"):
        loss = nn.functional.cross_entropy(net(shared.images), shared.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.metric("loss", loss.item(), step)
        log.metric("grad_norm", sum(p.grad.norm().item() for p in net.parameters()), step)
    if log.arm == "momentum":
        log.note("momentum 0.9, not tuned")
    accuracy = (net(shared.images).argmax(-1) == shared.labels).float().mean().item()
    return {"final_loss": loss.item(), "accuracy": accuracy, "steps": config.steps}


def sgd(parameters, lr):
    return torch.optim.SGD(parameters, lr)


def momentum(parameters, lr):
    return torch.optim.SGD(parameters, lr, momentum=0.9)


def adam(parameters, lr):
    return torch.optim.Adam(parameters, lr)


def broken(parameters, lr):
    raise RuntimeError("no <b>kernel</b> & no image")


def runaway(parameters, lr):
    return torch.optim.SGD(parameters, lr=float("inf"))


def absent(parameters, lr):
    return require("a_package_nobody_has", extra="optim").Lion(parameters, lr)


def curve_figure(replicates):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4, 3))
    axes = figure.add_subplot()
    for replicate in replicates:
        axes.plot(*replicate["adam"].curve("loss"), label=replicate.name)
    axes.legend(title="seed")
    return figure


STUDY = Study(
    prepare=prepare,
    trial=trial,
    arms={"sgd": sgd, "momentum": momentum, "adam": adam, "broken": broken, "runaway": runaway, "absent": absent},
    tune=Tune("lr", (0.03, 0.1, 0.3), select="final_loss", follow={"broken": "sgd", "runaway": "sgd", "absent": "sgd"}),
    scales={"smoke": DigitsConfig(steps=4, seeds=2), "desk": DigitsConfig()},
    gates=[Claim("plain descent learns at all", lambda r: r["sgd"].accuracy, at_least(0.4))],
    claims=[
        Claim(
            "Adam needs at most half of descent's steps to its final loss",
            lambda r: steps_to(r["adam"], r["sgd"].final_loss, "loss") / r["sgd"].steps,
            at_most(0.5),
            published="40 %",
        ),
        Claim("the broken arm is the best", lambda r: r["broken"].accuracy, at_least(0.9)),
        Claim("descent is never caught", lambda r: steps_to(r["sgd"], -1.0, "loss"), at_most(100)),
        Claim("Adam's accuracy over momentum's", lambda r: r["adam"].accuracy - r["momentum"].accuracy),
    ],
    figure=curve_figure,
    compare=("final_loss", "accuracy"),
)

HOSTILE = "<script>alert(1)</script>\"'&"


def make_method(folder: Path, slug: str = "digits", **changes) -> Method:
    known = {
        "area": "optim",
        "module": f"assay.optim.{slug}",
        "name": slug.capitalize(),
        "summary": "Fewer steps on handwritten digits",
        "paper": "A paper, ICLR 2025",
        "arxiv": "2501.00001",
        "problem": "training",
        "use_when": "you have digits",
        "avoid_when": "you have letters",
        "cost": "two moments a parameter",
    }
    (folder / slug).mkdir(parents=True, exist_ok=True)
    (folder / slug / "__init__.py").write_text('__all__ = ["Digits"]\n')
    return Method(slug=slug, folder=folder / slug, **{**known, **changes})


def hostile_result() -> dict:
    """A result in which every text wants to be markup, numbers are infinite or absent, and fifteen arms take part."""
    arms = {}
    for i in range(15):
        name = f"{HOSTILE}$x_{i}$" if i == 0 else f"arm-{i:02d}"
        steps = [float(s) for s in range(0, 100, 5)]
        replicates = {
            str(seed): {
                "status": "finished",
                "metrics": {"loss": 10.0 / (i + 1 + seed), f"odd {HOSTILE}": -1e-7 * i},
                "curves": {"loss": [steps, [10 / (s + 1 + i + seed) for s in steps]]},
                "seconds": 1.25,
                "peak_mb": 100 + i,
            }
            for seed in (0, 1, 2)
        }
        arms[name] = {"replicates": replicates}
    arms["arm-03"]["replicates"]["1"] |= {
        "status": "failed",
        "metrics": {},
        "error": f"RuntimeError: {HOSTILE}",
        "trace": f'File "<stdin>", line 1\n  </pre></details>{HOSTILE}\x1b[31m\ud800',
    }
    arms["arm-04"]["replicates"]["2"]["metrics"]["loss"] = "inf"
    arms["arm-05"] = {"replicates": {}}
    finding = {
        "text": f"claim {HOSTILE} <!-- measured:end -->",
        "verdict": "fails",
        "values": {"0": 1.5, "1": "inf", "2": -2.0},
        "mean": "inf",
        "interval": None,
        "bound": "≤ -0.75",
        "published": f"a | b {HOSTILE}",
        "reason": f"because {HOSTILE}",
    }
    return {
        "format": 1,
        "study": "digits",
        "scale": "desk",
        "config": {"corpus": HOSTILE, "steps": 100, "seeds": 3, "names": ["a", "b"]},
        "overrides": {"corpus": HOSTILE},
        "case": f"{HOSTILE}.py:case",
        "extra_arms": {},
        "replicates": ["0", "1", "2"],
        "compare": ["loss"],
        "arms": arms,
        "tune": None,
        "gates": [],
        "claims": [finding, {**finding, "text": "nothing measured", "verdict": "inconclusive", "values": {}, "mean": None}],
        "notes": [f"note {HOSTILE}"],
        "figures": [],
        "machine": {"processor": HOSTILE, "cores": 2, "memory_gb": 8, "gpu": "", "torch": "2.13.0"},
        "device": "cpu",
        "date": "2025-11-30",
        "seconds": 60.0,
        "work_seconds": 56.2,
        "peak_mb": 120,
    }


@pytest.fixture(scope="session")
def sample(tmp_path_factory):
    """The study above, run for real: its result, its figures, and the records that hold it."""
    records = Records(tmp_path_factory.mktemp("records"), uri="")
    job = Job("digits", STUDY, "desk", STUDY.scale("desk"), records, Quiet())
    result = run(job)
    stored = records.latest("digits")
    assert stored is not None
    return SimpleNamespace(result=result, figures=stored[1], records=records)


@pytest.fixture
def hostile():
    return hostile_result()


@pytest.fixture(scope="session")
def new_hostile():
    return hostile_result


@pytest.fixture
def method(tmp_path):
    return make_method(tmp_path / "methods")


@pytest.fixture(scope="session")
def new_method():
    return make_method


@pytest.fixture(scope="session")
def hostile_text():
    return HOSTILE


@pytest.fixture(scope="session")
def hostile_escaped():
    return html.escape(HOSTILE)
