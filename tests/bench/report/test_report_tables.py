import copy
import io
import json
import re
import shlex

import pytest

from assay.bench import UsageError
from assay.bench.display import arms_tables
from assay.bench.report import comparison, comparison_tables, fill_readme, markdown_tables, results_markdown
from assay.bench.report.pages import Page, clean, problem_of
from assay.bench.report.tables import arms_table, finding_rows, losses, rerun_command, tuning_table
from assay.bench.result import by_case

MARKERS = "<!-- measured:begin -->", "<!-- measured:end -->"


def rows_of(markdown):
    """Cells of every table row, at bars that are not escaped."""
    return [re.split(r"(?<!\\)\|", line)[1:-1] for line in markdown.splitlines() if line.startswith("|")]


def test_the_sample_is_what_the_report_has_to_cope_with(sample):
    assert problem_of(sample.result) == ""
    assert [claim["verdict"] for claim in sample.result["claims"]] == ["holds", "inconclusive", "fails", "reported"]
    found = {(loss.arm, loss.status): loss for loss in losses(sample.result)}
    assert set(found) == {("broken", "failed"), ("runaway", "diverged"), ("absent", "skipped")}
    assert found["broken", "failed"].replicates == ("0", "1", "2")
    assert "no <b>kernel</b>" in found["broken", "failed"].trace
    assert losses(sample.result)[-1].status == "skipped"


def test_arms_table_agrees_with_the_records(sample):
    table = arms_table(sample.result)
    assert table.metrics[:2] == ("final_loss", "accuracy")
    for row in table.rows:
        records = sample.result["arms"][row.arm]["replicates"].values()
        for metric, cell in zip(table.metrics, row.cells, strict=True):
            values = [r["metrics"][metric] for r in records if metric in r["metrics"]]
            assert cell is None if not values else cell.mean == pytest.approx(sum(values) / len(values))
    assert {row.arm: row.whole for row in table.rows}["broken"] is False


def test_tuning_marks_each_arms_best_and_the_edge(sample):
    table = tuning_table(sample.result)
    assert len(table.grid) == 3
    for arm, cells in table.rows:
        scores = sample.result["tune"]["scores"][arm]
        assert [marked for _, marked in cells] == [score == min(scores) for score in scores]
        at_edge = min(scores) in (scores[0], scores[-1])
        assert (arm in table.at_edge) == at_edge
    assert ("broken", "sgd") in table.follow
    assert tuning_table({"tune": None}) is None


def test_findings_with_infinite_and_missing_values(hostile):
    worst, nothing = finding_rows(hostile["claims"])
    assert (worst.mean, worst.bound, worst.interval) == ("∞", "≤ −0.75", "")
    assert [text for _, text in worst.values] == ["1.50", "∞", "−2.00"]
    assert (nothing.mean, nothing.values) == ("–", ())


def test_markdown_tables_have_as_many_cells_in_every_row(sample, hostile):
    for result in (sample.result, hostile):
        blocks = [block for block in markdown_tables(result).split("\n\n") if block.startswith("|")]
        assert len(blocks) >= 2
        for block in blocks:
            assert len({len(row) for row in rows_of(block)}) == 1
    table = markdown_tables(sample.result)
    assert "3 replicates (seeds 0, 1, 2)" in table
    assert sample.result["date"] in table
    assert "✓ holds" in table
    assert "| `adam` |" in table


def test_markdown_lets_no_markup_through(hostile):
    text = markdown_tables(hostile)
    assert "<" not in text
    assert "`" not in re.sub(r"`[\w .-]+`", "", text)


def test_readme_keeps_all_but_what_stands_between_the_markers(tmp_path, sample, hostile):
    readme = tmp_path / "README.md"
    begin, end = MARKERS
    readme.write_text(f"# Digits\n\nprose ± π\n\n{begin}\nstale\n{end}\n\n## Limits\nmore\n", encoding="utf-8")
    (tmp_path / "result.svg").write_text("<svg/>")
    fill_readme(readme, sample.result)
    once = readme.read_text(encoding="utf-8")
    assert once.startswith(f"# Digits\n\nprose ± π\n\n{begin}\n")
    assert once.endswith(f"\n{end}\n\n## Limits\nmore\n")
    assert "stale" not in once
    assert "](result.svg)" in once
    fill_readme(readme, sample.result)
    assert readme.read_text(encoding="utf-8") == once
    fill_readme(readme, hostile)  # whose claim contains the end marker
    fill_readme(readme, sample.result)
    assert readme.read_text(encoding="utf-8") == once


