"""`optigpu claims`: figures stand beside their claims, the thesis weighs its two gaps, and all is shown."""

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from optigpu.claims import from_results, weigh
from optigpu.claims.thesis import ClaimVerdict
from optigpu.cli import main
from optigpu.report.claims import claim_rows, claims_grid
from optigpu.vocabulary import SpecError
from tests.unit.claims_results import BOOK, a_report, a_result
from tests.unit.made_results import ATTRIBUTION, RESULTS, a_row, metric
from tests.unit.scripted_service import Answer, Call, scripted_service


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
    assert thesis.optimization is not None
    assert (thesis.optimization.ratio, thesis.verdict) == (ratio, verdict)
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


def test_the_machine_that_was_measured_is_weighed_against_a_named_one() -> None:
    thesis = weigh(BOOK.thesis, [a_report(2.0, hardware="1x NVIDIA L4 22 GiB")], "H200")
    assert (thesis.hardware.smaller, thesis.hardware.larger) == ("NVIDIA L4", "NVIDIA H200")
    assert thesis.hardware.bandwidth == pytest.approx(16.0)
    turned = weigh(BOOK.thesis, [a_report(2.0, hardware="1x NVIDIA H200 140 GiB")], "NVIDIA L4")
    assert turned.hardware == thesis.hardware


def test_hardware_that_is_not_in_the_catalog_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(SpecError, match=r"no hardware 'RTX 5091'; did you mean .*RTX 5090"):
        weigh(BOOK.thesis, [], "RTX 5091")


class Ran(NamedTuple):
    status: int
    out: str
    err: str


