"""`optigpu claims`: figures beside their claims, the two gaps of the thesis, and the founding comparison."""

import json
from pathlib import Path
from typing import Any

import pytest

from optigpu.claims.thesis import ClaimVerdict, FoundingComparison, compare_founding, weigh
from optigpu.documents.devices import EdgeBoard, EdgeMetric
from optigpu.vocabulary import utc_now
from tests.known import known
from tests.unit.claims_results import BOOK, a_report, a_result
from tests.unit.made_results import ATTRIBUTION, RESULTS, a_board, a_row, metric
from tests.unit.scripted_service import Answer, Call, scripted_service
from tests.unit.test_cli import Command, optigpu

__all__ = ["optigpu"]  # the fixture


@pytest.mark.parametrize(
    ("ratio", "ci", "verdict"),
    [
        # 1792 / 320 = 5.6 times the bandwidth, 209.5 / 65 = 3.2 times the arithmetic
        (8.0, (7.0, 9.0), ClaimVerdict.HOLDS),
        (8.0, (5.0, 11.0), ClaimVerdict.UNDECIDED),
        (4.0, (3.9, 4.1), ClaimVerdict.UNDECIDED),
        (2.0, (1.9, 2.1), ClaimVerdict.DOES_NOT_HOLD),
        (8.0, None, ClaimVerdict.HOLDS),
    ],
)
def test_the_thesis_is_weighed_by_the_interval_of_the_gap(
    ratio: float, ci: tuple[float, float] | None, verdict: ClaimVerdict
) -> None:
    thesis = weigh(BOOK.thesis, [a_report(1.5), a_report(ratio, ci)])
    assert (known(thesis.optimization).ratio, thesis.verdict) == (ratio, verdict)
    assert thesis.hardware.bandwidth == pytest.approx(5.6)
    assert thesis.hardware.arithmetic == pytest.approx(3.223, rel=1e-3)
    assert (thesis.hardware.smaller, thesis.hardware.larger) == ("NVIDIA T4", "NVIDIA GeForce RTX 5090")


@pytest.mark.parametrize(
    "report",
    [
        {"spec": {}, "results": RESULTS, "attribution": None},
        {"spec": {}, "results": RESULTS, "attribution": ATTRIBUTION.model_dump(mode="json") | {"best": None}},
        {"spec": {}, "results": RESULTS, "attribution": ATTRIBUTION.model_dump(mode="json") | {"best": 0}},
        a_report(9.0) | {"results": [a_result(), a_result(hardware="1x NVIDIA L4 22 GiB")]},
    ],
    ids=["no attribution", "several workloads", "the baseline is best", "two machines"],
)
def test_without_a_gain_on_one_machine_the_thesis_is_not_measured(report: dict[str, Any]) -> None:
    thesis = weigh(BOOK.thesis, [report])
    assert (thesis.optimization, thesis.verdict) == (None, ClaimVerdict.NOT_MEASURED)


@pytest.fixture
def results_file(tmp_path: Path) -> str:
    """A file as `optigpu run --format json` prints it, of a job on a T4."""
    path = tmp_path / "results.json"
    path.write_text(json.dumps(a_report(8.0, (7.0, 9.0)), default=str))
    return str(path)


def test_without_measurements_every_claim_is_shown_as_not_measured(optigpu: Command) -> None:
    document = json.loads(optigpu("claims", "--format", "json").out)
    assert [claim["id"] for claim in document["claims"]] == [claim.id for claim in BOOK.claims]
    assert {claim["measured"] for claim in document["claims"]} == {None}
    assert document["thesis"]["verdict"] == "not measured"
    out = optigpu("claims", "--format", "md").out
    # the thesis, the founding comparison and the legend below the table say it too
    assert out.count("not measured") == len(BOOK.claims) + 3
    (row,) = [line for line in optigpu("claims", "--format", "md").out.splitlines() if "68 tok/s" in line]
    assert "| implausible | 68 steps/s x 16.06 GB of weights is 1,092 GB/s" in row


