"""One turn and all turns of a group: who is measured, who fails, who waits, and what is left behind."""

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from optigpu.backends.converted import remove_used
from optigpu.conductor.preparation import Preparation
from optigpu.conductor.processes.groups import Group
from optigpu.conductor.processes.residents import MOST_RESIDENT, Residents
from optigpu.documents.events import Event, Progressed, VariantFinished
from optigpu.job.plan import variants_of
from optigpu.vocabulary import (
    CrashError,
    DamagedModelError,
    OutOfMemoryError,
    UnsupportedError,
    VariantStatus,
)
from tests.engine.sessions import session_with, small_job

pytestmark = pytest.mark.slow

Started = Callable[[], frozenset[int]]

grid = partial(small_job, measure={"replicates": 2})


def test_each_variant_is_measured_or_failed_or_waiting(tmp_path: Path, started: Started) -> None:
    spec = grid("bf16", "no_kv_cache", "eager_attention")
    session, _ = session_with(spec, tmp_path, "moody", space=(3,))
    turn = Residents(session, 0).measure(variants_of(spec))
    # One process that is ready, and two that failed, which take no memory: then two more are ready.
    assert {index: type(error) for index, error in turn.errors.items()} == {
        1: UnsupportedError,
        2: OutOfMemoryError,
    }
    assert list(turn.replicates) == [0, 3, 4]
    assert [variant.index for variant in turn.waiting] == [5, 6, 7]
    assert not started()


@pytest.mark.parametrize(
    ("threads", "space", "told"),
    [
        (2, (), ["begin", "begin", "assignment", "assignment", "begin", "assignment"]),
        (1, (), ["begin", "assignment"] * 3),
        (2, (2,), ["begin", "begin", "assignment", "assignment"]),
    ],
    ids=["two cores", "one core", "no memory for a third"],
)
def test_libraries_are_imported_side_by_side_and_models_loaded_one_by_one(
    tmp_path: Path, started: Started, threads: int, space: tuple[int, ...], told: list[str]
) -> None:
    spec = grid("bf16", "eager_attention")
    notes = tmp_path / "notes"
    session, _ = session_with(spec, tmp_path, "noted", notes, space=space)
    session.threads = threads
    Residents(session, 0).measure(variants_of(spec)[:3])
    assert notes.read_text().split() == told
    assert not started()


def test_there_are_never_more_than_the_most(tmp_path: Path) -> None:
    spec = grid("bf16", "static_kv_cache", "eager_attention", "inference_mode")
    variants = variants_of(spec)
    assert len(variants) > MOST_RESIDENT
    session, _ = session_with(spec, tmp_path, "well_behaved")
    turn = Residents(session, 0).measure(variants)
    assert len(turn.replicates) == MOST_RESIDENT
    assert turn.waiting == variants[MOST_RESIDENT:]


def test_nothing_is_prepared_for_variants_that_all_fail(tmp_path: Path) -> None:
    session, _ = session_with(spec := grid("bf16"), tmp_path, "moody")
    refused, prepared = variants_of(spec)[1], list[str]()
    turn = Residents(session, 0, lambda: prepared.append("the job")).measure([refused])
    assert (prepared, set(turn.errors)) == ([], {refused.index})


def test_a_meter_that_is_read_once_is_read_in_the_first_replicate(tmp_path: Path) -> None:
    spec = grid("bf16").model_copy(update={"plan": "single", "stack": ()})
    measure = spec.measure.model_copy(update={"meters": ("latency", "memory", "quality")})
    session, events = session_with(spec.model_copy(update={"measure": measure}), tmp_path, "well_behaved")

    def meters_read() -> list[str]:
        return [e.doing for e in events if isinstance(e, Progressed) and e.doing.endswith("meter")]

    Residents(session, 0).measure(variants_of(session.spec))
    assert meters_read() == ["reading the memory meter", "reading the quality meter"]
    events.clear()
    Residents(session, 1).measure(variants_of(session.spec))
    assert meters_read() == ["reading the memory meter"]


def test_processes_that_are_kept_measure_on_without_a_new_start(tmp_path: Path, started: Started) -> None:
    spec = grid("bf16")
    notes = tmp_path / "notes"
    session, events = session_with(spec, tmp_path, "noted", notes)
    variants = variants_of(spec)
    with Residents(session, 0) as residents:
        residents.measure(variants, stay=True)
        first = residents.replicates[1]
        assert residents.indexes == {0, 1}
        residents.keep({1})
        assert len(started()) == 1
        residents.go_on(session)
        before = len(events)
        residents.measure(variants[1:], stay=True)
        second = residents.replicates[1]
        assert list(residents.replicates) == [1]
    assert notes.read_text().split().count("assignment") == 2
    assert second.metered == first.metered, "meters are read once"
    read = [e.index for e in events if isinstance(e, Progressed) and e.doing.startswith("reading")]
    assert list(dict.fromkeys(read)) == [0, 1]
    measured = [e.index for e in events[before:] if isinstance(e, Progressed) and e.doing == "measuring"]
    assert set(measured) == {1}, "rounds that are over do not count as those of the new round"
    # A round that others disturb is measured again, so that the numbers of rounds may differ a little.
    assert len(second.rounds) < 2 * len(first.rounds), "what was timed before is no part of it"
    assert second.audit is not None
    assert not started()


