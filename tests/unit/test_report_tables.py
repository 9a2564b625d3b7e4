"""What tables say of workloads, comparisons and machines; what a leaderboard ranks, and speedups of stored figures."""

import math
from typing import Any

import numpy as np
import pytest

from optigpu.documents.facts import RunFacts
from optigpu.documents.result import Attribution, CpuSetup, Environment
from optigpu.documents.versions import why_none_ranks
from optigpu.report.catalog import environment_grid
from optigpu.report.formats import Grid
from optigpu.report.ladder import ladder_grid
from optigpu.report.leaderboard import comparison_grid, workload_text
from optigpu.statistics.compare import StoredSummary, compare, speedup
from optigpu.statistics.estimates import compared, unsurpassed
from optigpu.vocabulary import Better, Role
from optigpu.workloads import WORKLOADS
from tests.known import known
from tests.unit.made_results import BASELINE, ENVIRONMENT, ONE_PROCESS, WRONG, a_rung, metric, result


def grid_of(kind: str, primary: str, *metrics: dict[str, Any], **facts: Any) -> Grid:
    """The table of valid results, one with each of these metrics."""
    documents, rows = [], []
    for index, each in enumerate(metrics):
        label = f"variant {index}"
        whole = result(index, Role.SINGLE, label, each, ONE_PROCESS)
        changes = {"workload": {"kind": kind}, "primary_metric": primary}
        update = {"variant": whole.variant.model_copy(update=changes), "facts": RunFacts(**facts)}
        documents.append(whole.model_copy(update=update).model_dump(mode="json"))
        rows.append(a_rung(index, label, Role.SINGLE))
    return ladder_grid("t", Attribution(metric=primary, rows=tuple(rows)), documents)


def cells(grid: Grid, row: int = 0) -> dict[str, str]:
    return dict(zip((column.heading for column in grid.columns), grid.rows[row], strict=True))


@pytest.mark.parametrize(
    ("kind", "model", "text"),
    [
        ("generate", "preset:gpt2", "generate preset:gpt2 128+128 x1"),
        ("prefill", "preset:gpt2", "prefill preset:gpt2 512 x1"),
        ("kv_cache", "preset:gpt2", "kv_cache preset:gpt2 32/128/256/448 +16 x1"),
        ("batch_sweep", "preset:gpt2", "batch_sweep preset:gpt2 x1/2/4/8 64 +64"),
        ("serve", "preset:gpt2", "serve preset:gpt2 Server 4 per s 16 queries 64 +32 8 slots blocks of 16"),
        ("quality", "bundled:tiny", "quality bundled:tiny 128 x1"),
        ("classify", "preset:vit-base", "classify preset:vit-base x1"),
        ("train_step", "preset:gpt2", "train_step preset:gpt2 x4 128 tokens adamw at 0.0001"),
        ("matmul", None, "matmul 1024/2048 float32"),
        (
            "attention",
            None,
            "attention standard/fused 512/1024/2048/4096/8192 x1 12 heads of 64 causal float32",
        ),
        (
            "normalization",
            None,
            "normalization standard/fused layer_norm/rms_norm no residual/residual 2048 2048 rows float32",
        ),
    ],
)
def test_a_workload_is_one_line(kind: str, model: str | None, text: str) -> None:
    assert workload_text(WORKLOADS[kind](kind=kind).model_dump(mode="json"), model) == text


def test_a_single_stream_is_judged_by_its_90th_percentile() -> None:
    latency = metric("latency_s", 0.25).model_copy(update={"p90": 0.3, "p90_upper": 0.31})
    metrics = {"tokens_per_s": metric("tokens_per_s", 40.0), "latency_s": latency}
    grid = grid_of("generate", "tokens_per_s", metrics, scenario="SingleStream")
    assert cells(grid)["p90 latency (ms)"] == "300"
    assert any("scenario SingleStream" in note and "stricter" in note for note in grid.notes)


def test_an_offline_batch_is_judged_by_its_samples_per_second() -> None:
    metrics = {"tokens_per_s": metric("tokens_per_s", 40.0), "requests_per_s": metric("requests_per_s", 2.5)}
    grid = grid_of("generate", "tokens_per_s", metrics, scenario="Offline")
    assert cells(grid)["samples/s"] == "2.50"
    assert any("scenario Offline" in note for note in grid.notes)


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