def test_results_of_a_file_stand_beside_their_claims(optigpu: Command, results_file: str) -> None:
    ran = optigpu("claims", "--format", "md", "--results", results_file)
    (row,) = [line for line in ran.out.splitlines() if "GPT-2 with the stack, int8" in line]
    assert row.endswith("| 161 tok/s (1.09x the claim): int8_weight_only + torch_compile |")
    (row,) = [line for line in ran.out.splitlines() if "optimization gap" in line]
    assert "holds here" in row
    assert "5.6x the memory bandwidth and 3.2x the fp16 arithmetic" in row
    assert "8.00x [7.00, 9.00] tokens_per_s by int8_weight_only on 1x Tesla T4 15 GiB" in row


def test_a_service_s_leaderboard_is_read_page_by_page(optigpu: Command) -> None:
    four_bits = {"name": "int8_hybrid", "bits": 4}
    hybrid = a_row(
        techniques=("int8_hybrid",), result_id="h", value=metric("tokens_per_s", 555.0), job_id=None
    )
    pages = [("c2", hybrid), (None, a_row(value=metric("tokens_per_s", 333.0)))]

    def answer(call: Call) -> Answer:
        if call.path.startswith("/v1/jobs/j/results"):
            return Answer(200, json.loads(json.dumps(a_report(2.0, (1.9, 2.1)), default=str)))
        if call.path.startswith("/v1/results/h"):
            return Answer(200, json.loads(json.dumps(a_result(555.0, stack=(four_bits,)), default=str)))
        wanted = "metric=tokens_per_s" in call.path
        cursor, row = pages["cursor=c2" in call.path]
        board = a_board(row, row_count=2, next_cursor=cursor).model_dump(mode="json")
        return Answer(200, {"boards": [board] if wanted else []})

    with scripted_service(answer) as (url, calls):
        ran = optigpu("claims", "--format", "json", "--url", url)
    document = json.loads(ran.out)
    (claim,) = [each for each in document["claims"] if each["id"] == "t4-gpt2-int8"]
    assert (claim["measured"]["value"], claim["measured"]["of_claim"]) == (333.0, pytest.approx(333 / 148))
    (claim,) = [each for each in document["claims"] if each["id"] == "t4-gpt2-int4"]
    assert claim["measured"]["value"] == 555.0
    assert document["thesis"]["verdict"] == "does not hold here"
    assert sum("metric=tokens_per_s" in call.path for call in calls) == 2


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"results": 3}', '{"results": [{"variant": 1}]}', "\x00"])
def test_a_file_that_is_no_report_is_refused_and_says_how_to_make_one(
    optigpu: Command, tmp_path: Path, text: str
) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    ran = optigpu("claims", "--results", str(path))
    assert (ran.status, ran.out) == (2, "")
    assert "is not the report of a job; write one with `optigpu run --format json" in ran.err


RTX_5090 = "1x NVIDIA GeForce RTX 5090 32 GiB"


def founding(*boards: EdgeBoard) -> FoundingComparison:
    return known(compare_founding(BOOK, boards))


def a_device(fps_per_watt: float | None, **changes: Any) -> dict[str, Any]:
    figures: dict[EdgeMetric, dict[str, float | None]] = {metric: {"value": 10.0} for metric in EdgeMetric}
    figures[EdgeMetric.FPS_PER_WATT] = {"value": fps_per_watt}
    row = {
        "rank": 1, "device_id": "d", "device": None, "board": "esp32s3-n16r8", "source": "device", "report_id": "r",
        "received_at": utc_now(), "firmware_sha256": "f" * 64, "runner_version": "1", "clock_hz": 240_000_000,
        "windows": 5, "inferences": 500, "power_source": "ina226", "figures": figures,
    }  # fmt: skip
    return row | changes


