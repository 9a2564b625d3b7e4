"""The benchmark of formats of weights: its jobs and its table. Figures are made up."""

from pathlib import Path

import pytest

from benchmarks.bits import CASES, FIGURES, markdown, shortened
from benchmarks.engines import draw
from optigpu.documents.result import Attribution, AttributionRow
from optigpu.job.plan import variants_of
from optigpu.vocabulary import Document, Role, VariantStatus
from tests.unit.made_reports import PARETO_REPORT
from tests.unit.made_results import GENERATE


@pytest.mark.parametrize(("name", "engines"), [("tiny", 2), ("small", 3)])
def test_a_job_has_our_formats_beside_the_engines_that_run_the_model(name: str, engines: int) -> None:
    variants = variants_of(CASES[name].spec())
    assert [each.label for each in variants] == [
        "baseline",
        *(stack.name for stack in CASES[name].stacks[1:]),
    ]
    assert len({each.backend for each in variants}) == engines
    weights = [each.stack[0].model_dump() for each in variants if each.stack and each.backend == "torch"]
    assert {each["weights"] for each in weights} == {"w3k", "w4", "w4k", "w8", "bf16"}
    assert "quality" in CASES[name].spec().measure.meters


@pytest.mark.parametrize("name", ["sequential_tiny", "sequential_small"])
def test_sequential_calibration_is_beside_w4_and_q4_0(name: str) -> None:
    first, *sequential, last = [stack.techniques[0] for stack in CASES[name].stacks[1:]]
    assert first == {"name": "native_decode"}
    assert {each["calibration"] for each in sequential} == {"sequential"}
    assert last["type"] == "Q4_0"


def document() -> Document:
    missing = AttributionRow(
        index=7, role=Role.SINGLE, label="ik IQ4_K", status=VariantStatus.UNSUPPORTED, reason="not installed"
    )
    done = AttributionRow(index=0, role=Role.SINGLE, label="baseline", status=VariantStatus.SUCCEEDED)
    return {
        "spec": {"model": "bundled:tiny", "name": "bits", "workload": GENERATE},
        "results": list(PARETO_REPORT.results),
        "attribution": Attribution(metric="tokens_per_s", rows=(done, missing), best=0).model_dump(
            mode="json"
        ),
    }


def test_the_table_goes_from_the_fewest_bytes_to_the_most_and_says_what_is_missing() -> None:
    page = markdown(document(), "bits_tiny.svg").splitlines()
    assert page[2] == "![Bytes over divergence](bits_tiny.svg)"
    rows = [line.split(" | ") for line in page if line.startswith("| ")][2:]
    sizes = [float(row[1]) for row in rows]
    assert sizes == sorted(sizes)
    assert len(sizes) == len(PARETO_REPORT.results)
    assert "- ik IQ4_K: not installed" in page


def test_a_file_has_what_its_table_needs_and_is_no_longer() -> None:
    metrics = dict.fromkeys((*FIGURES, "tokens_per_s"), 1.0)
    made = {"spec": {}, "results": [{"id": "a", "facts": {"long": 1}, "metrics": metrics}]}
    assert shortened(made) == {
        "spec": {},
        "results": [{"id": "a", "metrics": dict.fromkeys(FIGURES, 1.0)}],
    }


def test_the_chart_is_drawn_from_the_file(tmp_path: Path) -> None:
    draw(document(), tmp_path / "c.svg", "bits")
    assert "Bytes of the weights over the divergence from fp32" in (tmp_path / "c.svg").read_text()
