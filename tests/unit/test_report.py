"""Tables say what was measured, and why something was not."""

import csv
import io
import re

import pytest
from rich.console import Console

from optigpu.documents.events import as_document
from optigpu.documents.result import Gain, Verdict, VerdictReason, VerdictWarning
from optigpu.documents.views import LeaderboardPage, Standing
from optigpu.report.catalog import model_facts, models_grid, runs_grid, technique_facts, techniques_grid
from optigpu.report.formats import Column, Grid, csv_text, markdown, terminal, with_interval
from optigpu.report.ladder import ladder_csv, ladder_grid
from optigpu.report.leaderboard import leaderboard_csv, leaderboard_grid, leaderboard_grids, why_no_quality
from optigpu.report.progress import RunProgress
from optigpu.report.rows import REASONS, WARNINGS
from optigpu.report.tables import engine_facts, engines_grid
from optigpu.vocabulary import DeviceKind, new_id
from tests.unit.made_results import (
    ATTRIBUTION,
    BASELINE,
    EVENTS,
    GENERATE,
    INT8,
    NO_COMPILER,
    RESULTS,
    a_board,
    a_row,
)


def row(grid: Grid, label: str) -> dict[str, str]:
    """The cells of the row of a variant by their headings."""
    found = next(cells for cells in grid.rows if cells[0].removesuffix(" *") == label)
    return dict(zip((column.heading for column in grid.columns), found, strict=True))


@pytest.fixture(scope="module")
def ladder() -> Grid:
    return ladder_grid("made up", ATTRIBUTION, RESULTS)


def test_a_figure_has_its_interval_and_its_unit(ladder: Grid) -> None:
    assert row(ladder, "baseline") == {
        "variant": "baseline",
        "tokens/s": "31.2 [30.8, 31.5]",
        "speedup": "",
        "alone": "",
        "added": "",
        "TTFT (ms)": "45.1",
        "weights (MB)": "498",
        "status": "ok, warned",
    }


def test_the_fastest_is_marked_and_named(ladder: Grid) -> None:
    marked = [cells[0] for cells in ladder.rows if cells[0].endswith("*")]
    assert marked == ["int8_weight_only *"]
    assert "* the fastest: int8_weight_only, 3.00x [2.94, 3.06] the baseline." in ladder.notes


def test_what_is_unmeasured_is_a_dash_with_the_reason_below(ladder: Grid) -> None:
    assert row(ladder, "int8_weight_only")["TTFT (ms)"] == "-"
    assert "no ttft_s (int8_weight_only): the first token came with the second" in ladder.notes
    assert row(ladder, "torch_compile")["speedup"] == "-"


def test_what_is_not_valid_is_shown_with_a_mark_and_the_reason_below(ladder: Grid) -> None:
    cells = row(ladder, "int8_weight_only + static_kv_cache")
    assert (cells["tokens/s"], cells["speedup"], cells["added"]) == ("100 !", "3.20x !", "1.07x !")
    assert any(note.startswith("!: not valid") for note in ladder.notes)
    failed = REASONS[VerdictReason.OUTPUT_INVALID]
    for reference in ("baseline", "int8_weight_only"):
        assert (
            f"int8_weight_only + static_kv_cache relative to {reference}: not valid: {failed}."
            in ladder.notes
        )
    assert not any("took turns" in note or "take turns" in note for note in ladder.notes)


def disturbed_ladder(*reasons: VerdictReason, best: int | None) -> Grid:
    """A baseline and an int8 variant whose figures are both disturbed, and whose ratio is for these reasons."""
    verdict = Verdict(
        valid=False, reasons=(VerdictReason.FOREIGN_PROCESS,), notes=("cc1plus used 1.1 cores.",)
    )
    documents = [
        each.model_copy(update={"verdict": verdict}).model_dump(mode="json") for each in (BASELINE, INT8)
    ]
    gain = Gain(ratio=3.0, ci=(2.94, 3.06), compared_with=0, reasons=reasons)
    baseline, int8, *_ = ATTRIBUTION.rows
    rows = (baseline, int8.model_copy(update={"speedup": gain, "alone": gain}))
    return ladder_grid("made up", ATTRIBUTION.model_copy(update={"rows": rows, "best": best}), documents)


