"""Stored results of any version are shown, drawn, compared and measured again, here and on the command line."""

import json
import os
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from optigpu.documents.facts import Footprint
from optigpu.documents.result import Attribution, Result
from optigpu.documents.versions import current, facts_of
from optigpu.job.measured import replay_note, replay_request
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.report.bundle import methods
from optigpu.report.charts import CHARTS, Report, write_picture
from optigpu.report.ladder import SCENARIOS, scenario_of
from optigpu.report.rows import rows_of
from optigpu.statistics.compare import OTHER_TEXT, compare
from optigpu.vocabulary import SCHEMA_VERSION, Role, SpecError, new_id
from tests.unit.made_results import ATTRIBUTION, BASELINE, RESULTS
from tests.unit.scripted_service import Answer, Call, scripted_service
from tests.unit.test_cli import Command, optigpu

__all__ = ["optigpu"]  # the fixture
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
    write_picture(CHARTS["roofline"](Report("t", [OLD])), tmp_path / "c.svg")
    assert "bfloat16" in (tmp_path / "c.svg").read_text("utf-8")


def test_its_table_has_the_column_of_its_scenario() -> None:
    attribution = Attribution.model_validate(REPORT["attribution"])
    old = OLD | {"metrics": OLD["metrics"] | {"latency_s": OLD["metrics"]["latency_s"] | {"p90": 0.1}}}
    assert scenario_of(rows_of(attribution, [old])) is SCENARIOS["SingleStream"]


def test_it_is_measured_again_with_the_same_request() -> None:
    request = replay_request(OLD, REPORT["spec"], {})
    assert JobSpec.model_validate(request).stack[0].name == "bf16"


def test_how_it_was_measured_is_told() -> None:
    spec = {"measure": {"replicates": 1, "min_seconds": 1, "max_seconds": 3}}
    assert methods(spec, [OLD]).startswith("1 variant was measured in 1 process")


LADDER = JobSpec.model_validate(
    {
        "workload": {"kind": "generate", "prompt_tokens": 8, "new_tokens": 4},
        "model": "preset:tiny-llama-test",
        "stack": [{"name": "int8_weight_only"}, {"name": "torch_compile", "mode": "max-autotune"}],
        "plan": "ladder",
        "seed": 11,
        "measure": {"replicates": 2, "min_seconds": 1, "max_seconds": 3, "meters": ["latency", "memory"]},
        "limits": {"timeout_s": 60},
    }
)


def stored(index: int, spec: JobSpec = LADDER) -> dict[str, Any]:
    """The result of one of a job's variants, as it is stored."""
    variant = variants_of(spec)[index]
    document = BASELINE.model_dump(mode="json") | {"seed": spec.seed}
    document["variant"] |= {
        "role": variant.role,
        "label": variant.label,
        "workload": variant.workload.model_dump(mode="json"),
        "model": variant.model,
        "stack": [technique.model_dump(mode="json") for technique in variant.stack],
        "workload_digest": variant.workload_digest,
        "variant_digest": variant.digest,
    }
    return document


def request(document: dict[str, Any], spec: JobSpec | None = LADDER, **measure: Any) -> JobSpec:
    """The job of the replay."""
    known = spec.model_dump(mode="json") if spec else None
    return JobSpec.model_validate(replay_request(document, known, measure))


@pytest.mark.parametrize("index", range(len(variants_of(LADDER))))
def test_each_variant_of_a_ladder_becomes_a_job_of_that_variant_alone(index: int) -> None:
    (variant,) = variants_of(request(stored(index)))
    assert variant.digest == variants_of(LADDER)[index].digest
    assert variant.role is Role.SINGLE


def test_seed_measure_and_limits_are_those_of_then() -> None:
    made = request(stored(1))
    assert (made.seed, made.measure, made.limits) == (11, LADDER.measure, LADDER.limits)


def test_without_its_job_a_result_is_measured_by_the_defaults() -> None:
    made = request(stored(1), spec=None)
    assert made.measure == JobSpec.model_fields["measure"].default
    assert variants_of(made)[0].digest == variants_of(LADDER)[1].digest


def test_a_workload_that_does_not_exist_any_more_is_one_clear_sentence() -> None:
    document = stored(1)
    document["variant"]["workload"] = {"kind": "seance"}
    with pytest.raises(SpecError, match="the workload seance does not exist in this version"):
        request(document)


def test_a_result_of_a_later_version_is_refused() -> None:
    with pytest.raises(SpecError, match=f"schema version {SCHEMA_VERSION + 1} and this is {SCHEMA_VERSION}"):
        request(stored(1) | {"schema_version": SCHEMA_VERSION + 1})
    with pytest.raises(SpecError, match="schema version 0"):
        request(stored(1) | {"schema_version": 0})


def test_another_digest_is_said() -> None:
    document = stored(1)
    assert replay_note(document, stored(1)) is None
    assert "not exactly the same variant" in str(replay_note(document, stored(2)))


NEW_REPORT = {"spec": {"seed": 0}, "results": RESULTS, "attribution": ATTRIBUTION.model_dump(mode="json")}


