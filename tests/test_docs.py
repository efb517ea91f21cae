"""The README and the guides, followed to the letter by a reader with two small files of data."""

import csv
import math
import shutil
from pathlib import Path

import pytest

from walkthrough import follow

ROOT = Path(__file__).parents[1]
GUIDES = ROOT / "docs" / "guides"


@pytest.fixture
def desk(tmp_path, empty_store) -> Path:
    """A folder with a text, a series with an odd stretch, and an empty store of records (laying one takes seconds)."""
    shutil.copytree(empty_store, tmp_path / "assay-runs")
    (tmp_path / "notes.txt").write_text((ROOT / "LICENSE").read_text(encoding="utf-8"), encoding="utf-8")
    with (tmp_path / "sensors.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["value", "label"])
        for t in range(1200):
            odd = 700 <= t < 730
            rows.writerow([round(math.sin(t / 7) + 0.1 * math.sin(t * t) + odd * math.cos(2 * t), 5), int(odd)])
    return tmp_path


def said(ran, command):
    """What the commands that begin so have printed."""
    return [" ".join(r.output.split()) for r in ran if r.command.startswith(command)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_readmes_tour(desk):
    own_work = (GUIDES / "own-work.md").read_text(encoding="utf-8")
    for name in ("lion.py", "mywork.py"):  # the README says that they are in the guide
        block = own_work.partition(f"```python\n# {name}\n")[2].partition("```")[0]
        (desk / name).write_text(block, encoding="utf-8")
    ran = follow(ROOT / "README.md", desk)
    assert "Shampoo" in said(ran, "assay list")[0]
    assert "lion" in said(ran, "assay run soap --scale smoke --arm")[0]
    assert (desk / "assay-report" / "index.html").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_getting_started(desk):
    ran = follow(GUIDES / "getting-started.md", desk)
    assert "nothing is run" in said(ran, "assay run soap --scale paper")[0]
    assert (desk / "site" / "index.html").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_your_own_work(desk):
    ran = follow(GUIDES / "own-work.md", desk)
    assert all("finished" in output for output in said(ran, "assay run"))
    assert "│ lion" in said(ran, "assay run soap --scale smoke --arm")[0]
    assert "skipped" in said(ran, "assay run logit_adjustment")[0]
    pages = "".join(path.read_text(encoding="utf-8") for path in (desk / "site").rglob("*.html"))
    assert "mylogits.py:case" in pages


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.xdist_group("ray")
def test_on_a_cluster(desk):
    (output,) = said(follow(GUIDES / "cluster.md", desk), "assay run")
    assert "finished" in output