def machine_cells(environment: Environment) -> dict[str, str]:
    return {str(what): str(value) for what, value in environment_grid(environment).rows}


def test_what_is_unknown_is_said_to_be_and_never_off_or_zero() -> None:
    shown = machine_cells(ENVIRONMENT)
    assert shown["CPU setup"] == (
        "unknown: base, maximum, limit, governor, boost, SMT, NUMA nodes, hypervisor"
    )
    assert shown["hardware fingerprint"] == shown["software fingerprint"] == "unknown"
    assert (shown["GPUs"], shown["GPU driver"]) == ("none", "none")
    assert shown["container"] == "none detected"
    assert shown["code"] == "commit unknown"
    partly = ENVIRONMENT.model_copy(update={"cpu_setup": CpuSetup(smt=False, numa_nodes=1)})
    assert machine_cells(partly)["CPU setup"].startswith("SMT off, NUMA nodes 1; unknown: base, ")


GOOD: dict[str, Any] = BASELINE.model_dump(mode="json")
INVALID: dict[str, Any] = WRONG.model_dump(mode="json")
SILENT = GOOD | {"metrics": {"tokens_per_s": GOOD["metrics"]["tokens_per_s"] | {"value": None}}}


@pytest.mark.parametrize("results", [[], [GOOD], [INVALID, GOOD], [SILENT, INVALID, GOOD]])
def test_one_result_that_ranks_is_enough(results: list[dict[str, Any]]) -> None:
    assert why_none_ranks(results) is None


def test_the_reasons_are_counted_and_the_first_is_explained() -> None:
    assert why_none_ranks([INVALID, INVALID, SILENT]) == (
        "Nothing that was measured can be ranked: output_invalid (2 of 3), no figure (1 of 3). The logits hold NaN."
    )


def test_a_result_without_its_metric_or_notes_is_told_as_well() -> None:
    bare = GOOD | {"metrics": {}, "verdict": {"valid": True}}
    assert why_none_ranks([bare]) == "Nothing that was measured can be ranked: no figure (1 of 1)."


def test_the_front_of_exact_points_is_what_no_other_dominates() -> None:
    points = np.random.default_rng(0).integers(0, 12, size=(60, 2))
    expected = [
        number
        for number, point in enumerate(points)
        if not ((points >= point).all(axis=1) & (points > point).any(axis=1)).any()
    ]
    assert unsurpassed([[(float(x), float(x)) for x in point] for point in points]) == expected
    assert 1 < len(expected) < 30


def test_of_two_equal_points_none_surpasses_the_other() -> None:
    assert unsurpassed([[(1.0, 1.0)], [(1.0, 1.0)]]) == [0, 1]


@pytest.mark.parametrize(
    ("one", "other", "sign"),
    [
        ((3.0, 4.0), (1.0, 2.0), 1),
        ((1.0, 2.0), (3.0, 4.0), -1),
        ((1.0, 3.0), (2.0, 4.0), 0),
        (None, (2.0, 4.0), 0),
    ],
)
def test_intervals_that_overlap_and_what_is_not_known_count_as_equal(
    one: object, other: object, sign: int
) -> None:
    assert compared(one, other) == sign  # type: ignore[arg-type]


def figure(value: float | None, better: Better = Better.HIGHER, **fields: object) -> StoredSummary:
    return StoredSummary.model_validate({"unit": "1/s", "better": better, "value": value} | fields)


def test_it_is_above_one_where_the_candidate_is_better() -> None:
    assert speedup(figure(10.0), figure(40.0)) == (4.0, None)
    assert speedup(figure(10.0, Better.LOWER), figure(2.5, Better.LOWER)) == (4.0, None)


def test_its_interval_adds_the_errors_of_both_sides() -> None:
    """Of two figures known to 3% and 4% (many degrees of freedom) the ratio is known to 5%."""
    sides = [
        figure(1.0, ci=(math.exp(-width), math.exp(width)), freedom=1e6, replicates=3)
        for width in (0.03, 0.04)
    ]
    found = known(speedup(*sides))
    assert [math.log(bound) for bound in known(found[1])] == pytest.approx([-0.05, 0.05], rel=1e-3)


@pytest.mark.parametrize("value", [None, 0.0, -1.0])
def test_what_is_not_positive_has_no_ratio(value: float | None) -> None:
    assert speedup(figure(1.0), figure(value)) is None
    assert speedup(figure(value), figure(1.0)) is None
