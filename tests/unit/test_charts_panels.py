"""The data of charts: which results a chart shows, in which panel, with which figure, and where there is none."""

from dataclasses import replace
from typing import Any

import pytest

from optigpu.report.charts import CHARTS, Report
from optigpu.report.charts.marks import ChartData, Form, Mark, rungs_of
from optigpu.vocabulary import SpecError
from tests.unit.made_reports import (
    BATCHES_REPORT,
    LADDER_REPORT,
    LADDER_RESULTS,
    PARETO_REPORT,
    REPORTS,
    RESULTS,
    THREE,
    with_metrics,
)
from tests.unit.made_results import metric


def data_of(kind: str) -> ChartData:
    return CHARTS[kind].data(REPORTS[kind])


def marks_of(kind: str, panel: str) -> tuple[Mark, ...]:
    (found,) = [each for each in data_of(kind).panels if each.title == panel]
    return found.marks


def test_precisions_stand_side_by_side_in_latency_and_memory() -> None:
    latency, memory = marks_of("precision", "Latency"), marks_of("precision", "Memory")
    assert [each.label for each in memory] == ["fp32: baseline", "bf16", "int8_weight_only"]
    assert [each.value for each in memory] == pytest.approx([497.8, 248.9, 281.6])
    assert latency[0].value == pytest.approx(1e3 * LADDER_RESULTS[0]["metrics"]["latency_s"]["value"])
    assert latency[0].ci is not None
    assert latency[0].source == LADDER_RESULTS[0]["id"]


def test_the_four_panels_are_of_the_rungs_and_relative_to_the_baseline() -> None:
    data = data_of("overview")
    assert [panel.title for panel in data.panels] == [
        "Cumulative speedup", "Memory", "Utilization", "Speedup over the loss of quality",
    ]  # fmt: skip
    speedup, memory, use, loss = (panel.marks for panel in data.panels)
    assert [round(each.value, 2) for each in speedup] == [1.0, 1.44, 2.91, 4.72]
    assert speedup[3].ci == pytest.approx((4.486, 4.911), abs=1e-3)
    assert [round(each.value, 1) for each in memory] == [100.0, 50.0, 28.3, 28.3]
    assert {each.series for each in use} == {"mbu", "mfu"}
    assert [each.text for each in loss] == ["0%", "0.69%", "2.90%", "3.00%"]
    assert "0.1% lost" in data.note


def test_a_speedup_without_an_attribution_has_no_interval() -> None:
    data = CHARTS["overview"].data(replace(LADDER_REPORT, attribution=None))
    assert [round(each.value, 2) for each in data.panels[0].marks] == [1.0, 1.44, 2.91, 4.72]
    assert {each.ci for each in data.panels[0].marks} == {None}


def test_the_rungs_are_of_one_workload_and_begin_with_the_technique_that_was_added_first() -> None:
    labels = [each["variant"]["label"] for each in rungs_of(LADDER_REPORT)]
    assert labels == ["baseline", "bf16", THREE, f"{THREE} + torch_compile"]
    without_first = replace(
        LADDER_REPORT, results=[each for each in LADDER_RESULTS if each["variant"]["index"] != 1]
    )
    assert [each["variant"]["label"] for each in rungs_of(without_first)] == ["baseline", *labels[2:]]
    other = [each | {"variant": each["variant"] | {"workload_digest": "other"}} for each in LADDER_RESULTS]
    assert rungs_of(replace(LADDER_REPORT, results=[*LADDER_RESULTS, *other])) == rungs_of(LADDER_REPORT)
    assert rungs_of(replace(LADDER_REPORT, results=LADDER_RESULTS[1:])) == []


def test_a_panel_without_figures_says_why() -> None:
    reason = "random weights: their predictions mean nothing"
    null = {"value": None, "ci": None, "reason": reason}
    results = [each | {"metrics": each["metrics"] | {"top1_agreement": null}} for each in LADDER_RESULTS]
    report = replace(LADDER_REPORT, results=results)
    assert set(CHARTS["overview"].data(report).panels[3].missing.values()) == {reason}


def test_attention_has_a_line_for_each_implementation() -> None:
    for panel, expected in (("Time", [6.1, 3.2]), ("Memory", [14.0, 3.1])):
        marks = marks_of("lengths", panel)
        assert [each.value for each in marks if each.x == 512] == pytest.approx(expected)
        assert {each.series for each in marks} == {"standard", "fused"}


