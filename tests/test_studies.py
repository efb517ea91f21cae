"""Every study there is, at smoke scale: it runs, its claims can be evaluated, its paper scale is written out."""

import html
import json
import os
import time

import pytest

from assay import catalog
from assay.bench.display import Quiet
from assay.bench.loading import load_study
from assay.bench.result import failed
from assay.bench.runner import Job, run

OWN = [method for method in catalog.methods().values() if method.module.startswith("assay.")]


@pytest.mark.slow
@pytest.mark.parametrize("method", OWN, ids=lambda method: method.slug)
def test_smoke(method, records):
    study = load_study(method)
    started = time.perf_counter()
    result = run(Job(method.slug, study, "smoke", study.scale("smoke"), records, Quiet()))
    seconds = time.perf_counter() - started
    assert not failed(result), failed(result)[0][2].get("trace")
    if os.environ.get("CI"):
        records_of = {arm: body["replicates"].values() for arm, body in result["arms"].items()}
        skipped = {a: [r["error"] for r in of if r["status"] == "skipped"] for a, of in records_of.items()}
        assert {a: why for a, why in skipped.items() if any("pip install" in reason for reason in why)} == {}
        # an arm may be none of some cases, but not of all
        assert [a for a, why in skipped.items() if len(why) == len(records_of[a])] == []
    # ten seconds on two free cores; tests share them
    assert seconds < 25, f"smoke took {seconds:.0f} s"


@pytest.mark.parametrize("method", OWN, ids=lambda method: method.slug)
def test_paper_scale_is_written_out(method):
    study = load_study(method)
    assert study.paper.strip()
    assert study.scale("paper") != study.scale("desk")


@pytest.mark.parametrize("method", OWN, ids=lambda method: method.slug)
def test_the_reference_is_a_whole_desk_run_of_this_study(method):
    study = load_study(method)
    reference = method.reference
    if reference is None:
        pytest.skip(f"{method.slug} has no reference run yet: assay run {method.slug} --save-reference")
    assert reference["scale"] == "desk"
    assert not failed(reference)
    idle = [c for c in study.claims if c.text in reference.get("not_applicable", [])]  # of arms that the desk leaves out
    assert [c.text for c in idle if c.holds] == []
    told = [c for c in study.claims if c not in idle]
    assert [c["text"] for c in reference["claims"]] == [c.text for c in told]
    assert [c["bound"] for c in reference["claims"]] == [str(c.holds) if c.holds else "" for c in told]
    assert list(reference["arms"]) == list(study.arms)
    assert reference["config"] == json.loads(study.scale("desk").model_dump_json())
    page = html.unescape((method.folder / "README.md").read_text(encoding="utf-8").replace("\\", ""))  # Markdown's escapes
    assert [c["text"] for c in reference["claims"] if c["text"] not in page] == []