def a_worker(fps_per_watt: float | None, hardware: str = RTX_5090, **changes: Any) -> dict[str, Any]:
    row = {
        "result_id": "w", "job_id": None, "hardware": hardware, "device": "cuda", "backend": "torch",
        "label": "baseline", "model": "path:m", "likeness": "network", "batch_size": 1, "measured_at": utc_now(),
        "images_per_s": 125.0, "latency_s": 0.008, "power_w": 100.0, "energy_per_inference_j": 0.8,
        "energy_above_idle_j": 0.1, "fps_per_watt": fps_per_watt, "energy_source": "NVML", "energy_scope": "the GPU",
    }  # fmt: skip
    return row | changes


def an_edge_board(
    *rows: dict[str, Any], workers: tuple[dict[str, Any], ...] = (), **changes: Any
) -> EdgeBoard:
    board = {
        "model_sha256": "a" * 64, "input_source": "fixed", "runner": "tflm-native", "metric": "fps_per_watt",
        "network": {"family": "mobilenet_v2", "alpha": "0.35", "input": (96, 96, 3), "classes": 10},
        "unit": "1/J", "better": "higher", "rows": rows, "row_count": len(rows), "workers": workers,
    }  # fmt: skip
    return EdgeBoard.model_validate(board | changes)


def test_its_own_figures_are_computed_again() -> None:
    arithmetic = founding().arithmetic
    small, large = arithmetic.smaller, arithmetic.larger
    assert (small.fps, small.fps_per_watt, small.price) == (50, 100, 700)
    assert [large.fps, large.fps_per_watt] == pytest.approx([125, 125 / 575])
    assert [arithmetic.ratio, arithmetic.claimed_ratio] == pytest.approx([460, 455])
    # 2 cores x 240 MHz x 16 MACs over 300 million MACs; 104.8 TFLOP/s over 600 million operations
    assert small.peak_fps == pytest.approx(7.68e9 / 300e6)
    assert large.peak_fps == pytest.approx(104.8e12 / 600e6, rel=1e-3)
    assert arithmetic.peak_ratio == pytest.approx((25.6 / 0.5) / (174_667 / 575), rel=1e-3)
    assert "50 FPS at 0.5 W = 100 FPS/W against 125 FPS at 575 W = 0.217 FPS/W" in arithmetic.sentences[0]
    assert "costs 357 times as much and is 2.5 times as fast" in arithmetic.sentences[0]


@pytest.mark.parametrize(
    ("measured", "hardware", "ratio", "verdict"),
    [
        (20.0, RTX_5090, 16, ClaimVerdict.DOES_NOT_HOLD),
        (1000.0, RTX_5090, 800, ClaimVerdict.HOLDS),
        (20.0, "1x NVIDIA H200 140 GiB", 16, ClaimVerdict.UNDECIDED),
        (20.0, "AMD EPYC 7763 64 cores", 16, ClaimVerdict.UNDECIDED),
    ],
)
def test_what_was_measured_decides_only_on_the_named_hardware(
    measured: float, hardware: str, ratio: float, verdict: ClaimVerdict
) -> None:
    found = founding(an_edge_board(a_device(measured), workers=(a_worker(1.25, hardware),)))
    assert (found.ratio, found.verdict) == (ratio, verdict)


@pytest.mark.parametrize(
    "board",
    [
        an_edge_board(a_device(20.0, rank=None)),
        an_edge_board(a_device(None)),
        an_edge_board(a_device(20.0, board="my-own-board")),
        an_edge_board(a_device(20.0), network=None),
        an_edge_board(a_device(20.0), network={"family": "file", "input": (96, 96, 3)}),
    ],
    ids=["not ranked", "no energy", "another chip", "no manifest", "another network"],
)
def test_what_is_not_of_the_claim_is_left_out(board: EdgeBoard) -> None:
    assert founding(board).device is None