@pytest.mark.parametrize("body", ["", MARKERS[0], MARKERS[1] + MARKERS[0], MARKERS[0] * 2 + MARKERS[1]])
def test_readme_without_proper_markers_is_refused_and_left_alone(tmp_path, sample, body):
    readme = tmp_path / "README.md"
    readme.write_text(body)
    with pytest.raises(UsageError, match=r"README\.md needs the line <!-- measured:begin --> once"):
        fill_readme(readme, sample.result)
    assert readme.read_text() == body
    with pytest.raises(UsageError, match="there is no page"):
        fill_readme(tmp_path / "absent.md", sample.result)


def test_results_page_lists_every_method(tmp_path, new_method, sample):
    pages = [Page(new_method(tmp_path, "digits"), sample.result), Page(new_method(tmp_path, "letters", area="zoo"))]
    text = results_markdown(pages)
    assert "1 of 2 methods have a result; of their 4 claims, 1 holds, 1 fails, 1 inconclusive, 1 reported." in text
    assert "[Digits](#results-digits)" in text
    assert "(results-digits)=" in text
    assert "| zoo | Letters | not run yet |" in text
    assert "## zoo" not in text
    assert results_markdown([]).startswith("# Results")


def test_the_command_to_run_again_survives_a_shell(hostile):
    words = shlex.split(rerun_command("digits", hostile))
    assert words[:3] == ["assay", "run", "digits"]
    assert words[words.index("--set") + 1] == f"corpus={hostile['overrides']['corpus']}"
    assert words[words.index("--case") + 1] == hostile["case"]
    assert rerun_command("digits", None) == "assay run digits"


def test_comparison_flags_what_differs(sample):
    other = copy.deepcopy(sample.result)
    other["config"] |= {"steps": 30, "extra": 1}
    for record in other["arms"]["sgd"]["replicates"].values():
        record["metrics"]["final_loss"] *= 1.5
        record["metrics"]["own"] = 1.0
    compared = comparison({"digits": sample.result, "twin": other})
    assert compared["metrics"] == ["final_loss", "accuracy", "steps"]
    assert [row["study"] for row in compared["rows"]] == ["digits"] * 6 + ["twin"] * 6
    assert compared["differences"] == [{"what": "steps", "values": {"digits": "24", "twin": "30"}}]
    assert compared["only_in"] == [{"what": "extra", "values": {"twin": "1"}}]
    assert len(compared["disagreements"]) == 1
    assert compared["disagreements"][0].startswith("sgd: final_loss is")
    assert json.loads(json.dumps(compared, allow_nan=False)) == compared


def test_comparison_of_equal_runs_flags_nothing_and_of_one_shows_all(sample):
    twins = comparison({"digits": sample.result, "twin": sample.result})
    assert (twins["differences"], twins["only_in"], twins["disagreements"]) == ([], [], [])
    assert comparison({"digits": sample.result})["metrics"] == ["final_loss", "accuracy", "steps"]


def test_comparison_prints_any_text(sample, hostile):
    from rich.console import Console

    hostile["arms"] = {"[red]bold[/red]": hostile["arms"].pop("arm-01"), **hostile["arms"]}
    compared = comparison({"digits": sample.result, "hostile": hostile})
    assert compared["metrics"] == []
    console = Console(width=200, record=True, file=io.StringIO())
    for table in comparison_tables(compared):
        console.print(table)
    printed = console.export_text()
    assert "[red]bold[/red]" in printed
    assert "these studies share no metric" in printed
    assert "not alike" in printed


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ([], "not a result"),
        ({"format": 2}, "format 2"),
        ({"format": 1, "arms": {}}, "claims"),
    ],
)
def test_what_cannot_be_shown_is_named(broken, message):
    assert message in problem_of(broken)