@pytest.mark.parametrize(
    ("model", "doing", "kind"),
    [
        ("path:damaged", "loading", UnsupportedError),
        ("path:damaged", "warming up", CrashError),
        ("preset:tiny-llama-test", "loading", CrashError),
    ],
)
def test_a_process_that_crashes_while_it_loads_a_model_s_own_files_is_unsupported(
    tmp_path: Path, model: str, doing: str, kind: type[Exception]
) -> None:
    spec = grid(model=model, plan="single")
    session, _ = session_with(spec, tmp_path, "crashing", doing)
    turn = Residents(session, 0).measure(variants_of(spec))
    assert type(turn.errors[0]) is kind
    said = "The measuring process was killed by signal 6 (Aborted) before it answered. Its last output: last words"
    damaged = f"{model} is damaged or not supported: " if kind is UnsupportedError else ""
    assert str(turn.errors[0]) == f"{damaged}{said}"


@pytest.mark.parametrize("model", ["path:sound", "preset:tiny-llama-test"])
def test_a_kept_conversion_that_a_process_crashed_on_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = tmp_path / "optigpu" / "converted" / "gguf"
    engine.mkdir(parents=True)
    (engine / "kept.gguf").write_bytes(b"GGUF")
    (engine / "other.gguf").write_bytes(b"GGUF")
    spec = grid(model=model, plan="single")
    session, _ = session_with(spec, tmp_path, "crashing", "loading", engine / "kept.gguf")
    turn = Residents(session, 0).measure(variants_of(spec))
    assert type(turn.errors[0]) is DamagedModelError
    assert str(turn.errors[0]) == (
        "The engine crashed on kept.gguf, a kept conversion that may be damaged. It has been removed; run the job "
        "again. The measuring process was killed by signal 6 (Aborted) before it answered. Its last output: last words"
    )
    assert [path.name for path in engine.iterdir()] == ["other.gguf"]


def test_what_a_note_names_outside_of_the_converted_models_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mine = tmp_path / "optigpu" / "mine"
    mine.mkdir(parents=True)
    (mine / "file").write_text("mine")
    for line in ("../mine", "../../..", f"{mine}/file", "gguf/../../mine", "", ".", "gguf"):
        (tmp_path / "reading-1").write_text(f"{line}\n")
        assert remove_used(tmp_path, 1) == ()
    (tmp_path / "reading-1").write_bytes(b"\xff")
    assert remove_used(tmp_path, 1) == remove_used(tmp_path, 2) == ()
    assert (mine / "file").read_text() == "mine"


ALL, REPLICATES = 4, 3
"""Variants of the grid."""


def measured_group(folder: Path, child: str, *arguments: object, space: tuple[int, ...] = ()) -> Group:
    return group_and_events(folder, child, *arguments, space=space)[0]


def group_and_events(
    folder: Path, child: str, *arguments: object, space: tuple[int, ...] = ()
) -> tuple[Group, list[Event]]:
    spec = small_job("bf16", "static_kv_cache", measure={"replicates": REPLICATES})
    session, events = session_with(spec, folder, child, *arguments, space=space)
    group = Group(session, variants_of(spec))
    group.measure(Preparation(None))
    return group, events


def test_a_variant_for_which_memory_is_short_in_a_later_replicate_is_measured_in_a_later_turn(
    tmp_path: Path,
) -> None:
    group, events = group_and_events(tmp_path, "well_behaved", space=(ALL, 1, 2))
    assert group.waiting == ()
    assert set(group.outcomes) == {0, 1, 2, 3}
    assert all(outcome.status is VariantStatus.SUCCEEDED for outcome in group.outcomes.values())
    for outcome in group.outcomes.values():
        assert len(outcome.samples["tokens_per_s"]) == REPLICATES
    started = [(e.replicate, e.index) for e in events if isinstance(e, Progressed) and e.doing == "starting"]
    # What takes long is said again.
    assert list(dict.fromkeys(started)) == [(number, index) for number in range(3) for index in range(ALL)]


def test_only_variants_that_shared_every_replicate_are_compared_in_pairs(tmp_path: Path) -> None:
    group = measured_group(tmp_path, "well_behaved", space=(ALL, 2))
    assert not group.fit_together
    assert [side_by_side(group, index) for index in range(ALL)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert measured_group(tmp_path, "well_behaved").fit_together


def side_by_side(group: Group, index: int) -> list[int]:
    result = group.outcomes[index].result
    assert result is not None
    return list(result.facts.side_by_side)


def test_a_variant_that_fails_in_a_later_turn_ends_with_its_reason(tmp_path: Path) -> None:
    group, events = group_and_events(tmp_path, "dying", "SIGUSR1", 1, "-", space=(ALL, 2, 1))
    assert set(group.outcomes) == {0, 1, 2, 3}
    for outcome in group.outcomes.values():
        assert outcome.status is VariantStatus.FAILED
        assert f"signal {signal.SIGUSR1:d}" in (outcome.reason or "")
    finished = [event.outcome.index for event in events if isinstance(event, VariantFinished)]
    assert sorted(finished) == [0, 1, 2, 3], "each of them once"