def test_batches_stand_at_the_95th_percentile_and_not_at_the_median() -> None:
    marks = marks_of("batches", "Throughput against latency")
    assert [(each.text, each.x) for each in marks] == [
        ("batch 8", 2400.0), ("batch 1", 900.0), ("batch 4", 1600.0),
    ]  # fmt: skip
    assert data_of("batches").panels[0].missing.keys() == {"batch 16"}


def test_the_front_is_of_what_no_other_valid_result_surpasses() -> None:
    over_bytes, over_divergence = (panel.marks for panel in data_of("pareto").panels)
    assert [each.label for each in over_bytes if each.on_front] == [f"{THREE} + torch_compile"]
    assert [each.label for each in over_divergence if each.on_front] == [
        "baseline", "bf16", "int8_weight_only", "static_kv_cache", f"{THREE} + torch_compile",
    ]  # fmt: skip
    assert [each.text for each in over_bytes if each.text] == [f"{THREE} + torch_compile"]
    assert [each.x for each in over_bytes] == pytest.approx([497.8, 248.9, 281.6, 497.8, 140.8, 140.8, 497.8])
    assert not next(each for each in over_divergence if each.label == "no_kv_cache (invalid)").on_front


def test_a_result_that_is_not_valid_surpasses_nothing() -> None:
    fastest = with_metrics(dict(PARETO_REPORT.results[-1]), tokens_per_s=(900.0,), weight_bytes=(1e6,))
    report = replace(PARETO_REPORT, results=[*PARETO_REPORT.results[:-1], fastest])
    front = [each.label for each in CHARTS["pareto"].data(report).panels[0].marks if each.on_front]
    assert front == [f"{THREE} + torch_compile"]


def test_bytes_and_divergence_have_a_front_of_their_own() -> None:
    (panel,) = data_of("bits").panels
    found = {each.label: (round(each.value, 1), each.x) for each in panel.marks if each.on_front}
    assert found == {
        "baseline": (497.8, 0.0),
        "bf16": (248.9, 0.004),
        "static_kv_cache": (497.8, 0.0),
        THREE: (140.8, 0.03),
        f"{THREE} + torch_compile": (140.8, 0.031),
    }
    assert {each.label for each in panel.marks if not each.valid} == {"no_kv_cache (invalid)"}
    assert panel.missing == {}


def test_bytes_of_several_models_have_no_front_and_none_without_a_divergence() -> None:
    other = {"variant": PARETO_REPORT.results[0]["variant"] | {"model": "bundled:small"}}
    report = replace(PARETO_REPORT, results=[*PARETO_REPORT.results, dict(PARETO_REPORT.results[0]) | other])
    with pytest.raises(SpecError, match="of one model"):
        CHARTS["bits"].data(report)
    with pytest.raises(SpecError, match="No result has both"):
        CHARTS["bits"].data(BATCHES_REPORT)


def test_results_of_several_machines_have_no_front() -> None:
    there = {"environment": PARETO_REPORT.results[0]["environment"] | {"hardware_class": "NVIDIA L4"}}
    report = replace(PARETO_REPORT, results=[*PARETO_REPORT.results, dict(PARETO_REPORT.results[0]) | there])
    with pytest.raises(SpecError, match="cannot surpass each other"):
        CHARTS["pareto"].data(report)


@pytest.mark.parametrize("kind", ["batches", "loads"])
def test_batches_and_loads_are_one_chart(kind: str) -> None:
    (panel,) = data_of(kind).panels
    assert (panel.title, panel.form, panel.axis) == ("Throughput against latency", Form.LINES, "tokens/s")
    assert panel.x_axis == "95th percentile of the latency of a request (ms)"
    assert all(each.ci for each in panel.marks)


def test_rates_stand_at_the_95th_percentile_in_a_line_for_each_engine() -> None:
    marks = marks_of("loads", "Throughput against latency")
    assert [(each.text, each.x) for each in marks] == [("1/s", 900.0), ("4/s", 2400.0), ("2/s", 1200.0)]
    first, *others = REPORTS["loads"].results
    server = {"backend": "endpoint", "endpoint": "http://127.0.0.1:8000/v1#tiny"}
    elsewhere = dict(first) | {"variant": first["variant"] | server}
    (panel,) = CHARTS["loads"].data(Report("t", [elsewhere, *others])).panels
    assert [each.series for each in panel.marks] == [
        "baseline, endpoint tiny at 127.0.0.1:8000", "baseline, torch", "baseline, torch",
    ]  # fmt: skip