@pytest.fixture
def report(tmp_path: Path) -> str:
    """A file as `optigpu run --format json` prints it, with three results."""
    path = tmp_path / "report.json"
    path.write_text(json.dumps(NEW_REPORT))
    return str(path)


@pytest.fixture
def single(tmp_path: Path) -> str:
    """A file with one result alone, as the service answers it; its name has the sign that labels begin with."""
    path = tmp_path / "result#1.json"
    path.write_text(json.dumps(RESULTS[1]))
    return str(path)


def test_two_results_of_a_file_by_their_labels(optigpu: Command, report: str) -> None:
    ran = optigpu("compare", f"{report}#baseline", f"{report}#int8_weight_only")
    assert (ran.status, ran.err) == (0, "")
    assert "int8_weight_only against baseline: generate preset:gpt2 32+64 x1 on 2x Test CPU" in ran.out
    assert "3.00x [2.94, 3.06]" in ran.out
    assert "different, better" in ran.out
    assert "single_replicate" in ran.out


def test_what_does_not_compare_needs_anyway(optigpu: Command, report: str, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    environment = RESULTS[1]["environment"] | {"hardware_class": "1x GPU"}
    other.write_text(json.dumps(RESULTS[1] | {"environment": environment}))
    refused = optigpu("compare", f"{report}#baseline", str(other))
    assert (refused.status, refused.out) == (1, "")
    assert "The hardware differs: 2x Test CPU and 1x GPU." in refused.err
    wanted = optigpu("compare", f"{report}#baseline", str(other), "--anyway")
    assert wanted.status == 0
    assert "The hardware differs" in wanted.out


@pytest.mark.parametrize("command", [("compare", "baseline"), ("replay",)], ids=lambda command: command[0])
@pytest.mark.parametrize(
    ("text", "label", "sentence"),
    [
        (None, "", "is neither the id of a result nor a readable file: No such file or directory."),
        (None, "x" * 300, "is neither the id of a result nor a readable file: File name too long."),
        ("{", "", "is not JSON"),
        ("\udcff", "", "is not UTF-8"),
        ("[]", "", "holds no result"),
        ('{"results": 7}', "", "holds no result"),
        ('{"results": [{"variant": null}]}', "", "holds no result"),
        ('{"variant": {"label": "x"}}', "", "holds no result"),
        ('{"results": []}', "", "holds no result; give a file"),
        (json.dumps(NEW_REPORT), "", "holds 3 results; choose one with"),
        (json.dumps(NEW_REPORT), "#nothing", "holds 0 results labelled 'nothing'"),
        (json.dumps(NEW_REPORT), "#nothing", "#LABEL: baseline, int8_weight_only, int8_weight_only + static"),
    ],
)
def test_a_file_without_the_result_is_one_clear_sentence(
    optigpu: Command, report: str, tmp_path: Path, command: Any, text: str | None, label: str, sentence: str
) -> None:
    path = tmp_path / "given.json"
    if text is not None:
        path.write_bytes(text.encode(errors="surrogateescape"))
    known = [f"{report}#baseline"] if command[0] == "compare" else []
    ran = optigpu(command[0], *known, f"{path}{label}")
    assert (ran.status, ran.out) == (2, "")
    assert sentence in ran.err
    assert ran.err.startswith("Error: ")


def test_a_result_is_read_from_a_pipe(optigpu: Command, report: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    Thread(target=pipe.write_text, args=(json.dumps(NEW_REPORT),), daemon=True).start()
    ran = optigpu("compare", f"{report}#baseline", f"{pipe}#int8_weight_only")
    assert (ran.status, ran.err) == (0, "")


def test_a_replay_of_a_technique_that_is_gone_says_so(optigpu: Command, tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    variant = RESULTS[0]["variant"] | {"stack": [{"name": "alchemy"}]}
    path.write_text(json.dumps(RESULTS[0] | {"variant": variant}))
    ran = optigpu("replay", str(path))
    assert (ran.status, ran.out) == (2, "")
    assert "the technique alchemy does not exist in this version" in ran.err


def test_a_replay_asks_for_the_result_and_its_job(optigpu: Command) -> None:
    result_id, job_id = new_id(), new_id()
    variant = RESULTS[0]["variant"] | {"stack": [{"name": "alchemy"}]}
    stored = RESULTS[0] | {"id": result_id, "job_id": job_id, "variant": variant}
    job: dict[str, Any] = {
        "id": job_id, "state": "succeeded", "created_at": "2026-01-01T00:00:00Z", "workload": "generate",
        "model": None, "plan": "single", "device": "cpu", "spec": {}, "schema_version": 1,
    }  # fmt: skip

    def answer(call: Call) -> Answer:
        return Answer(200, job if call.path.startswith("/v1/jobs/") else stored)

    with scripted_service(answer) as (url, calls):
        ran = optigpu("replay", result_id, "--url", url)
    assert ran.status == 2
    assert [call.path for call in calls] == [f"/v1/results/{result_id}", f"/v1/jobs/{job_id}"]
