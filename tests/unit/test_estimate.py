"""A job's time before it starts: what it takes about, what cannot fit, and what of it is left out."""

from typing import Any

import pytest

from optigpu.job.estimate import AUDIT, COMPILE, SAMPLE, START, Plan, plan_time, spoken
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.vocabulary import SpecError


def plan(**changes: Any) -> Plan:
    """Of a ladder of four variants."""
    document = {
        "workload": {"kind": "generate"},
        "model": "bundled:tiny",
        "plan": "ladder",
        "stack": [{"name": "bf16"}, {"name": "torch_compile"}],
    }
    spec = JobSpec.model_validate(document | changes)
    return plan_time(spec, variants_of(spec))


def measure(**changes: Any) -> dict[str, Any]:
    return {"min_seconds": 10, "max_seconds": 10, "meters": ["latency"]} | changes


def test_the_time_is_that_of_every_part_of_every_process() -> None:
    made = plan(measure=measure(meters=["latency", "quality"]))
    seconds = [made.guesses[index].seconds for index in range(4)]
    plain = {START, SAMPLE, AUDIT, "quality"}
    assert [set(each) for each in seconds] == [plain, plain, plain | {COMPILE}, plain | {COMPILE}]
    assert made.processes == 12
    each_s = seconds[0][START] + 10 + seconds[0][AUDIT]
    once_s = 4 * seconds[0]["quality"] + 2 * seconds[2][COMPILE]
    assert made.seconds == pytest.approx(12 * each_s + once_s), "quality is read once, and compiled once"


def test_what_cannot_fit_is_refused_with_what_to_change() -> None:
    assert plan(measure=measure(), limits={"timeout_s": 40}).replicates == 1
    with pytest.raises(SpecError) as caught:
        plan(measure=measure(), limits={"timeout_s": 39.9})
    assert str(caught.value) == (
        "limits.timeout_s: 4 variants of at least 10 s each take more than the limit of 39.9 s; raise "
        "limits.timeout_s, lower measure.min_seconds, or measure fewer variants."
    )


def test_replicates_that_cannot_fit_are_left_out_and_said() -> None:
    trimmed = plan(measure=measure(replicates=5), limits={"timeout_s": 125})
    assert trimmed.replicates == 3
    event = trimmed.estimated()
    assert (event.replicates, event.limit_s, event.seconds) == (3, 125, trimmed.seconds)
    assert event.sentence.startswith("4 variants x 3 processes instead of 5, about ")
    assert "What does not fit is left out, replicates first" in event.sentence


def test_the_time_is_shared_so_that_all_fit() -> None:
    """Rather three short processes than a single long one."""
    tight = plan(measure=measure(max_seconds=120), limits={"timeout_s": 900})
    assert 10 < tight.most_sample_s < 120
    assert tight.beside_sampling_s + tight.processes * tight.most_sample_s == pytest.approx(900)
    assert f"a process is measured for {spoken(tight.most_sample_s)} at most" in tight.sentence()
    assert plan(measure=measure(max_seconds=120), limits={"timeout_s": 9000}).most_sample_s == 120


def test_a_least_time_that_is_almost_nothing_fits_as_often_as_was_asked_for() -> None:
    spec = JobSpec.model_validate(
        {"workload": {"kind": "matmul"}, "measure": {"min_seconds": 5e-324, "replicates": 4}}
    )
    assert plan_time(spec, variants_of(spec)).replicates == 4