def claims(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Ran:
    """Runs `optigpu claims` in this process."""
    monkeypatch.delenv("OPTIGPU_URL", raising=False)
    monkeypatch.setattr(sys, "argv", ["optigpu", "claims", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    return Ran(int(exit_.value.code or 0), *capsys.readouterr())


@pytest.fixture
def results_file(tmp_path: Path) -> str:
    """A file as `optigpu run --format json` prints it, of a job on a T4."""
    path = tmp_path / "results.json"
    path.write_text(json.dumps(a_report(8.0, (7.0, 9.0)), default=str))
    return str(path)


def test_without_measurements_every_claim_is_shown_as_not_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    document = json.loads(claims(capsys, monkeypatch, "--format", "json").out)
    assert [claim["id"] for claim in document["claims"]] == [claim.id for claim in BOOK.claims]
    assert {claim["measured"] for claim in document["claims"]} == {None}
    assert document["thesis"]["verdict"] == "not measured"
    out = claims(capsys, monkeypatch, "--format", "md").out
    # the thesis, the founding comparison and the legend below the table say it too
    assert out.count("not measured") == len(BOOK.claims) + 3
    (row,) = [
        line for line in claims(capsys, monkeypatch, "--format", "md").out.splitlines() if "68 tok/s" in line
    ]
    assert "| implausible | 68 steps/s x 16.06 GB of weights is 1,092 GB/s" in row


def test_results_of_a_file_stand_beside_their_claims(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, results_file: str
) -> None:
    ran = claims(capsys, monkeypatch, "--format", "md", "--results", results_file)
    (row,) = [line for line in ran.out.splitlines() if "GPT-2 with the stack, int8" in line]
    assert row.endswith("| 161 tok/s (1.09x the claim): int8_weight_only + torch_compile |")
    (row,) = [line for line in ran.out.splitlines() if "optimization gap" in line]
    assert "holds here" in row
    assert "5.6x the memory bandwidth and 3.2x the fp16 arithmetic" in row
    assert "8.00x [7.00, 9.00] tokens_per_s by int8_weight_only on 1x Tesla T4 15 GiB" in row


def test_bytes_that_were_counted_on_other_hardware_say_where(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "results.json"
    result = a_result(129e6, name="weight_bytes", stack=("int8_hybrid",))
    path.write_text(json.dumps(a_report(1.0) | {"results": [result]}, default=str))
    ran = claims(capsys, monkeypatch, "--format", "md", "--results", str(path))
    (row,) = [line for line in ran.out.splitlines() if line.startswith("| GPT-2 after, int8")]
    assert row.endswith("| 129 MB (1.01x the claim): int8_hybrid on 1x Tesla T4 15 GiB |")
    (row,) = [
        line
        for line in ran.out.splitlines()
        if line.startswith("| fine-tuning Llama-3.2-3B, bf16 | 25.5 GiB")
    ]
    assert row.endswith("| not measured |")
    assert not re.search(r"\de[+-]\d", ran.out)


def test_a_share_beside_its_claim_is_in_percent() -> None:
    claim = BOOK.claim("gpu-poor-gpt2-saved")
    before, after = (
        a_result(value, name="weight_bytes", stack=stack)
        for value, stack in ((498e6, ()), (129e6, ("int8_hybrid",)))
    )
    rows = {row.claim.id: row for row in claim_rows(BOOK, from_results([before, after]))}
    assert rows[claim.id].of_claim == pytest.approx((1 - 129 / 498) / 0.73)
    shown = claims_grid([rows[claim.id]], weigh(BOOK.thesis, [])).rows[1][-1]
    assert shown == "74.1% (1.02x the claim): int8_hybrid instead of baseline on 1x Tesla T4 15 GiB"


def test_a_measurement_within_a_claimed_range_is_as_claimed() -> None:
    claim = BOOK.claim("layers-compile-first-call")
    assert (claim.over(30), claim.over(45), claim.over(60)) == (1, 1, 1)
    assert (claim.over(15), claim.over(120)) == (0.5, 2.0)


def test_csv_holds_the_figures_in_the_claim_s_unit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, results_file: str
) -> None:
    ran = claims(capsys, monkeypatch, "--format", "csv", "--results", results_file)
    records = {record["id"]: record for record in csv.DictReader(io.StringIO(ran.out))}
    assert len(records) == len(BOOK.claims)
    record = records["t4-gpt2-int8"]
    assert (record["value"], record["unit"], record["measured"]) == ("148.0", "tok/s", "161.2")
    assert records["4090-flash-8192"]["rules"] == "compute_peak"
    assert records["4090-flash-8192"]["measured"] == ""
    assert (records["layers-compile"]["value"], records["layers-compile"]["to"]) == ("1.3", "1.8")
    assert records["mistral-fp16"]["not_measurable"] == "The text does not say which workload ran."
    assert records["t4-gpt2-int8"]["not_measurable"] == ""


def test_a_service_s_leaderboard_is_read_page_by_page(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
        board: dict[str, Any] = {
            "workload_digest": "w",
            "workload": {},
            "model": None,
            "metric": "tokens_per_s",
            "unit": "1/s",
        }
        board |= {
            "better": "higher",
            "rows": [row.model_dump(mode="json")],
            "row_count": 2,
            "next_cursor": cursor,
        }
        return Answer(200, {"boards": [board] if wanted else []})

    with scripted_service(answer) as (url, calls):
        ran = claims(capsys, monkeypatch, "--format", "json", "--url", url)
    document = json.loads(ran.out)
    (claim,) = [each for each in document["claims"] if each["id"] == "t4-gpt2-int8"]
    assert (claim["measured"]["value"], claim["measured"]["of_claim"]) == (333.0, pytest.approx(333 / 148))
    (claim,) = [each for each in document["claims"] if each["id"] == "t4-gpt2-int4"]
    assert claim["measured"]["value"] == 555.0
    assert document["thesis"]["verdict"] == "does not hold here"
    assert sum("metric=tokens_per_s" in call.path for call in calls) == 2


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"results": 3}', '{"results": [{"variant": 1}]}', "\x00"])
def test_a_file_that_is_no_report_is_refused_and_says_how_to_make_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    ran = claims(capsys, monkeypatch, "--results", str(path))
    assert (ran.status, ran.out) == (2, "")
    assert "is not the report of a job; write one with `optigpu run --format json" in ran.err


def test_a_file_that_is_not_there_and_unknown_hardware_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran = claims(capsys, monkeypatch, "--results", str(tmp_path / "none.json"))
    assert (ran.status, "cannot be read" in ran.err) == (2, True)
    ran = claims(capsys, monkeypatch, "--against", "a toaster")
    assert (ran.status, "`GET /v1/hardware` lists" in ran.err) == (2, True)


def test_claims_load_neither_torch_nor_numpy() -> None:
    heavy = {"torch", "transformers", "numpy", "tensorflow", "triton"}
    code = f"import sys, optigpu.claims as c; c.baselines(); print(sorted({heavy!r} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
