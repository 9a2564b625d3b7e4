"""The benchmark of engines: its jobs, its table, and its ratios to the engines' own tools. Figures are made up."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine_cases import CASES, EAGER
from benchmarks.engines import LEAST_ENGINES, draw, engines_of, markdown
from optigpu.conductor.processes.residents import MOST_RESIDENT
from optigpu.documents.result import Attribution, AttributionRow
from optigpu.job.plan import variants_of
from optigpu.vocabulary import Role, VariantStatus
from tests.unit.made_reports import PARETO_REPORT, TITLE, with_metrics
from tests.unit.made_results import GENERATE

MINUTE_S = 60


def test_the_jobs_fit_into_their_budgets() -> None:
    assert sum(case.budget_s for name, case in CASES.items() if name != "small") <= 25 * MINUTE_S
    assert CASES["small"].budget_s <= 5 * MINUTE_S
    assert CASES["llama-3.2-1b"].budget_s <= 12 * MINUTE_S
    for case in CASES.values():
        assert case.spec().limits.timeout_s == case.budget_s


@pytest.mark.parametrize("name", CASES)
def test_a_job_has_every_engine_among_the_variants_that_take_turns(name: str) -> None:
    case = CASES[name]
    variants = variants_of(case.spec())
    assert [each.label for each in variants] == ["baseline", *(stack.name for stack in case.stacks[1:])]
    assert case.stacks[0] == EAGER
    together = {each.backend for each in variants[:MOST_RESIDENT]}
    assert together == {each.backend for each in variants}
    assert len(together) >= LEAST_ENGINES
    assert ("quality" in case.spec().measure.meters) is (not case.model.startswith("preset:"))


MISSING = "onnxruntime is not installed"
ROWS = (
    AttributionRow(index=0, role=Role.SINGLE, label="baseline", status=VariantStatus.SUCCEEDED),
    AttributionRow(index=6, role=Role.SINGLE, label="wrong", status=VariantStatus.SUCCEEDED),
    AttributionRow(
        index=7, role=Role.SINGLE, label="onnxruntime", status=VariantStatus.UNSUPPORTED, reason=MISSING
    ),
)


def document(**metrics: tuple[float, ...]) -> dict[str, Any]:
    """A job's file: a baseline, a result that is not valid, and an engine that is missing."""
    chosen = [PARETO_REPORT.results[0], PARETO_REPORT.results[6]]
    attribution = Attribution(metric="tokens_per_s", rows=ROWS, best=0).model_dump(mode="json")
    spec = {"workload": GENERATE, "model": "bundled:tiny", "name": "engines side by side"}
    return {
        "spec": spec,
        "results": [with_metrics(dict(each), **metrics) for each in chosen],
        "attribution": attribution,
        "budget_s": 300.0,
        "seconds": 123.4,
        "stopped": None,
    }


def test_the_table_has_every_figure_and_why_an_engine_has_none() -> None:
    page = markdown(document(perplexity=(21.5,)), "engines_tiny.svg").splitlines()
    assert page[0] == "## `bundled:tiny`"
    assert page[2] == "![Speed over bytes and over divergence](engines_tiny.svg)"
    (headings,) = (line for line in page if line.startswith("| variant"))
    assert headings == (
        "| variant | tokens/s | TTFT (ms) | weights (MB) | KLD (nat) | top-1 (%) | perplexity | status |"
    )
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in page if line.startswith("| ")}
    assert rows["baseline *"] == "| baseline * | 15.1 ±0.6 | 100 | 498 | 0 ±0 | 100 | 21.5 | ok |"
    assert rows["wrong"].startswith("| wrong | 2.20 ±0.088 ! |")
    assert rows["onnxruntime"] == "| onnxruntime | - | - | - | - | - | - | unsupported |"
    assert f"- onnxruntime: unsupported: {MISSING}" in page
    assert "The job took 123 s of the 300 s that it may take." in page


def test_a_figure_that_no_engine_has_has_no_column() -> None:
    assert "perplexity" not in markdown(document(), "c.svg")


def test_only_engines_with_a_valid_result_count() -> None:
    found = document()
    assert engines_of(found) == {"torch"}
    wrong = [each | {"verdict": {"valid": False}} for each in found["results"]]
    assert engines_of(found | {"results": wrong}) == set()


def test_the_chart_is_drawn_from_the_file(tmp_path: Path) -> None:
    draw(document(), tmp_path / "c.svg")
    said = (tmp_path / "c.svg").read_text()
    assert "Speed over the bytes of the weights" in said
    assert TITLE.split(" on ")[1] in said
