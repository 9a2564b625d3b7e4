"""Rough figures: from which requests they come, what their intervals hold, and where they are shown."""

import math

import numpy as np
import pytest

from optigpu.child.messages import Metered
from optigpu.conductor.session import REQUESTS_DIFFER, RoughLooks
from optigpu.documents.events import RoughlyMeasured
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
BASELINE, CANDIDATE = variants_of(LADDER)[0], variants_of(LADDER)[-1]


def looks() -> tuple[RoughLooks, list[RoughlyMeasured]]:
    told: list[RoughlyMeasured] = []
    return RoughLooks(LADDER.primary, told.append), told


def test_the_first_request_is_told_at_once_and_later_ones_with_what_is_known_then() -> None:
    found, told = looks()
    for value in (10.0, 20.0):
        found.saw(BASELINE, {"tokens_per_s": value})
    assert [event.rough.value for event in told] == pytest.approx([10.0])
    found.told(BASELINE.index, weight_bytes=5)
    assert told[-1].rough.value == pytest.approx(20.0)
    assert (told[-1].rough.weight_bytes, told[-1].rough.ratio) == (5, None)


def test_a_candidate_has_a_ratio_to_the_baseline_and_the_quality_that_was_read() -> None:
    found, told = looks()
    found.saw(BASELINE, {"tokens_per_s": 10.0})
    found.saw(CANDIDATE, {"tokens_per_s": 30.0})
    assert told[-1].rough.ratio is None, "its first request alone may be slow"
    found.beside(CANDIDATE.index, [[10.0, 10.0]], [[30.0, 29.0, 31.0]])
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


@pytest.mark.parametrize("pairs", [1, 3, 8])
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.5])
def test_intervals_of_ratios_hold_the_truth_as_often_as_they_say(pairs: int, noise: float) -> None:
    """Processes and short requests that differ as they are taken to, with steps that differ by `noise` more."""
    source = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        found, _ = looks()
        found.looked(BASELINE, [10.0])
        found.looked(CANDIDATE, [20.0])

        def drawn(speed: float) -> list[list[float]]:
            means = source.normal(source.normal(0, PROCESSES_DIFFER), REQUESTS_DIFFER, pairs)
            return [(speed * np.exp(source.normal(mean, noise, 7))).tolist() for mean in means]

        found.beside(CANDIDATE.index, drawn(10.0), drawn(20.0))
        low, high = found.found[CANDIDATE.index].ratio_ci or (0, 0)
        held += low <= 2 <= high
    assert held / 400 > 0.93


def test_each_is_compared_with_the_baseline_of_its_own_workload_and_model() -> None:
    other = CANDIDATE.model_copy(update={"model": "preset:opt-125m", "index": 9})
    found, _ = looks()
    for variant in (BASELINE, CANDIDATE, other):
        found.saw(variant, {"tokens_per_s": 30.0})
    assert found.baseline_of == {BASELINE.index: None, CANDIDATE.index: BASELINE.index, 9: None}
