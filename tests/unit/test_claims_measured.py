"""`optigpu claims`: each claim finds what was measured of the same thing, the thesis its two gaps, and all is shown."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from optigpu.claims import Measured, baselines, from_leaderboard, from_results, measured_for, weigh
from optigpu.claims.thesis import ClaimVerdict
from optigpu.cli import main
from optigpu.documents.views import LeaderboardRow
from optigpu.vocabulary import SpecError, utc_now
from tests.unit.made_results import ATTRIBUTION, RESULTS, metric
from tests.unit.scripted_service import Answer, Call, scripted_service

BOOK = baselines()
T4 = "1x Tesla T4 15 GiB"
RTX_4090 = "1x NVIDIA GeForce RTX 4090 24 GiB"
GPT2_INT8 = BOOK.claim("t4-gpt2-int8")


def a_result(
    value: float | None = 161.2,
    *,
    hardware: str = T4,
    stack: tuple[str, ...] = ("int8_weight_only", "torch_compile"),
    name: str = "tokens_per_s",
    valid: bool = True,
    **variant: Any,
) -> dict[str, Any]:
    """A result document with one figure."""
    result = json.loads(json.dumps(RESULTS[0]))
    result["metrics"] = {
        name: metric(name, value, None if value is None else (0.9 * value, 1.1 * value)).model_dump()
    }
    result["environment"]["hardware_class"] = hardware
    result["verdict"] |= {"valid": valid}
    result["variant"] |= {"label": " + ".join(stack), "stack": [{"name": each} for each in stack]} | variant
    found: dict[str, Any] = result
    return found


def found_for(claim_id: str, *results: dict[str, Any]) -> float | None:
    """The figure that a claim finds among results."""
    found = measured_for(BOOK.claim(claim_id), from_results(results))
    return found.value if found else None


def test_a_claim_finds_the_best_figure_of_the_same_thing_on_hardware_of_its_name() -> None:
    assert found_for("t4-gpt2-int8", a_result(100.0), a_result(161.2), a_result(90.0)) == 161.2


def test_without_results_nothing_was_measured() -> None:
    assert found_for("t4-gpt2-int8") is None


@pytest.mark.parametrize(
    "other",
    [
        {"hardware": "1x NVIDIA L4 22 GiB"},
        {"hardware": "Tesla T4 simulator 2 cores"},
        {"stack": ("fp16",)},
        {"stack": ()},
        {"stack": ("int8_weight_only", "nf4")},
        {"model": "preset:gpt2-medium"},
        {"workload": {"kind": "prefill", "batch_size": 1}},
        {"name": "requests_per_s"},
        {"valid": False},
        {"value": None},
    ],
    ids=str,
)
def test_a_figure_of_something_else_is_not_taken_for_it(other: dict[str, Any]) -> None:
    assert found_for("t4-gpt2-int8", a_result(**other)) is None


@pytest.mark.parametrize(
    "model", ["preset:gpt2", "hub:openai-community/gpt2", "hub:openai-community/gpt2@607a30d", "gpt2"]
)
def test_a_model_is_the_same_by_any_of_its_names(model: str) -> None:
    assert found_for("t4-gpt2-int8", a_result(5.0, model=model)) == 5.0


def test_quantized_weights_may_be_computed_in_16_bits() -> None:
    assert found_for("t4-gpt2-int8", a_result(5.0, stack=("fp16", "int8_weight_only"))) == 5.0
    assert found_for("t4-gpt2-fp16", a_result(5.0, stack=("fp16", "int8_weight_only"))) is None


def test_a_naive_claim_takes_no_optimized_figure() -> None:
    hardware = "1x NVIDIA GeForce RTX 5090 32 GiB"
    assert found_for("5090-gpt2", a_result(5.0, hardware=hardware, stack=("torch_compile",))) is None
    assert found_for("5090-gpt2", a_result(4.0, hardware=hardware, stack=())) == 4.0


@pytest.mark.parametrize(
    ("size", "dtype", "expected"), [(4096, "float16", 50.0), (2048, "float16", None), (4096, "float32", None)]
)
def test_a_matmul_is_the_same_by_size_and_dtype(size: int, dtype: str, expected: float | None) -> None:
    workload = {"kind": "matmul", "sizes": [size], "dtypes": [dtype]}
    result = a_result(50.0, name="tflops", stack=(), model=None, workload=workload)
    assert found_for("t4-matmul-fp16", result) == expected


@pytest.mark.parametrize(
    ("implementation", "length", "dtype", "heads", "expected"),
    [
        ("standard", 1024, "float16", 12, 0.002),
        ("fused", 1024, "float16", 12, None),
        ("standard", 2048, "float16", 12, None),
        ("standard", 1024, "float32", 12, None),
        ("standard", 1024, "float16", 16, None),
    ],
)
def test_attention_is_the_same_by_implementation_length_dtype_and_heads(
    implementation: str, length: int, dtype: str, heads: int, expected: float | None
) -> None:
    workload = {
        "kind": "attention", "lengths": [length], "implementations": [implementation], "batch_size": 4,
        "heads": heads, "head_size": 64, "dtype": dtype,
    }  # fmt: skip
    found = a_result(0.002, name="latency_s", hardware=RTX_4090, stack=(), workload=workload, model=None)
    assert found_for("4090-attention-1024", found) == expected


def test_fused_attention_is_found_for_a_claim_of_it() -> None:
    workload = {"kind": "attention", "lengths": [512], "implementations": ["fused"], "dtype": "float16"}
    found = a_result(3e-4, name="latency_s", hardware=RTX_4090, stack=(), workload=workload, model=None)
    assert found_for("4090-flash-512", found) == 3e-4
    assert found_for("4090-attention-512", found) is None


@pytest.mark.parametrize("model", ["preset:resnet-50", "hub:microsoft/resnet-50"])
def test_an_image_model_is_the_same_by_any_of_its_names(model: str) -> None:
    workload = {"kind": "classify", "batch_size": 32, "image_size": None}
    found = a_result(0.012, name="latency_s", hardware=RTX_4090, stack=(), workload=workload, model=model)
    assert found_for("4090-resnet-eager", found) == 0.012


def test_the_lowest_is_the_best_of_what_should_be_low() -> None:
    hardware, workload = "1x NVIDIA GeForce RTX 3090 24 GiB", {"kind": "generate", "batch_size": 1}
    results = [
        a_result(
            value,
            name="peak_bytes",
            hardware=hardware,
            stack=("awq",),
            model="preset:llama-3.1-8b",
            workload=workload,
        )
        for value in (6.5e9, 5.9e9)
    ]
    assert found_for("3090-llama-awq-memory", *results) == 5.9e9
    results[1]["variant"]["workload"] = workload | {"batch_size": 8}
    assert found_for("3090-llama-awq-memory", *results) == 6.5e9


def a_row(**changes: Any) -> LeaderboardRow:
    """A row of a leaderboard, as a service sends it."""
    fields: dict[str, Any] = {
        "rank": 1, "result_id": "r", "job_id": "j", "source": "worker", "measured_at": utc_now(),
        "workload": {"kind": "generate", "batch_size": 1}, "workload_digest": "w", "variant_digest": "v",
        "model": "preset:gpt2", "label": "int8_weight_only", "techniques": ("int8_weight_only",), "backend": "torch",
        "device": "cuda", "hardware": T4, "metric": "tokens_per_s",
        "value": metric("tokens_per_s", 222.0, (220.0, 224.0)),
    }  # fmt: skip
    return LeaderboardRow.model_validate(fields | changes)


def test_a_row_of_the_leaderboard_is_as_good_as_a_result() -> None:
    found = measured_for(GPT2_INT8, from_leaderboard([a_row()]))
    assert isinstance(found, Measured)
    assert (found.value, found.ci, found.label) == (222.0, (220.0, 224.0), "int8_weight_only")
    assert (
        measured_for(GPT2_INT8, from_leaderboard([a_row(value=metric("tokens_per_s", None, reason="x"))]))
        is None
    )


def a_report(ratio: float, ci: tuple[float, float] | None = None, hardware: str = T4) -> dict[str, Any]:
    """A job whose best variant gained that much."""
    attribution = ATTRIBUTION.model_dump(mode="json")
    attribution["rows"][1]["speedup"] |= {"ratio": ratio, "ci": ci}
    return {"spec": {}, "results": [a_result(hardware=hardware)], "attribution": attribution}


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
    """A file as `optigpu run --json` prints it, of a job on a T4."""
    path = tmp_path / "results.json"
    path.write_text(json.dumps(a_report(8.0, (7.0, 9.0)), default=str))
    return str(path)


def test_without_measurements_every_claim_is_shown_as_not_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    document = json.loads(claims(capsys, monkeypatch, "--json").out)
    assert [claim["id"] for claim in document["claims"]] == [claim.id for claim in BOOK.claims]
    assert {claim["measured"] for claim in document["claims"]} == {None}
    assert document["thesis"]["verdict"] == "not measured"
    out = claims(capsys, monkeypatch).out
    assert out.count("not measured") == len(BOOK.claims) + 1
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


def test_a_service_s_leaderboard_is_read_page_by_page(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = [("c2", a_row(label="slow", job_id=None)), (None, a_row(value=metric("tokens_per_s", 333.0)))]

    def answer(call: Call) -> Answer:
        if call.path.startswith("/v1/jobs/j/results"):
            return Answer(200, json.loads(json.dumps(a_report(2.0, (1.9, 2.1)), default=str)))
        wanted = "metric=tokens_per_s" in call.path
        cursor, row = pages["cursor=c2" in call.path]
        page = {"metric": "tokens_per_s", "unit": "1/s", "better": "higher"}
        rows = [row.model_dump(mode="json")] if wanted else []
        return Answer(200, page | {"rows": rows, "next_cursor": cursor if wanted else None})

    with scripted_service(answer) as (url, calls):
        ran = claims(capsys, monkeypatch, "--json", "--url", url)
    document = json.loads(ran.out)
    (claim,) = [each for each in document["claims"] if each["id"] == "t4-gpt2-int8"]
    assert claim["measured"]["value"] == 333.0
    assert claim["measured"]["of_claim"] == pytest.approx(333 / 148)
    assert document["thesis"]["verdict"] == "does not hold here"
    assert sum("tokens_per_s" in call.path for call in calls) == 2


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"results": 3}', '{"results": [{"variant": 1}]}', "\x00"])
def test_a_file_that_is_no_report_is_refused_and_says_how_to_make_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    ran = claims(capsys, monkeypatch, "--results", str(path))
    assert (ran.status, ran.out) == (2, "")
    assert "is not the report of a job; write one with `optigpu run --json" in ran.err


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
