"""What a table says of each kind of workload: its shapes on one line, its own columns, and MLPerf's scenarios."""

from typing import Any

import pytest

from optigpu.documents.facts import RunFacts
from optigpu.documents.result import Attribution, AttributionRow
from optigpu.report import job_title, ladder_grid, runs_grid
from optigpu.report.formats import Grid
from optigpu.report.leaderboard import workload_text
from optigpu.vocabulary import Role, VariantStatus
from optigpu.workloads import WORKLOADS
from tests.unit.made_results import ONE_PROCESS, metric, result


def grid_of(kind: str, primary: str, *metrics: dict[str, Any], **facts: Any) -> Grid:
    """The table of valid results, one with each of these metrics."""
    documents, rows = [], []
    for index, each in enumerate(metrics):
        label = f"variant {index}"
        whole = result(index, Role.SINGLE, label, each, ONE_PROCESS)
        changes = {"workload": {"kind": kind}, "primary_metric": primary}
        update = {"variant": whole.variant.model_copy(update=changes), "facts": RunFacts(**facts)}
        documents.append(whole.model_copy(update=update).model_dump(mode="json"))
        rows.append(
            AttributionRow(index=index, role=Role.SINGLE, label=label, status=VariantStatus.SUCCEEDED)
        )
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


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("train_step", "train_step preset:gpt2 128 tokens adamw at 0.0001"),
        ("generate", "generate preset:gpt2 128+128"),
    ],
)
def test_a_batch_that_is_looked_for_is_in_no_title(kind: str, text: str) -> None:
    asked = {"workload": WORKLOADS[kind](kind=kind).model_dump(mode="json"), "model": "preset:gpt2"}
    assert job_title(asked | {"plan": "batch_scaling"}, []) == text
    assert " x" in job_title(asked | {"plan": "single"}, [])
    run = asked | {
        "plan": "batch_scaling",
        "id": "r",
        "name": None,
        "results": 1,
        "best": None,
        "stopped": None,
    }
    (row,) = runs_grid([run | {"created_at": "2026-11-23T10:00:00"}]).rows
    assert text in row


def test_a_largest_batch_has_its_limit_in_the_place_of_the_batch() -> None:
    shape = {"kind": "generate", "prompt_tokens": 8, "new_tokens": 2, "memory_limit_bytes": 2_000_000_000}
    assert workload_text(shape, "preset:gpt2") == "generate preset:gpt2 8+2 under 2000000000 bytes"
    assert "under 5 bytes" in workload_text({"kind": "train_step", "memory_limit_bytes": 5}, "preset:gpt2")


def test_throughput_and_latency_stand_side_by_side_in_a_sweep() -> None:
    metrics = {"tokens_per_s": metric("tokens_per_s", 40.0), "latency_s": metric("latency_s", 0.25)}
    assert cells(grid_of("batch_sweep", "tokens_per_s", metrics))["latency (ms)"] == "250"
    assert "latency (ms)" not in cells(grid_of("generate", "tokens_per_s", metrics))


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


def test_too_few_requests_for_a_percentile_are_said_where_others_have_one() -> None:
    few = metric("latency_s", 0.25, reason="Percentiles need more than 12 requests: p90 64.")
    metrics = {"tokens_per_s": metric("tokens_per_s", 40.0), "latency_s": few}
    alone = grid_of("generate", "tokens_per_s", metrics, scenario="SingleStream")
    assert "p90 latency (ms)" not in cells(alone)
    enough = few.model_copy(update={"p90": 0.3, "reason": None})
    grid = grid_of(
        "generate", "tokens_per_s", metrics, metrics | {"latency_s": enough}, scenario="SingleStream"
    )
    assert [cells(grid, row)["p90 latency (ms)"] for row in (0, 1)] == ["-", "300"]
    assert "no p90 latency (ms) (variant 0): Percentiles need more than 12 requests: p90 64." in grid.notes


@pytest.mark.parametrize("facts", [{}, {"scenario": None}])
def test_what_says_no_scenario_has_no_such_column(facts: dict[str, Any]) -> None:
    metrics = {"tokens_per_s": metric("tokens_per_s", 40.0), "requests_per_s": metric("requests_per_s", 2.5)}
    assert set(cells(grid_of("generate", "tokens_per_s", metrics, **facts))) == {
        "variant",
        "tokens/s",
        "status",
    }