def test_where_every_figure_is_disturbed_the_ratios_are_still_the_answer() -> None:
    grid = disturbed_ladder(best=1)
    assert row(grid, "baseline")["tokens/s"] == "31.2 [30.8, 31.5] !"
    assert row(grid, "int8_weight_only")["tokens/s"] == "93.8 [92.0, 95.0] !"
    assert row(grid, "int8_weight_only")["speedup"] == "3.00x [2.94, 3.06]"
    assert "Only the ratios are valid." in grid.notes
    assert "* the fastest: int8_weight_only, 3.00x [2.94, 3.06] the baseline." in grid.notes
    assert any(note.startswith("A ratio without ! is valid although") for note in grid.notes)
    assert sum("cc1plus used 1.1 cores." in note for note in grid.notes) == 2


def test_a_warning_is_explained_once_with_its_carriers(ladder: Grid) -> None:
    single = [note for note in ladder.notes if note.startswith("single_replicate")]
    assert single == [f"single_replicate (all): {WARNINGS[VerdictWarning.SINGLE_REPLICATE]}."]
    assert any(note.startswith("not_converged (int8_weight_only):") for note in ladder.notes)


def test_every_reason_and_warning_of_a_verdict_has_words() -> None:
    assert set(REASONS) == set(VerdictReason)
    assert set(WARNINGS) == set(VerdictWarning)


@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
def test_a_narrow_terminal_gets_several_tables_that_each_say_which_variant(ladder: Grid, width: int) -> None:
    page = io.StringIO()
    Console(file=page, width=width).print(terminal(ladder))
    lines = page.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    figures = {cell for row in ladder.rows for cell in row[1:-1] if cell}
    assert all(cell in page.getvalue() for cell in figures), "no figure is cut"
    tables = [number for number, line in enumerate(lines) if line.startswith("┏")]
    assert all("variant" in lines[number + 1] for number in tables)
    assert page.getvalue().count("int8_weight_only") >= len(tables)
    assert (len(tables) == 1) == (width >= 140)


RUN = {
    "id": new_id(), "name": None, "workload": GENERATE, "model": "bundled:tiny", "plan": "ladder", "results": 2,
    "best": "bf16 + torch_compile", "created_at": "2026-11-30T02:08:10", "stopped": "It was cancelled.",
}  # fmt: skip
GGUF_FILE = {**model_facts()[0], "model": "path:gemma3-270m/gemma-3-270m-it-q4_k_m.gguf"}


@pytest.mark.parametrize(
    "grid",
    [
        runs_grid([RUN]),
        models_grid([*model_facts(), GGUF_FILE]),
        techniques_grid(technique_facts(BASELINE.environment, DeviceKind.CPU)),
        engines_grid(engine_facts()),
    ],
    ids=lambda grid: grid.title,
)
def test_a_narrow_terminal_breaks_no_word_and_each_table_says_of_what(grid: Grid) -> None:
    page = io.StringIO()
    Console(file=page, width=80).print(terminal(grid))
    lines = page.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    words = {word for row in grid.rows for cell in row for word in re.findall(r"[^\s/]+/?", cell)}
    assert {word for word in words if word not in page.getvalue()} == set()
    heads = [lines[number + 1 : number + 4] for number, line in enumerate(lines) if line.startswith("┏")]
    assert all(any(f"┃ {grid.columns[0].heading} " in line for line in head) for head in heads)
    assert len({row[0] for row in grid.rows}) == len(grid.rows), "the first column tells the rows apart"


def test_markdown_has_a_line_for_each_variant_and_escapes_bars() -> None:
    text = markdown(Grid("made up", (Column("a"), Column("b", right=True)), (("x|y", "1"),), ("a note",)))
    assert text == "**made up**\n\n| a | b |\n| --- | ---: |\n| x\\|y | 1 |\n\n- a note\n"