def test_the_waterfall_begins_each_rung_at_the_one_before() -> None:
    (panel,) = data_of("waterfall").panels
    assert [each.label for each in panel.marks] == [
        "baseline", "+ bf16", "+ static_kv_cache", "+ torch_compile",
    ]  # fmt: skip
    assert [each.start for each in panel.marks] == [0.0, 1.0, *(each.value for each in panel.marks[1:3])]
    assert "added 1.62x [1.54, 1.68]" in panel.marks[3].text
    assert panel.marks[3].ci is not None


def test_the_table_has_the_rows_that_were_measured() -> None:
    table = data_of("comparison").table
    assert table is not None
    cells = {row[0]: row[1:] for row in table.rows}
    assert table.headings[1] == "baseline"
    assert cells["speedup"][:2] == ("1", "1.44x [1.37, 1.49]")
    assert cells["weights (MB)"][2] == "282"
    assert "energy (J)" not in cells


def test_a_baseline_of_the_card_is_a_claim_and_only_the_same_work_stands_beside_it() -> None:
    (panel,) = data_of("baselines").panels
    claim, measured = panel.marks
    assert (claim.claimed, claim.value, claim.source) == (True, 40.0, "5090-matmul-fp32")
    assert "(claim)" in claim.label
    assert (measured.claimed, measured.label) == (False, "float32 4096")
    assert "has not measured" in data_of("baselines").note


def test_the_diagram_is_of_the_best_variant() -> None:
    boxes = {box.heading: box.lines for box in data_of("architecture").boxes}
    assert boxes["Quantization"] == ("bf16", "int8_weight_only")
    assert boxes["Compilation"] == ("torch_compile",)
    assert "4.72x [4.49, 4.91] the baseline" in boxes["Measured"]
    assert boxes["Machine"] == ("2x Test CPU",)


def test_a_sweep_without_percentiles_says_how_to_get_them() -> None:
    results = [each for each in BATCHES_REPORT.results if each["metrics"]["latency_s"].get("p95") is None]
    with pytest.raises(SpecError, match="--max-seconds 60"):
        CHARTS["batches"].data(Report("t", results))


def test_a_percentile_needs_requests() -> None:
    few = [with_metrics(dict(each), latency_s=(1.0, 0.9, 1.1)) for each in BATCHES_REPORT.results]
    with pytest.raises(SpecError, match="95th percentile"):
        CHARTS["batches"].data(Report("t", few))


@pytest.mark.parametrize(
    ("kind", "without"),
    [
        ("ladder", "tokens_per_s"),
        ("quality", "top1_agreement"),
        ("quality", "tokens_per_s"),
        ("throughput", "latency_s"),
    ],
)
def test_where_nothing_was_measured_the_reason_is_said(kind: str, without: str) -> None:
    null = metric(without, None, reason="no").model_dump(mode="json")
    empty = [each | {"metrics": each["metrics"] | {without: null}} for each in RESULTS]
    with pytest.raises(SpecError, match="No result has"):
        CHARTS[kind].data(Report("t", empty))


def _without_product() -> dict[str, Any]:
    """The facts of what does no matrix product."""
    roofline = RESULTS[0]["facts"]["roofline"]
    return {"roofline": roofline | {"step": roofline["step"] | {"flops": 0.0, "flops_per_byte": 0.0}}}


@pytest.mark.parametrize(
    "facts", [{}, {"roofline": {"step": None, "reason": "no peaks"}}, _without_product()]
)
def test_without_a_roofline_none_is_drawn(facts: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"facts\.roofline\.reason"):
        CHARTS["roofline"].data(Report("t", [each | {"facts": facts} for each in RESULTS]))


def test_accuracy_is_preferred_where_it_was_measured_and_the_others_are_named() -> None:
    measured = [
        with_metrics(each, accuracy_loss_percent=(loss, loss - 0.3, loss + 0.3))
        for each, loss in zip(RESULTS, (0.0, -0.4, 1.5), strict=False)
    ]
    (panel,) = CHARTS["quality"].data(Report("t", [*measured, *RESULTS[3:]])).panels
    assert panel.x_axis == "accuracy lost against fp32 (%)"
    assert [each.x for each in panel.marks] == [0.0, -0.4, 1.5]
    assert next(iter(panel.missing)) == "static_kv_cache"


def test_the_loss_of_agreement_is_its_complement_with_its_interval() -> None:
    mark = data_of("quality").panels[0].marks[1]
    assert mark.x == pytest.approx(0.69)
    assert mark.x_ci == pytest.approx((0.39, 1.09))
