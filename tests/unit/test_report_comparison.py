"""The table of a comparison: figures, ratios, decisions, and what must be known beside them."""

from optigpu.report import comparison_grid, markdown
from optigpu.statistics.compare import compare
from tests.unit.made_results import BASELINE, INT8, metric


def document(speeds: tuple[float, ...], **more: object) -> dict[str, object]:
    """The baseline's document with three processes, and a metric that was not measured."""
    stored = BASELINE.model_dump(mode="json")
    speed = stored["metrics"]["tokens_per_s"] | {
        "value": sum(speeds) / len(speeds),
        "replicates": len(speeds),
        "per_replicate": list(speeds),
    }
    missing = metric("j_per_token", None, reason="no energy counter").model_dump(mode="json")
    quality = metric("top1_agreement", 1.0).model_dump(mode="json")
    return (
        stored
        | {"metrics": {"j_per_token": missing, "top1_agreement": quality, "tokens_per_s": speed}}
        | more
    )


SLOW = document((10.0, 10.1, 9.9))
FAST = document((20.0, 20.2, 19.8), environment=BASELINE.environment.model_dump() | {"os": "Linux 7"})


def test_each_metric_has_figures_ratio_interval_and_decision() -> None:
    grid = comparison_grid(compare(SLOW, FAST))
    assert grid.title == "baseline against baseline: generate preset:gpt2 32+64 x1 on 2x Test CPU"
    speed, quality = grid.rows
    assert speed[:4] == ("tokens/s", "10.0", "20.0", "2.000")
    low, high = map(float, speed[4].strip("[]").split(", "))
    assert low < 2 < high
    assert speed[5] == "better"
    assert quality[:4] == ("top1_agreement", "1.00", "1.00", "1.000")


def test_the_notes_say_why_there_is_no_figure_and_what_differs() -> None:
    notes = comparison_grid(compare(SLOW, FAST)).notes
    assert "measured on neither side: j_per_token" in notes
    assert any(note.startswith("top1_agreement: single_replicate: ") for note in notes)
    assert "differs: environment.os: Linux -> Linux 7" in notes
    assert any("2%" in note for note in notes)


def test_a_figure_that_one_side_lacks_is_shown_with_the_reason() -> None:
    one_sided = compare(BASELINE.model_dump(mode="json"), INT8.model_dump(mode="json"))
    grid = comparison_grid(one_sided)
    assert ("ttft_s (s)", "0.0451", "-", "-", "-", "-") in grid.rows
    assert "ttft_s: candidate: the first token came with the second" in grid.notes


def test_what_speaks_against_the_comparison_comes_first() -> None:
    elsewhere = FAST | {"environment": BASELINE.environment.model_dump() | {"hardware_class": "1x GPU"}}
    notes = comparison_grid(compare(SLOW, elsewhere, anyway=True)).notes
    assert notes[0] == "The hardware differs: 2x Test CPU and 1x GPU."


def test_without_a_common_figure_it_says_so() -> None:
    grid = comparison_grid(compare(SLOW, INT8.model_dump(mode="json") | {"metrics": {}}))
    assert grid.rows == ()
    assert "The two results have no metric in common." in grid.notes


def test_a_long_difference_is_cut() -> None:
    long = FAST | {"environment": BASELINE.environment.model_dump() | {"os": "x" * 500}}
    assert max(map(len, comparison_grid(compare(SLOW, long)).notes)) < 200


def test_it_can_be_written_as_markdown() -> None:
    assert "| tokens/s | 10.0 | 20.0 | 2.000 |" in markdown(comparison_grid(compare(SLOW, FAST)))