def test_csv_holds_the_raw_figures() -> None:
    lines = list(csv.DictReader(io.StringIO(ladder_csv(ATTRIBUTION, RESULTS))))
    assert [line["status"] for line in lines] == ["succeeded", "succeeded", "unsupported", "succeeded"]
    assert float(lines[1]["value"]) == 93.75
    assert (lines[1]["alone_low"], lines[1]["unit"]) == ("2.94", "1/s")
    assert lines[1]["ttft_s"] == ""
    assert [line["speedup_reasons"] for line in lines] == ["", "", "", "output_invalid"]
    assert (lines[3]["speedup"], lines[3]["added"], lines[3]["valid"]) == ("3.2", "1.07", "False")
    assert (lines[2]["value"], lines[2]["reason"]) == ("", NO_COMPILER)


FIRST = a_row(
    result_id=BASELINE.id,
    job_id=None,
    workload=GENERATE,
    variant_digest="v0",
    label="baseline",
    techniques=(),
    device="cpu",
    hardware="2x Test CPU",
    value=BASELINE.metrics["tokens_per_s"],
    warnings=("single_replicate",),
)


def test_the_leaderboard_names_workload_hardware_and_warnings() -> None:
    """Values common to all rows are in the title, once."""
    grid = leaderboard_grid(a_board(FIRST))
    assert grid.title == "Leaderboard by tokens/s: generate preset:gpt2 32+64 x1 on 2x Test CPU"
    assert f"a: single_replicate: {WARNINGS[VerdictWarning.SINGLE_REPLICATE]}." in grid.notes
    assert grid.rows == (("1", "baseline", "31.2 [30.8, 31.5]", "-", "-", "a"),)


def test_quality_and_energy_have_columns_as_soon_as_one_row_has_them() -> None:
    board = a_board(FIRST)
    assert not {"quality (%)", "J/token"} & {column.heading for column in leaderboard_grid(board).columns}
    known = board.rows[0].model_copy(update={"top1_agreement": 0.99953, "j_per_token": 0.25})
    grid = leaderboard_grid(a_board(*board.rows, known))
    names = [column.heading for column in grid.columns]
    at = names.index("quality (%)")
    assert names[at + 1] == "J/token"
    assert [cells[at : at + 2] for cells in grid.rows] == [("-", "-"), ("99.95", "0.25")]
    assert any(note.startswith("quality: ") for note in grid.notes)


@pytest.mark.parametrize(
    ("kind", "model", "why"),
    [
        ("generate", "preset:gpt2", "The weights are random, so quality was not measured."),
        ("classify", "preset:resnet-50", "The weights are random, so quality was not measured."),
        ("generate", "bundled:tiny", "Quality was not measured."),
        ("prefill", "preset:gpt2", "prefill decodes nothing, so there is no quality."),
        ("matmul", None, "matmul decodes nothing, so there is no quality."),
    ],
)
def test_a_board_without_any_quality_says_why(kind: str, model: str | None, why: str) -> None:
    board = a_board(FIRST, FIRST, workload={"kind": kind}, model=model)
    assert why_no_quality(board) == why
    assert leaderboard_grid(board).notes.count(why) == 1


def test_a_row_without_a_rank_says_why_and_the_notes_say_what_it_means() -> None:
    old = FIRST.model_copy(update={"superseded": True})
    earlier = FIRST.model_copy(update={"rank": None, "standing": Standing.EARLIER})
    invalid = FIRST.model_copy(update={"rank": None, "standing": Standing.INVALID, "reasons": ("drift",)})
    grid = leaderboard_grid(a_board(FIRST, old, earlier, invalid, row_count=9))
    at = [column.heading for column in grid.columns].index("status")
    assert [(cells[0], cells[at]) for cells in grid.rows] == [
        ("1", ""),
        ("1", "superseded"),
        ("-", "earlier"),
        ("-", "invalid: drift"),
    ]
    assert grid.faint == {2, 3}
    notes = " ".join(grid.notes)
    assert "superseded: the variant was since measured with later versions on other hardware." in notes
    assert "4 of 9 rows; workload=w lists all." in notes
    left_out = leaderboard_grid(a_board(FIRST, not_ranked={"drift": 2, "throttled": 1})).notes
    assert (
        "Not ranked: drift (2), throttled (1). Invalid results are listed with include_invalid=true."
        in left_out
    )


