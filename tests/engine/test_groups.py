"""A group of variants through all their replicates, when memory gets short and when processes fail."""

import signal
from pathlib import Path
from typing import Any

import pytest

from optigpu.conductor.preparation import Preparation
from optigpu.conductor.processes.groups import Group
from optigpu.documents.events import Event, Progressed, VariantFinished
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.vocabulary import VariantStatus
from tests.engine.sessions import session_with

MEASURE = {"replicates": 3, "min_seconds": 0.01, "max_seconds": 1, "meters": ["latency", "memory"]}
SPEC: dict[str, Any] = {
    "workload": {"kind": "generate"},
    "model": "preset:tiny-llama-test",
    "plan": "grid",
    "stack": [{"name": "bf16"}, {"name": "static_kv_cache"}],
    "measure": MEASURE,
}
ALL = 4
"""Variants of the grid."""


def measured_group(folder: Path, child: str, *arguments: object, space: tuple[int, ...] = ()) -> Group:
    return group_and_events(folder, child, *arguments, space=space)[0]


def group_and_events(
    folder: Path, child: str, *arguments: object, space: tuple[int, ...] = ()
) -> tuple[Group, list[Event]]:
    spec = JobSpec.model_validate(SPEC)
    session, events = session_with(spec, folder, child, *arguments, space=space)
    group = Group(session, variants_of(spec))
    group.measure(Preparation(None))
    return group, events


@pytest.mark.slow
def test_a_variant_for_which_memory_is_short_in_a_later_replicate_is_measured_in_a_later_turn(
    tmp_path: Path,
) -> None:
    group, events = group_and_events(tmp_path, "well_behaved", space=(ALL, 1, 2))
    assert group.waiting == ()
    assert set(group.outcomes) == {0, 1, 2, 3}
    assert all(outcome.status is VariantStatus.SUCCEEDED for outcome in group.outcomes.values())
    for outcome in group.outcomes.values():
        assert len(outcome.samples["tokens_per_s"]) == MEASURE["replicates"]
    started = [(e.replicate, e.index) for e in events if isinstance(e, Progressed) and e.doing == "starting"]
    # What takes long is said again.
    assert list(dict.fromkeys(started)) == [(number, index) for number in range(3) for index in range(ALL)]


@pytest.mark.slow
def test_only_variants_that_shared_every_replicate_are_compared_in_pairs(tmp_path: Path) -> None:
    group = measured_group(tmp_path, "well_behaved", space=(ALL, 2))
    assert not group.fit_together
    assert [side_by_side(group, index) for index in range(ALL)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert measured_group(tmp_path, "well_behaved").fit_together


def side_by_side(group: Group, index: int) -> list[int]:
    result = group.outcomes[index].result
    assert result is not None
    return list(result.facts.side_by_side)


@pytest.mark.slow
def test_what_does_not_fit_in_the_first_replicate_waits_for_the_next_group(tmp_path: Path) -> None:
    group, events = group_and_events(tmp_path, "well_behaved", space=(3,))
    assert set(group.outcomes) == {0, 1, 2}
    assert [variant.index for variant in group.waiting] == [3]
    assert group.fit_together
    assert not [event for event in events if isinstance(event, Progressed) and event.index == 3]
    assert side_by_side(group, 0) == [0, 1, 2]


def test_a_variant_that_fails_in_a_later_turn_ends_with_its_reason(tmp_path: Path) -> None:
    group, events = group_and_events(tmp_path, "dying", "SIGUSR1", 1, "-", space=(ALL, 2, 1))
    assert set(group.outcomes) == {0, 1, 2, 3}
    for outcome in group.outcomes.values():
        assert outcome.status is VariantStatus.FAILED
        assert f"signal {signal.SIGUSR1:d}" in (outcome.reason or "")
    finished = [event.outcome.index for event in events if isinstance(event, VariantFinished)]
    assert sorted(finished) == [0, 1, 2, 3], "each of them once"
