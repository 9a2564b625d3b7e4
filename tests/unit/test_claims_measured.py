"""`optigpu claims`: figures stand beside their claims, the thesis weighs its two gaps, and all is shown."""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from optigpu.claims import weigh
from optigpu.claims.thesis import ClaimVerdict
from optigpu.cli import main
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