def test_an_empty_leaderboard_says_why() -> None:
    page = LeaderboardPage(boards=(), note="There are no results yet.")
    assert [grid.notes for grid in leaderboard_grids(page)] == [("There are no results yet.",)]
    assert leaderboard_csv(page).startswith("rank,label,")
    empty = a_board(note="2 results are not ranked: foreign_process.")
    (grid,) = leaderboard_grids(LeaderboardPage(boards=(empty,)))
    assert (grid.title, grid.notes) == (
        "Leaderboard by tokens/s: generate preset:gpt2 32+64 x1",
        ("2 results are not ranked: foreign_process.",),
    )


@pytest.mark.parametrize(
    ("value", "ci", "text"),
    [
        (10.0, (9.0, 10.9), "10.0 ±1"),
        (10.0, (9.0, 10.76), "10.0 ±1"),  # 1 is less than a third more than 0.76
        (10.0, (9.0, 10.74), "10.0 [9.0, 10.7]"),
        (42.1, (30.2, 247.1), "42.1 [30.2, 247.1]"),
        (0.138, (0.13796, 0.1386123), "0.138 [0.1380, 0.1386]"),
        (1234.0, (1233.0, 1299.4), "1,234 [1,233, 1,299]"),
        (1234.0, (1233.9, 1234.4), "1,234 [1,233.9, 1,234.4]"),
        (10.0, (9.0, 9.9), "10.0 [9.0, 9.9]"),  # a mean may lie outside of an interval of medians
        (10.0, (10.0, 10.0), "10.0 ±0"),
        (10.0, None, "10.0"),
        (None, None, "-"),
    ],
)
def test_an_interval_with_unequal_sides_is_written_by_its_bounds(
    value: float | None, ci: tuple[float, float] | None, text: str
) -> None:
    assert with_interval({"value": value, "ci": ci}) == text


def shown(*, quiet_s: float = 10.0) -> str:
    """What the made-up events print without a terminal, one second apart."""
    page, now = io.StringIO(), [0.0]
    with RunProgress(Console(file=page, width=120), quiet_s=quiet_s, clock=lambda: now[0]) as progress:
        for event in EVENTS:
            progress.show(event.kind, as_document(event))
            now[0] += 1
    return page.getvalue()


def test_without_a_terminal_progress_is_plain_lines() -> None:
    assert shown() == (
        "2 variants to measure: baseline, torch_compile\n"
        "2 variants x 1 process, about 2 min (an estimate); the limit is 30 min.\n"
        "baseline: 31.2 [30.8, 31.5] tokens/s\n"
        f"torch_compile: unsupported: {NO_COMPILER}\n"
    )


def test_the_service_s_own_events_are_understood() -> None:
    page = io.StringIO()
    with RunProgress(Console(file=page, width=120), quiet_s=0) as progress:
        progress.show("state", {"state": "running", "reason": None})
        progress.show("variant_started", {"index": 3})
        progress.show("progressed", {"fraction": 0.5, "doing": "loading", "remaining_s": None})
        progress.show(
            "progressed", {"fraction": 0.6, "doing": "resting", "remaining_s": None, "for_all": True}
        )
        progress.show("state", {"state": "queued", "reason": "The worker vanished."})
        progress.show("something new", {})
    assert page.getvalue() == " 50%  variant 3: loading\n 60%  resting\nqueued: The worker vanished.\n"


def test_no_text_of_a_csv_file_is_a_formula_or_steers_a_terminal() -> None:
    names = ["=1+1", "\x1b=1+1", "\r@x", "\u202e-1", "a\x1b[2Jb", "a=b", -1]
    text = csv_text(["name"], [{"name": name} for name in names])
    assert text.splitlines()[1:] == ["'=1+1", "'=1+1", "'@x", "'-1", "a[2Jb", "a=b", "-1"]
