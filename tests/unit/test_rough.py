"""Rough figures: from which requests they come, what their intervals hold, and where they are shown."""

import math

import numpy as np
import pytest

from optigpu.child.messages import Metered, Ready
from optigpu.conductor.processes.rough import LAST, RoughLooks
from optigpu.documents.events import RoughlyMeasured
from optigpu.documents.facts import RunFacts, WeightFacts
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.statistics.compare import PROCESSES_DIFFER

LADDER = JobSpec.model_validate(
    {
        "workload": {"kind": "generate"},
        "model": "preset:gpt2",
        "plan": "ladder",
        "stack": [{"name": "fused_attention"}],
    }
)
READY = Ready(load_s=1, compile_s=None, steady=True, warmup_requests=1, request_s=1)
BASELINE, CANDIDATE = variants_of(LADDER)[0], variants_of(LADDER)[-1]


def looks() -> tuple[RoughLooks, list[RoughlyMeasured]]:
    told: list[RoughlyMeasured] = []
    return RoughLooks(LADDER.primary, told.append), told


def test_the_first_request_is_told_at_once_and_the_last_ones_when_the_process_is_ready() -> None:
    found, told = looks()
    for value in (10.0, 20.0, 20.0, 20.0):
        found.saw(BASELINE, {"tokens_per_s": value})
    assert [event.rough.value for event in told] == pytest.approx([10.0])
    facts = RunFacts(weights=WeightFacts(bytes=5, reasons={"hash": "-", "revision": "-"}))
    ready = Ready(load_s=1, compile_s=None, steady=True, warmup_requests=4, request_s=1, facts=facts)
    found.ready(BASELINE, ready)
    assert told[-1].rough.value == pytest.approx(20.0)
    assert told[-1].rough.weight_bytes == 5
    assert told[-1].rough.ratio is None


def test_a_candidate_has_a_ratio_to_the_baseline_and_the_quality_that_was_read() -> None:
    found, told = looks()
    found.saw(BASELINE, {"tokens_per_s": 10.0})
    found.saw(CANDIDATE, {"tokens_per_s": 30.0})
    assert told[-1].rough.ratio is None, "its first request alone may be slow"
    found.ready(CANDIDATE, READY)
    rough = told[-1].rough
    assert rough.ratio == pytest.approx(3.0)
    assert rough.ratio_ci is not None
    assert rough.ratio_ci[0] < 3 < rough.ratio_ci[1]
    found.read(CANDIDATE.index, Metered(meter="quality", values={"kld_mean": 0.1, "top1_agreement": 0.9}))
    assert (told[-1].rough.kld_mean, told[-1].rough.top1_agreement) == (0.1, 0.9)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_what_is_no_speed_is_not_told(value: float) -> None:
    found, told = looks()
    found.saw(BASELINE, {"tokens_per_s": value})
    found.saw(BASELINE, {"latency_s": 1.0})
    assert told == []


@pytest.mark.parametrize("requests", [1, LAST, 10])
def test_intervals_of_ratios_hold_the_truth_as_often_as_they_say(requests: int) -> None:
    """Processes that differ as they are taken to, with requests that scatter by a twentieth."""
    source = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        found, told = looks()
        for variant, speed in ((BASELINE, 10.0), (CANDIDATE, 20.0)):
            process = source.normal(0, PROCESSES_DIFFER)
            for noise in source.normal(0, 0.05, requests):
                found.saw(variant, {"tokens_per_s": speed * math.exp(process + noise)})
        found.ready(CANDIDATE, READY)
        low, high = told[-1].rough.ratio_ci or (0, 0)
        held += low <= 2 <= high
    assert held / 400 > 0.93


def test_a_pair_of_requests_counts_instead_of_the_warm_ups() -> None:
    found, told = looks()
    found.saw(BASELINE, {"tokens_per_s": 1.0})
    found.saw(CANDIDATE, {"tokens_per_s": 30.0})
    found.ready(CANDIDATE, READY, disturbed=True)
    assert told[-1].rough.ratio is None
    found.beside(CANDIDATE.index, 10.0, 20.0)
    assert told[-1].rough.ratio == pytest.approx(2.0)
    assert told[-1].rough.value == pytest.approx(30.0)


def test_a_baseline_whose_warm_up_was_disturbed_has_no_ratio_to_it() -> None:
    found, told = looks()
    found.saw(BASELINE, {"tokens_per_s": 1.0})
    found.ready(BASELINE, READY, disturbed=True)
    found.saw(CANDIDATE, {"tokens_per_s": 30.0})
    found.ready(CANDIDATE, READY)
    assert told[-1].rough.ratio is None


def test_no_ratio_is_between_two_models() -> None:
    other = CANDIDATE.model_copy(update={"model": "preset:opt-125m"})
    found, told = looks()
    found.saw(BASELINE, {"tokens_per_s": 1.0})
    found.saw(other, {"tokens_per_s": 30.0})
    found.ready(other, READY)
    assert told[-1].rough.ratio is None
