"""The short table of a job: a headline, 80 columns, at most four notes."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from optigpu.documents.result import Attribution, Rough
from optigpu.report.charts.marks import Report
from optigpu.report.formats import terminal
from optigpu.report.ladder import DISTURBED, MOST_NOTES, WIDTH, brief_grid, headline
from optigpu.report.rows import rows_of
from optigpu.vocabulary import Document, VariantStatus
from tests.unit.made_reports import BATCHES_REPORT, LADDER_REPORT, LOADS_REPORT, MATMUL_REPORT, THREE

WHOLE = f"{THREE} + torch_compile"


def attribution_of(report: Report) -> Attribution:
    """The report's own; of results that were measured apart, one without gains."""
    assert report.attribution is not None
    return report.attribution


def lines(report: Report) -> list[str]:
    console = Console(width=WIDTH, file=io.StringIO())
    with console.capture() as captured:
        console.print(terminal(brief_grid(report.title, attribution_of(report), report.results)))
    return captured.get().splitlines()


def headline_of(report: Report) -> str | None:
    return headline(rows_of(attribution_of(report), report.results))


@pytest.mark.parametrize("report", [LADDER_REPORT, LOADS_REPORT, BATCHES_REPORT, MATMUL_REPORT])
def test_one_table_fits_a_terminal_of_80_columns(report: Report) -> None:
    if report.attribution is None:
        report = replace(report, attribution=Attribution(metric="tokens_per_s", rows=()))
    shown = lines(report)
    assert max(map(len, shown)) <= WIDTH
    assert sum(line.startswith("└") for line in shown) == 1
    grid = brief_grid(report.title, attribution_of(report), report.results)
    assert len(grid.notes) <= MOST_NOTES


def test_the_headline_says_what_the_fastest_buys_and_costs() -> None:
    said = headline_of(LADDER_REPORT)
    assert said is not None
    assert said.startswith(f"{WHOLE} is 4.72 times as fast as the baseline here [4.49 to 4.91]")
    assert "28% of the bytes" in said
    assert said.endswith("it picks another token in 3% of places.")


def test_the_headline_says_where_only_the_ratio_is_valid() -> None:
    disturbed: list[Document] = [
        {**result, "verdict": {"valid": False, "reasons": ["foreign_process"], "warnings": [], "notes": []}}
        for result in LADDER_REPORT.results
    ]
    said = headline_of(replace(LADDER_REPORT, results=disturbed))
    assert said == f"{headline_of(LADDER_REPORT)} {DISTURBED}"


def test_each_row_has_its_mark_and_each_mark_a_note() -> None:
    grid = brief_grid("t", attribution_of(LADDER_REPORT), LADDER_REPORT.results)
    marks = {row[0]: row[-1] for row in grid.rows}
    assert marks[WHOLE] == "*"
    assert marks["no_kv_cache"] == "!"
    assert any(note.startswith("! no_kv_cache: not ranked") for note in grid.notes)


def test_what_has_not_ended_has_no_mark() -> None:
    rows = [
        row.model_copy(update={"status": VariantStatus.RUNNING}) for row in attribution_of(LADDER_REPORT).rows
    ]
    waiting = Attribution(metric="tokens_per_s", rows=tuple(rows))
    assert not any("x" in row for row in brief_grid("t", waiting, LADDER_REPORT.results[:1]).rows)


def test_what_did_not_run_says_why_and_what_is_too_much_is_counted() -> None:
    attribution = attribution_of(LADDER_REPORT)
    results: list[Document] = [*LADDER_REPORT.results][:1]
    rows = tuple(
        row.model_copy(
            update={"status": VariantStatus.FAILED, "reason": f"reason {row.index}", "speedup": None}
        )
        if row.index
        else row
        for row in attribution.rows
    )
    grid = brief_grid("t", attribution.model_copy(update={"rows": rows, "best": 0}), results)
    assert [row[-1] for row in grid.rows] == ["*", *["x"] * 6]
    assert grid.notes[0] == "x bf16: failed: reason 1"
    assert grid.notes[-2] == "4 more notes are in `optigpu show`."
    assert grid.title.endswith("No variant here has a valid ratio to the baseline.")


def test_a_variant_that_was_not_measured_shows_what_is_roughly_known_of_it() -> None:
    rough = Rough(
        metric="tokens_per_s", value=600, ci=(480, 750), ratio=17, ratio_ci=(13, 22), top1_agreement=0.9
    )
    attribution = attribution_of(LADDER_REPORT)
    rows = [row.model_copy(update={"rough": rough, "speedup": None}) for row in attribution.rows]
    attribution = attribution.model_copy(update={"rows": tuple(rows)})
    grid = brief_grid("t", attribution, LADDER_REPORT.results[:1], width=200)
    table = {cells[0]: cells for cells in grid.rows}
    assert table[WHOLE][1:3] == ("about 600 ±25%", "about 17.0x")
    assert "90.0" in table[WHOLE]
    assert not table["baseline"][1].startswith("about"), "it has a result"