def test_a_result_with_torn_records_is_named(hostile):
    assert problem_of(hostile) == ""
    assert "arm's records" in problem_of({**hostile, "arms": {"a": {"replicates": {"0": {}}}}})
    assert "arm's records" in problem_of({**hostile, "arms": {"a": 3}})
    assert "claim's record" in problem_of({**hostile, "claims": [{}]})


def test_clean_drops_only_what_no_page_can_hold():
    assert clean({"a\x00": ["é\n\tб\ud800\x1b", 1.5, None]}) == {"a": ["é\n\tб", 1.5, None]}


@pytest.fixture
def two_problems(sample):
    """The sample as if its replicates were of two problems, one of which ``sgd`` does not work on."""
    result = copy.deepcopy(sample.result)
    names = {"0": "reviews/0", "1": "reviews/1", "2": "tree/0"}
    result["replicates"] = [names[name] for name in result["replicates"]]
    for body in result["arms"].values():
        body["replicates"] = {names[name]: record for name, record in body["replicates"].items()}
    result["arms"]["sgd"]["replicates"]["tree/0"]["metrics"] = {}
    result["arms"]["adam"]["replicates"]["tree/0"]["metrics"] = {"depth": 3.0, "accuracy": 0.5}
    return result


def test_problems_are_never_averaged(sample, two_problems):
    cases = by_case(two_problems)
    assert list(cases) == ["reviews", "tree"]
    tables = {case: arms_table(part) for case, part in cases.items()}
    assert (tables["reviews"].replicates, tables["tree"].replicates) == (2, 1)
    arms = {case: {row.arm: row for row in table.rows} for case, table in tables.items()}
    assert "sgd" in arms["reviews"]
    assert "sgd" not in arms["tree"]
    assert arms["tree"]["broken"].trials == "1 failed"  # lost, and not for want of a metric
    assert "depth" not in tables["reviews"].metrics
    assert tables["tree"].metrics.index("accuracy") < tables["tree"].metrics.index("depth")  # the study names it
    accuracy = arms["tree"]["adam"].cells[tables["tree"].metrics.index("accuracy")]
    assert (accuracy.mean, accuracy.n) == (0.5, 1)
    assert by_case(sample.result) == {"": sample.result}


def test_a_replicate_without_a_slash_is_one_of_others(two_problems):
    two_problems["replicates"][-1] = "bandits"
    assert list(by_case(two_problems)) == ["reviews", "bandits"]
    two_problems["replicates"] = ["reviews/0", "smap", "msl"]
    assert list(by_case(two_problems)) == ["reviews", "others"]
    two_problems["replicates"] = ["reviews/0", "reviews/1"]
    assert by_case(two_problems) == {"reviews": two_problems}


def test_every_table_of_several_problems_says_which(two_problems):
    from rich.console import Console

    assert [table.title.split(" · ")[1:2] for table in arms_tables(two_problems)] == [["reviews"], ["tree"]]
    page = markdown_tables(two_problems)
    assert page.index("Arms, `reviews`:") < page.index("Arms, `tree`:")
    compared = comparison({"digits": two_problems, "twin": two_problems})
    assert [(row["study"], row["case"]) for row in compared["rows"] if row["arm"] == "adam"] == [
        ("digits", "reviews"), ("digits", "tree"), ("twin", "reviews"), ("twin", "tree"),
    ]  # fmt: skip
    assert compared["disagreements"] == []
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(*comparison_tables(compared))
    assert "twin · tree" in console.export_text()


def test_a_page_shows_the_first_of_very_many_metrics(sample):
    result = copy.deepcopy(sample.result)
    for record in result["arms"]["adam"]["replicates"].values():
        record["metrics"] |= {f"extra{i}": float(i) for i in range(20)}
    page = markdown_tables(result)
    assert "`extra8`" in page
    assert "`extra9`" not in page
    assert "11 more metrics are in `assay report`." in page
