"""Charts hold what was measured and are the same each time; a clear sentence says where nothing can be drawn."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from optigpu.cli import main
from optigpu.documents.facts import RunFacts
from optigpu.documents.result import MetricSummary, Verdict, VerdictReason
from optigpu.documents.shapes import Footprint
from optigpu.report.charts import (
    CHARTS,
    GOAL_PERCENT,
    ladder_chart,
    quality_chart,
    roofline_chart,
    throughput_chart,
)
from optigpu.report.combined import combined
from optigpu.roofline import roofline_of
from optigpu.vocabulary import OptiGPUError, Role, SpecError
from optigpu.workloads.generate import Generate
from tests.unit.made_results import GENERATE, metric, result
from tests.unit.test_roofline import GPT2, PEAKS

STRAIGHT = ("ladder", "roofline", "quality", "throughput")
VALID = Verdict(valid=True)
WRONG = Verdict(valid=False, reasons=(VerdictReason.OUTPUT_INVALID,), notes=("The logits hold NaN.",))
THREE = "bf16 + int8_weight_only + static_kv_cache"
LADDER: tuple[tuple[str, Role, float, int, str, float, Verdict], ...] = (
    ("baseline", Role.BASELINE, 15.1, 494_612_480, "float32", 1.0, VALID),
    ("bf16", Role.ALONE, 21.7, 247_306_240, "bfloat16", 0.9931, VALID),
    ("int8_weight_only", Role.ALONE, 38.4, 124_900_000, "float32", 0.978, VALID),
    ("static_kv_cache", Role.ALONE, 15.9, 494_612_480, "float32", 1.0, VALID),
    (THREE, Role.CUMULATIVE, 44.0, 124_800_000, "bfloat16", 0.971, VALID),
    (f"{THREE} + torch_compile", Role.CUMULATIVE, 71.3, 124_800_000, "bfloat16", 0.97, VALID),
    ("no_kv_cache", Role.ALONE, 2.2, 494_612_480, "float32", 1.0, WRONG),
)  # fmt: skip
"""Label, role, tokens per second, streamed bytes, dtype, top-1 agreement and verdict of made-up variants."""


def made(
    index: int, label: str, role: Role, rate: float, streamed: int, dtype: str, top1: float, verdict: Verdict
) -> dict[str, Any]:
    model = Footprint(GPT2.facts, streamed, GPT2.row_bytes)
    facts = RunFacts(dtype=dtype, kv_cache="dynamic", footprint=model)
    metrics: dict[str, MetricSummary] = {
        "tokens_per_s": metric("tokens_per_s", rate, (rate * 0.96, rate * 1.035)),
        "ttft_s": metric("ttft_s", 0.1),
        "latency_s": metric("latency_s", 0.1 + 63 / rate, (0.1 + 62 / rate, 0.1 + 65 / rate)),
        "top1_agreement": metric("top1_agreement", top1, (max(0.0, top1 - 0.004), min(1.0, top1 + 0.003))),
    }
    found = roofline_of(Generate.model_validate(GENERATE), metrics, facts, PEAKS, None)
    whole = result(index, role, label, metrics | found.metrics, verdict)
    update = {"bound": found.bound, "facts": RunFacts(roofline=found.facts)}
    document: dict[str, Any] = whole.model_copy(update=update).model_dump(mode="json")
    return document


RESULTS = [made(index, *row) for index, row in enumerate(LADDER)]


def texts(path: Path) -> str:
    """What an SVG file says: matplotlib draws letters as shapes and leaves each text in a comment."""
    return path.read_text()


@pytest.mark.parametrize("kind", STRAIGHT)
@pytest.mark.parametrize(("suffix", "begin"), [(".svg", b"<?xml"), (".PNG", b"\x89PNG")])
def test_a_chart_is_the_same_file_each_time(tmp_path: Path, kind: str, suffix: str, begin: bytes) -> None:
    first, second = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    for path in (first, second):
        CHARTS[kind]("preset:gpt2 on 2x Test CPU", RESULTS, path)
    assert first.read_bytes().startswith(begin)
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.slow
def test_a_users_own_settings_change_no_chart(tmp_path: Path) -> None:
    import matplotlib

    ladder_chart("t", RESULTS, tmp_path / "a.svg")
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "black"}):
        ladder_chart("t", RESULTS, tmp_path / "b.svg")
        assert matplotlib.rcParams["font.size"] == 20, "the chart left its own settings behind"
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_the_ladder_says_every_variant_with_figure_interval_and_unit(tmp_path: Path) -> None:
    ladder_chart("preset:gpt2 on 2x Test CPU", RESULTS, tmp_path / "c.svg")
    said = texts(tmp_path / "c.svg")
    for text in (
        "preset:gpt2 on 2x Test CPU",
        "int8_weight_only",
        "38.4 ±1.5",
        "tokens/s",
        "no_kv_cache (invalid)",
    ):
        assert text in said


def test_a_chart_writes_an_unequal_interval_by_its_bounds(tmp_path: Path) -> None:
    skewed = metric("tokens_per_s", 42.1, (30.2, 247.1)).model_dump(mode="json")
    results = [each | {"metrics": each["metrics"] | {"tokens_per_s": skewed}} for each in RESULTS]
    for kind in ("ladder", "quality", "throughput"):
        CHARTS[kind]("t", results, tmp_path / "c.svg")
        assert "42.1 [30.2, 247.1]" in texts(tmp_path / "c.svg")


def test_the_roofline_says_the_measured_roofs_and_what_bounds_each_variant(tmp_path: Path) -> None:
    roofline_chart("t", RESULTS, tmp_path / "c.svg")
    said = texts(tmp_path / "c.svg")
    for text in (
        "10.0 GB/s reading",
        "40.0 GB/s reading 64 MiB",
        "float32: 200 GFLOP/s",
        "bfloat16: 800 GFLOP/s",
    ):
        assert text in said
    share = 1 / RESULTS[0]["metrics"]["headroom"]["value"]
    assert f"{share:.0%} of its roof; bound: memory" in said
    assert "bound: launch" in said
    assert "FLOP/byte" in said
    assert "GFLOP/s" in said


def test_the_quality_chart_marks_the_founding_goal(tmp_path: Path) -> None:
    quality_chart("t", RESULTS, tmp_path / "c.svg")
    said = texts(tmp_path / "c.svg")
    assert f"founding goal: at most {GOAL_PERCENT:g}% lost" in said
    assert GOAL_PERCENT == 0.1
    for text in ("0.69% lost", "2.20% lost", "most likely token"):
        assert text in said


def test_accuracy_is_preferred_where_it_was_measured_and_the_others_are_named(tmp_path: Path) -> None:
    measured = [
        result_
        | {"metrics": result_["metrics"] | {"accuracy_loss_percent": _plain("accuracy_loss_percent", loss)}}
        for result_, loss in zip(RESULTS, (0.0, -0.4, 1.5), strict=False)
    ]
    quality_chart("t", [*measured, *RESULTS[3:]], tmp_path / "c.svg")
    said = texts(tmp_path / "c.svg")
    assert "accuracy lost against fp32" in said
    assert "-0.4% lost" in said
    assert "Not shown, without that figure: static_kv_cache" in said


def _plain(name: str, value: float) -> dict[str, Any]:
    return dict(metric(name, value, (value - 0.3, value + 0.3)).model_dump(mode="json"))


@pytest.mark.slow
def test_the_throughput_chart_joins_the_shapes_of_one_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.axes import Axes

    plain = [made(n, f"batch {n}", Role.BASELINE, 10.0 + n, 10**9, "float32", 1.0, VALID) for n in (4, 1, 2)]
    stack = {"stack": [{"name": "bf16"}]}
    other = [each | {"variant": each["variant"] | stack} for each in plain[:2]]
    joined: list[list[float]] = []
    monkeypatch.setattr(Axes, "plot", lambda _, x, y, **__: joined.append([*x, *y]))
    throughput_chart("t", plain + other, tmp_path / "c.svg")
    assert [len(points) for points in joined] == [6, 4]
    assert joined[0][:3] == sorted(joined[0][:3])
    assert "batch 4" in texts(tmp_path / "c.svg")
    assert "latency of a request (ms)" in texts(tmp_path / "c.svg")


def test_what_does_no_matrix_product_has_no_place_under_the_roofline(tmp_path: Path) -> None:
    roofline = RESULTS[0]["facts"]["roofline"]
    nothing = {"roofline": roofline | {"step": roofline["step"] | {"flops": 0.0, "flops_per_byte": 0.0}}}
    with pytest.raises(SpecError, match="No result has a roofline"):
        roofline_chart("t", [each | {"facts": nothing} for each in RESULTS], tmp_path / "c.svg")


@pytest.mark.parametrize("kind", STRAIGHT)
@pytest.mark.parametrize("count", [1, 32])
def test_one_variant_and_the_most_that_a_job_has_find_room(tmp_path: Path, kind: str, count: int) -> None:
    """matplotlib warns where decorations leave no room for the chart, and a warning fails a test."""
    results = [
        made(index, f"{index}: {THREE}", Role.SINGLE, 44.0, 124_800_000, "bfloat16", 0.971, VALID)
        for index in range(count)
    ]
    CHARTS[kind]("t", results, tmp_path / "c.svg")
    assert f"{count - 1}: bf16" in texts(tmp_path / "c.svg")


@pytest.mark.parametrize(
    ("kind", "without"),
    [
        ("ladder", "tokens_per_s"),
        ("quality", "top1_agreement"),
        ("quality", "tokens_per_s"),
        ("throughput", "latency_s"),
    ],
)
def test_where_nothing_was_measured_the_reason_is_said(tmp_path: Path, kind: str, without: str) -> None:
    null = metric(without, None, reason="no").model_dump(mode="json")
    empty = [each | {"metrics": each["metrics"] | {without: null}} for each in RESULTS]
    with pytest.raises(SpecError, match="No result has"):
        CHARTS[kind]("t", empty, tmp_path / "c.svg")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("facts", [{}, {"roofline": {"step": None, "reason": "no peaks"}}])
def test_without_a_roofline_none_is_drawn(tmp_path: Path, facts: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"facts\.roofline\.reason"):
        roofline_chart("t", [each | {"facts": facts} for each in RESULTS], tmp_path / "c.svg")


@pytest.mark.parametrize("name", ["chart.gif", "chart", "chart.svg.txt"])
def test_another_suffix_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SpecError, match=r"\.svg, \.png, \.pdf"):
        ladder_chart("t", RESULTS, tmp_path / name)


def test_a_folder_that_does_not_exist_is_said(tmp_path: Path) -> None:
    with pytest.raises(OptiGPUError, match="cannot be written"):
        ladder_chart("t", RESULTS, tmp_path / "nowhere" / "c.svg")


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["optigpu", "chart", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(report_of(RESULTS)))
    return path


ATTRIBUTION = {"metric": "tokens_per_s", "rows": []}


def report_of(results: list[dict[str, Any]], **spec: Any) -> dict[str, Any]:
    """What `optigpu run --format json` prints."""
    whole = {"workload": GENERATE, "model": "preset:gpt2"} | spec
    return {"spec": whole, "results": results, "attribution": ATTRIBUTION}


@pytest.mark.parametrize("kind", STRAIGHT)
def test_the_command_draws_what_a_run_printed(
    report: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    output = report.with_name("chart.svg")
    assert command(monkeypatch, str(report), "--output", str(output), "--kind", kind) == 0
    assert "Test CPU" in texts(output)
    assert capsys.readouterr().out.strip() == str(output)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is not JSON"),
        ("[1]", "holds no run"),
        ('{"results": []}', "holds no run"),
        ('{"spec": {}, "results": [{}], "attribution": {"metric": "m", "rows": []}}', "holds no run"),
        (
            '{"spec": {"workload": {"kind": "matmul"}}, "results": [], "attribution": {"metric": "m", "rows": []}}',
            "has a result to draw",
        ),
    ],
)
def test_a_file_with_something_else_is_a_wrong_request(
    report: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: str,
    words: str,
) -> None:
    report.write_text(content)
    assert command(monkeypatch, str(report), "-o", str(report.with_name("c.svg"))) == 2
    assert words in capsys.readouterr().err


def on(results: list[dict[str, Any]], hardware: str) -> list[dict[str, Any]]:
    """The results as another machine's."""
    return [each | {"environment": each["environment"] | {"hardware_class": hardware}} for each in results]


def test_reports_of_one_chart_are_told_apart_by_what_differs() -> None:
    here, there = report_of(RESULTS[:2]), report_of(on(RESULTS[:2], "NVIDIA L4"))
    title, results = combined([here, there])
    labels = [each["variant"]["label"] for each in results]
    assert labels == [
        "baseline (2x Test CPU)",
        "bf16 (2x Test CPU)",
        "baseline (NVIDIA L4)",
        "bf16 (NVIDIA L4)",
    ]
    assert "Test CPU" not in title
    _, named = combined([report_of(RESULTS[:1], name="before"), report_of(RESULTS[:1], name="after")])
    assert [each["variant"]["label"] for each in named] == ["baseline (before)", "baseline (after)"]
    _, twice = combined([here, here])
    assert len({each["variant"]["label"] for each in twice}) == 4


def test_one_chart_has_one_unit() -> None:
    product = RESULTS[0] | {"variant": RESULTS[0]["variant"] | {"primary_metric": "tflops"}}
    with pytest.raises(SpecError, match="TFLOP/s, tokens/s; draw them apart"):
        combined([report_of(RESULTS), report_of([product])])
