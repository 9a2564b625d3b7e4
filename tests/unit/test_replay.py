"""The request of a replay: exactly the stored variant, upgraded where it is old, refused where it cannot be."""

from typing import Any

import pytest

from optigpu.job.plan import variants_of
from optigpu.job.replay import replay_note, replay_request, upgraded
from optigpu.job.spec import JobSpec
from optigpu.vocabulary import SCHEMA_VERSION, Role, SpecError
from tests.unit.made_results import BASELINE

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


def test_a_technique_that_does_not_exist_any_more_is_one_clear_sentence() -> None:
    document = stored(1)
    document["variant"]["stack"] = [{"name": "alchemy", "gold": 1}]
    with pytest.raises(
        SpecError, match=r"the technique alchemy does not exist in this version, which has fp16"
    ):
        request(document)


def test_a_workload_that_does_not_exist_any_more_is_one_clear_sentence() -> None:
    document = stored(1)
    document["variant"]["workload"] = {"kind": "seance"}
    with pytest.raises(SpecError, match="the workload seance does not exist in this version"):
        request(document)


def test_a_result_of_a_later_version_is_refused() -> None:
    with pytest.raises(SpecError, match=f"schema version {SCHEMA_VERSION + 1} and this is {SCHEMA_VERSION}"):
        request(stored(1) | {"schema_version": SCHEMA_VERSION + 1})


def test_an_older_request_goes_through_every_step_to_today_s() -> None:
    steps = {
        1: lambda old: old | {"device": old["on"], "trail": [1]},
        2: lambda old: {name: value for name, value in old.items() if name != "on"} | {"trail": [1, 2]},
    }
    assert upgraded({"on": "cpu"}, 1, steps, 3) == {"device": "cpu", "trail": [1, 2]}
    assert upgraded({"device": "cpu"}, 3, steps, 3) == {"device": "cpu"}
    with pytest.raises(SpecError, match="schema version 0"):
        upgraded({}, 0, steps, 3)


def test_another_digest_is_said() -> None:
    document = stored(1)
    assert replay_note(document, stored(1)) is None
    assert "not exactly the same variant" in str(replay_note(document, stored(2)))
