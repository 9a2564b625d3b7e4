"""The table of a comparison: figures, ratios, decisions, and what must be known beside them."""

from optigpu.report import comparison_grid
from optigpu.statistics.compare import compare
from tests.unit.made_results import BASELINE, metric


def document(speeds: tuple[float, ...], **more: object) -> dict[str, object]:
    """The baseline's document with three processes, and a metric that was not measured."""
    stored = BASELINE.model_dump(mode="json")
    speed = stored["metrics"]["tokens_per_s"] | {
        "value": sum(speeds) / len(speeds),
        "replicates": len(speeds),
        "per_replicate": list(speeds),
        "ci": None,
    }
    missing = metric("j_per_token", None, reason="no energy counter").model_dump(mode="json")
    quality = metric("top1_agreement", 1.0).model_dump(mode="json")
    return (
        stored
        | {"metrics": {"j_per_token": missing, "top1_agreement": quality, "tokens_per_s": speed}}
        | more
    )


COUNTED, FEWER = (
    BASELINE.model_dump(mode="json")
    | {"metrics": {"weight_bytes": metric("weight_bytes", figure).model_dump()}}
    for figure in (400.0, 100.0)
)
SLOW = document((10.0, 10.1, 9.9))
FAST = document((20.0, 20.2, 19.8), environment=BASELINE.environment.model_dump() | {"os": "Linux 7"})


def test_each_metric_has_figures_ratio_interval_and_decision() -> None:
    grid = comparison_grid(compare(SLOW, FAST))
    assert grid.title == "baseline against baseline: generate preset:gpt2 32+64 x1 on 2x Test CPU"
    speed, quality = grid.rows
    assert speed == ("tokens/s", "10.0", "20.0", "2.000x [1.960, 2.040]", "different, better")
    assert quality == ("top1_agreement", "1.00", "1.00", "1.00x", "undecided")
    assert "different: the interval does not contain 1 (0 for a difference)." in grid.notes


def test_an_undecided_ratio_says_which_interval_contains_1() -> None:
    grid = comparison_grid(compare(SLOW, document((9.7, 10.4, 10.0))))
    assert grid.rows[0][4] == "undecided"
    shown = grid.rows[0][3].split(" ", 1)[1]
    assert (
        f"tokens_per_s: undecided: the interval {shown} contains 1 and reaches beyond 3% of it." in grid.notes
    )
    equal = comparison_grid(compare(SLOW, SLOW)).notes
    assert "equivalent: the ratio's 90% interval lies within 3% of 1." in equal
    assert not any("undecided:" in note for note in equal)


def test_the_notes_say_why_there_is_no_figure_and_what_differs() -> None:
    notes = comparison_grid(compare(SLOW, FAST)).notes
    assert "measured on neither side: j_per_token" in notes
    assert any(note.startswith("top1_agreement: There is no interval: ") for note in notes)
    assert "differs: environment.os: Linux -> Linux 7" in notes


def test_a_side_that_is_not_valid_is_marked_and_the_ratio_is_there() -> None:
    verdict = {"valid": False, "reasons": ["foreign_process"], "warnings": [], "notes": []}
    grid = comparison_grid(compare(SLOW | {"verdict": verdict}, FAST))
    assert grid.rows[0][:4] == ("tokens/s", "10.0 !", "20.0", "2.000x [1.960, 2.040]")
    assert "The baseline is not valid: foreign_process." in grid.notes
    assert "!: of a result that is not valid." in grid.notes
    assert not any(note.startswith("!") for note in comparison_grid(compare(SLOW, FAST)).notes)
