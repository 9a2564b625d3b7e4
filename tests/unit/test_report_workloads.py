"""What a table says of each kind of workload: its shapes on one line, its own columns, and MLPerf's scenarios."""

from typing import Any

import pytest

from optigpu.documents.facts import RunFacts
from optigpu.documents.result import Attribution, AttributionRow
from optigpu.report import ladder_grid
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
