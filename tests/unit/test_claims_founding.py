"""The founding comparison in `optigpu claims`: its own arithmetic, predictions that say so, and what was measured."""

import json
import sys
from typing import Any

import pytest

from optigpu.claims import compare_founding, weigh
from optigpu.claims.founding import FoundingComparison
from optigpu.claims.thesis import ClaimVerdict
from optigpu.cli import main
from optigpu.documents.edge import EdgeBoard, EdgeMetric
from optigpu.report.claims import claims_document, claims_grid
from optigpu.vocabulary import utc_now
from tests.unit.claims_results import BOOK
from tests.unit.scripted_service import Answer, Call, scripted_service

RTX_5090 = "1x NVIDIA GeForce RTX 5090 32 GiB"


def founding(*boards: EdgeBoard) -> FoundingComparison:
    found = compare_founding(BOOK, boards)
    assert found is not None
    return found


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


def a_board(*rows: dict[str, Any], workers: tuple[dict[str, Any], ...] = (), **changes: Any) -> EdgeBoard:
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
    found = founding(a_board(a_device(measured), workers=(a_worker(1.25, hardware),)))
    assert (found.ratio, found.verdict) == (ratio, verdict)


@pytest.mark.parametrize(
    "board",
    [
        a_board(a_device(20.0, rank=None)),
        a_board(a_device(None)),
        a_board(a_device(20.0, board="my-own-board")),
        a_board(a_device(20.0), network=None),
        a_board(a_device(20.0), network={"family": "file", "input": (96, 96, 3)}),
    ],
    ids=["not ranked", "no energy", "another chip", "no manifest", "another network"],
)
def test_what_is_not_of_the_claim_is_left_out(board: EdgeBoard) -> None:
    assert founding(board).device is None


def test_it_is_a_row_of_the_table_and_a_part_of_the_document() -> None:
    measured = founding(a_board(a_device(20.0), workers=(a_worker(1.25),)))
    grid = claims_grid([], weigh(BOOK.thesis, []), measured)
    assert len(grid.rows) == 2
    row = dict(zip((column.heading for column in grid.columns), grid.rows[1], strict=True))
    assert (row["figure"], row["status"], row["plausibility"]) == ("455x", "claimed", "implausible")
    assert "Prediction for 96x96: at most 6.28 FPS" in row["why"]
    assert row["measured"].startswith("16x, does not hold here: 20 FPS/W by mobilenet_v2 alpha 0.35")
    document = claims_document([], weigh(BOOK.thesis, []), measured)
    assert document["founding"]["verdict"] == "does not hold here"
    assert claims_grid([], weigh(BOOK.thesis, []), founding()).rows[1][-1] == "not measured"


def run_claims(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> dict[str, Any]:
    monkeypatch.delenv("OPTIGPU_URL", raising=False)
    monkeypatch.setattr(sys, "argv", ["optigpu", "claims", "--format", "json", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("old", [False, True])
def test_the_command_reads_a_service_s_boards_and_an_older_service_has_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    page = {"boards": [a_board(a_device(20.0), workers=(a_worker(1.25),)).model_dump(mode="json")]}

    def answer(call: Call) -> Answer:
        if call.path.startswith("/v1/edge/leaderboard"):
            assert "metric=fps_per_watt" in call.path
            return Answer(404, {"detail": "There is nothing."}) if old else Answer(200, page)
        return Answer(200, {"boards": []})

    with scripted_service(answer) as (url, _):
        document = run_claims(capsys, monkeypatch, "--url", url)
    assert document["founding"]["ratio"] == (None if old else 16)
