import base64
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from assay.bench.report import Page, collect, write_site
from assay.bench.report.charts import curve_charts

SVG = b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 900 200'><script>alert(1)</script></svg>"


class Tags(HTMLParser):
    """Every tag with its attributes, and the text that a reader sees."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def site(tmp_path, new_method, sample, hostile, hostile_text):
    methods = tmp_path / "methods"
    pages = [
        Page(new_method(methods, "digits"), sample.result, sample.figures, "records"),
        Page(
            new_method(methods, "hostile", name=hostile_text, summary=hostile_text, use_when=hostile_text),
            hostile,
            {"digits.svg": SVG, "arm-01-0-own.svg": SVG, "not.svg": b"<html><script>alert(1)</script>"},
            "records",
        ),
        Page(new_method(methods, "letters", area="zoo"), problem=f"format {hostile_text}"),
        Page(new_method(methods, "index", area="zoo")),
    ]
    return write_site(pages, tmp_path / "out").parent


def test_every_page_is_there_and_no_link_is_broken(site):
    names = {path.name for path in site.glob("*.html")}
    assert names == {
        "index.html", "digits.html", "hostile.html", "letters.html", "index-method.html", "compare-training.html",
    }  # fmt: skip
    for name in names:
        page = Tags(site / name)
        ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
        for tag, attributes in page.tags:
            link = attributes.get("href", "")
            if tag == "a" and not link.startswith("https://arxiv.org/abs/"):
                assert link.removeprefix("#") in ids if link.startswith("#") else (site / link).exists(), (name, link)


def test_pages_fetch_nothing_and_run_only_the_sites_own_script(site):
    for path in site.glob("*.html"):
        page = Tags(path)
        scripts = [attributes for tag, attributes in page.tags if tag == "script"]
        assert scripts == [{}]
        assert not {tag for tag, _ in page.tags} & {"iframe", "object", "embed", "link rel=stylesheet", "base", "form"}
        for tag, attributes in page.tags:
            assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
            if "src" in attributes or tag == "link":
                assert (attributes.get("src") or attributes["href"]).startswith("data:image/svg+xml")
        assert "@import" not in path.read_text(encoding="utf-8")


def test_texts_reach_the_reader_as_they_are(site, hostile_text, hostile_escaped):
    source = (site / "hostile.html").read_text(encoding="utf-8")
    assert "<script>alert" not in source
    text = Tags(site / "hostile.html").text
    for wanted in (f"claim {hostile_text}", f"{hostile_text}$x_0$", f"RuntimeError: {hostile_text}", "</pre></details>"):
        assert wanted in text
    assert f"note {hostile_text}" in text
    assert "\x1b" not in text
    index = (site / "index.html").read_text(encoding="utf-8")
    assert "<script>alert" not in index
    assert hostile_text in Tags(site / "index.html").text
    assert f"Format {hostile_text}" in Tags(site / "letters.html").text


def test_a_page_says_what_was_run_and_what_was_changed(site):
    text = " ".join(Tags(site / "digits.html").text.split())
    wanted = """
        Desk scale · 3 replicates (seeds 0, 1, 2)|from your runs|Use it when|you have digits|from assay.optim import Digits
        ✓ holds|? inconclusive|✗ fails|· reported|Best lies on the grid's edge|broken takes the value of sgd
        Traceback|needs the package 'a_package_nobody_has': pip install 'assay[optim]'|momentum, 0: momentum 0.9, not tuned
        assay run digits|tuned for each arm|All of it as JSON"""
    missing = [phrase for line in wanted.split("\n") for phrase in line.strip().split("|") if phrase not in text]
    assert not missing
    assert "Not the study as it stands" in Tags(site / "hostile.html").text
    assert json.loads((site / "digits.json").read_text(encoding="utf-8"))["study"] == "digits"


def test_methods_without_a_result_say_how_to_run_them(site, tmp_path):
    assert "assay run index" in Tags(site / "index-method.html").text
    assert "Not run yet" in Tags(site / "letters.html").text
    empty = write_site([], tmp_path / "empty")
    assert "There is no method" in Tags(empty).text


def test_smoke_runs_and_closed_gates_are_called_so(tmp_path, method, sample):
    gate = {**sample.result["gates"][0], "verdict": "mixed"}
    site = write_site([Page(method, {**sample.result, "scale": "smoke", "gates": [gate]})], tmp_path / "out").parent
    text = Tags(site / "digits.html").text
    assert "its numbers say nothing about the claims" in text
    assert "Gate not met." in text
    assert "assay run digits --scale smoke" in text


def test_a_closed_gate_of_some_claims_says_of_how_many(tmp_path, method, sample):
    gate = {**sample.result["gates"][0], "verdict": "fails", "decides": ["one", "other"]}
    site = write_site([Page(method, {**sample.result, "gates": [gate]})], tmp_path / "out").parent
    text = Tags(site / "digits.html").text
    assert "A gate of 2 claims not met." in text
    assert "Gate not met." not in text


def test_figures_are_images_and_what_is_no_svg_is_left_out(site):
    images = [attributes for tag, attributes in Tags(site / "hostile.html").tags if tag == "img"]
    assert all(image["alt"] for image in images)
    drawn = [base64.b64decode(image["src"].partition(",")[2]) for image in images]
    assert drawn.count(SVG) == 2
    assert not any(b"<html" in svg for svg in drawn)
    assert 'class="broad"' in (site / "hostile.html").read_text(encoding="utf-8")


def test_curves_are_whole_svgs_with_every_arm_named(hostile, sample, hostile_text):
    (chart,) = curve_charts(hostile)
    root = ElementTree.fromstring(chart.svg)
    texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {f"arm-{i:02d}" for i in range(1, 15) if i != 5} <= texts
    assert hostile_text[:19] + "…" in texts
    assert chart.log
    assert chart.text.startswith("loss up to step 95. At each arm's last step, lowest first: arm-14 0.0")
    assert b"prefers-color-scheme: dark" in chart.svg
    assert [c.metric for c in curve_charts(sample.result)] == ["loss", "grad_norm"]
    assert b"runaway" not in curve_charts(sample.result)[0].svg  # it diverged: it has no mean to draw
    assert curve_charts(hostile)[0].svg == chart.svg


def test_curves_of_replicates_that_logged_at_other_steps_meet_where_all_have_values(hostile):
    def record(steps, values):
        return {"status": "finished", "metrics": {}, "curves": {"loss": [steps, values]}}

    replicates = {"0": record([0, 10, 20], [0, 10, 20]), "1": record([5, 15, 40], [7, 17, 42])}
    hostile["arms"] = {"one": {"replicates": replicates}, "dot": {"replicates": {"0": record([3], [4])}}}
    hostile["arms"]["bad"] = {"replicates": {"0": record([0, 1], ["inf", None]), "1": record(None, None)}}
    (chart,) = curve_charts(hostile)
    assert "lowest first: dot 4, one 21." in chart.text  # at step 20: the mean of 20 and 22
    assert not curve_charts({**hostile, "arms": {}})


def test_collect_prefers_stored_then_reference_then_nothing(tmp_path, new_method, sample):
    stored = new_method(tmp_path, "digits")
    referenced = new_method(tmp_path, "letters")
    (referenced.folder / "result.json").write_text(json.dumps({**sample.result, "scale": "desk"}))
    (referenced.folder / "result-curve.svg").write_bytes(SVG)
    never, torn = new_method(tmp_path, "never"), new_method(tmp_path, "torn")
    (torn.folder / "result.json").write_text('{"format": 9}')
    found = collect(sample.records, [stored, referenced, never, torn])
    assert [page.source for page in found] == ["records", "reference", "", ""]
    assert found[0].result["date"] == sample.result["date"]
    assert list(found[0].figures) == ["digits.svg"]
    assert dict(found[1].figures) == {"result-curve.svg": SVG}
    assert "format 9" in found[3].problem
    assert [page.source for page in collect(None, [stored, referenced], "smoke")] == ["", ""]
    assert [page.source for page in collect(sample.records, [stored], "smoke")] == [""]
    assert sample.records.studies() == ["digits"]  # looking leaves no trace in the store


def test_a_store_that_fails_does_not_cost_the_site(method):
    class Torn:
        def studies(self):
            return ["digits"]

        def latest(self, study, scale):
            raise OSError("disk gone")

    (page,) = collect(Torn(), [method])
    assert page.result is None
    assert "OSError: disk gone" in page.problem


@pytest.mark.parametrize(
    "damage",
    [{"tune": {"scores": 3}}, {"overrides": 7}, {"notes": 5}, {"claims": [{"values": {}, "interval": {}}], "tune": "x"}],
)
def test_a_result_that_makes_no_sense_costs_its_own_page_only(tmp_path, new_method, sample, hostile, damage):
    pages = [Page(new_method(tmp_path, "digits"), sample.result), Page(new_method(tmp_path, "torn"), {**hostile, **damage})]
    site = write_site(pages, tmp_path / "out").parent
    text = Tags(site / "torn.html").text
    assert "result makes no sense" in text
    assert "assay run torn" in text
    assert "✓ holds" in Tags(site / "digits.html").text
    assert not (site / "compare-training.html").exists()


def test_the_policy_names_the_script_that_the_page_holds(site):
    import hashlib

    source = (site / "index.html").read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", source, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src &#39;sha256-{digest}&#39;" in source or f"script-src 'sha256-{digest}'" in source
