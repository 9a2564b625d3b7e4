"""A report that version 1 of the documents wrote is still read: shown, drawn, compared, measured again, resumed."""

import json
from pathlib import Path
from typing import Any

import pytest

from optigpu.documents.older import current, facts_of
from optigpu.documents.result import Attribution, Result
from optigpu.documents.shapes import Footprint
from optigpu.job.replay import replay_request
from optigpu.job.spec import JobSpec
from optigpu.report.charts import roofline_chart
from optigpu.report.rows import rows_of
from optigpu.report.scenario import SCENARIOS, scenario_of
from optigpu.statistics.compare import OTHER_TEXT, compare
from optigpu.vocabulary import SCHEMA_VERSION
from tests.unit.made_results import RESULTS

REPORT: dict[str, Any] = json.loads((Path(__file__).parent / "report_version_1.json").read_text("utf-8"))
OLD: dict[str, Any] = REPORT["results"][0]


def with_facts(**changes: Any) -> dict[str, Any]:
    new = current(OLD)
    return new | {"facts": new["facts"] | changes}


def test_what_version_1_recorded_is_found_under_todays_names() -> None:
    assert OLD["schema_version"] == 1
    facts = facts_of(OLD)
    assert facts["dtype"] == OLD["details"]["dtype"] == "bfloat16"
    assert facts["versions"] == {"transformers": OLD["details"]["transformers"]}
    assert "bundled" in facts["weights"]["reasons"]["revision"]
    assert facts["recorded"] == {}
    assert current(OLD)["schema_version"] == SCHEMA_VERSION
    assert "details" in OLD, "the stored document itself is left alone"


def test_what_only_people_read_is_recorded() -> None:
    old = OLD | {"details": OLD["details"] | {"int8_layers": 16}}
    assert facts_of(old)["recorded"] == {"int8_layers": 16}


def test_an_earlier_attempt_of_a_job_counts_though_it_was_stored_before() -> None:
    result = Result.model_validate(current(OLD))
    assert result.facts.side_by_side == (0,)
    assert isinstance(result.facts.footprint, Footprint)
    assert result.facts.roofline is not None
    assert result.facts.roofline.dtype == "bfloat16"


def test_todays_documents_are_left_as_they_are() -> None:
    assert current(RESULTS[0]) == RESULTS[0]


def test_it_is_compared_with_one_of_today() -> None:
    quality = facts_of(OLD)["quality"]
    same = compare(OLD, with_facts())
    other = compare(OLD, with_facts(quality=quality | {"tokens_sha256": "another text"}))
    assert same.metrics["tokens_per_s"].ratio == 1.0
    assert same.metrics["kld_mean"].ratio == 1.0
    assert other.metrics["kld_mean"].reason == OTHER_TEXT


@pytest.mark.slow
def test_it_is_drawn_under_its_roofline(tmp_path: Path) -> None:
    roofline_chart("t", [OLD], tmp_path / "c.svg")
    assert "bfloat16" in (tmp_path / "c.svg").read_text("utf-8")


def test_its_table_has_the_column_of_its_scenario() -> None:
    attribution = Attribution.model_validate(REPORT["attribution"])
    old = OLD | {"metrics": OLD["metrics"] | {"latency_s": OLD["metrics"]["latency_s"] | {"p90": 0.1}}}
    assert scenario_of(rows_of(attribution, [old])) is SCENARIOS["SingleStream"]


def test_it_is_measured_again_with_the_same_request() -> None:
    request = replay_request(OLD, REPORT["spec"], {})
    assert JobSpec.model_validate(request).stack[0].name == "bf16"


@pytest.mark.parametrize("document", [{}, {"schema_version": 0}, {"schema_version": 2, "facts": None}])
def test_a_document_without_facts_has_none(document: dict[str, Any]) -> None:
    assert facts_of(document) in ({}, {"recorded": {}})
