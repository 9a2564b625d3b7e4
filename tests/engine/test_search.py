"""The plan `search` against measuring processes whose speeds are known, and its decisions by themselves."""

from pathlib import Path
from typing import Any

import pytest

from optigpu.documents.events import Event, Finished, Planned, Progressed, VariantFinished, VariantStarted
from optigpu.job.plan import variants_of
from optigpu.job.search import pareto, round_spec, rounds_of, stacks_of
from optigpu.job.spec import JobSpec, digest
from optigpu.measure import Report, run
from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import Role, SpecError, VariantStatus
from tests.engine.processes import is_alive, program

MENU = ("bf16", "int8_weight_only", "int4_weight_only", "static_kv_cache")
FAST = {"replicates": 2, "min_seconds": 0.01, "max_seconds": 1, "meters": ["latency", "memory"]}


def search(*menu: str, **changes: Any) -> JobSpec:
    document = {"workload": {"kind": "generate"}, "model": "preset:tiny-llama-test", "plan": "search"}
    fields = {"stack": [{"name": name} for name in menu], "measure": FAST, "limits": {"wait_for_quiet_s": 0}}
    return JobSpec.model_validate(document | fields | changes)


def searched(spec: JobSpec, folder: Path, child: str = "well_behaved") -> tuple[Report, list[Event]]:
    events: list[Event] = []
    return run(spec, events.append, lock_dir=folder / "locks", program=program(child)), events


def test_the_space_holds_every_stack_without_a_conflict_once() -> None:
    techniques = [TECHNIQUES[name](name=name) for name in MENU]
    stacks = list(stacks_of(techniques, "generate"))
    assert len(stacks) == len(set(stacks)) == 2 * 3 * 2, "weights are quantized once"
    assert stacks[0] == ()
    assert list(map(len, stacks)) == sorted(map(len, stacks))


def test_two_parameters_of_a_technique_are_alternatives() -> None:
    groups = [
        TECHNIQUES["int4_weight_only"].model_validate({"name": "int4_weight_only", "group_size": size})
        for size in (32, 64)
    ]
    assert [len(stack) for stack in stacks_of(groups, "generate")] == [0, 1, 1]


def test_a_search_plans_at_most_as_many_variants_as_it_may() -> None:
    limited = search(*MENU, limits={"max_variants": 5})
    planned = variants_of(limited)
    assert len(planned) == 5
    assert planned[0].role is Role.BASELINE


@pytest.mark.parametrize(("candidates", "rounds"), [(1, 1), (2, 2), (3, 2), (8, 3), (12, 4), (32, 5)])
def test_each_round_leaves_a_third_until_one_is_left(candidates: int, rounds: int) -> None:
    assert rounds_of(candidates) == rounds


def test_rounds_measure_longer_and_the_last_one_as_asked() -> None:
    asked = search("bf16", measure={"replicates": 3, "min_seconds": 9, "max_seconds": 90})
    first, second, last = (round_spec(asked, number, 3) for number in range(3))
    assert [each.measure.max_seconds for each in (first, second, last)] == [10, 30, 90]
    assert [each.measure.replicates for each in (first, second, last)] == [1, 1, 3]
    assert "quality" in first.measure.meters
    assert "energy" not in second.measure.meters
    assert last == asked


@pytest.mark.slow
def test_a_search_ends_with_the_fastest_stack_measured_as_asked(tmp_path: Path) -> None:
    # The child is the faster the more techniques its stack has.
    report, events = searched(search("bf16", "int8_weight_only", "int8_kv_cache"), tmp_path)
    rounds = {each.variant.label: each.facts.recorded["search_round"] for each in report.results}
    best = max(report.results, key=lambda each: each.metrics["tokens_per_s"].value or 0)
    assert len(best.variant.stack) == 3
    assert [label for label, number in rounds.items() if number == 3] == [best.variant.label]
    assert best.metrics["tokens_per_s"].replicates == 2
    assert report.attribution.best == best.variant.index
    kinds = [type(event) for event in events]
    assert kinds[0] is Planned
    assert kinds[-1] is Finished
    assert kinds.count(VariantFinished) == kinds.count(VariantStarted) == len(report.outcomes) == 8
    fractions = [event.fraction for event in events if isinstance(event, Progressed)]
    assert fractions == sorted(fractions)
    assert len(started(events)) == 8 + 1, "only the last round needs another process"
    assert set(report.spent) == {"prepare", "import", "start", "sample", "audit", "memory"}
    own = digest(report.spec.model_dump(mode="json"))
    assert {each.provenance.spec_digest for each in report.results if each.provenance} == {own}


class Places:
    """A memory rule: space for three processes at once."""

    def __init__(self) -> None:
        self._pids: list[int] = []
        self.most = 0

    def add(self, pid: int) -> None:
        """Another one, beside those that live."""
        self._pids = [*filter(is_alive, self._pids), pid]
        self.most = max(self.most, len(self._pids))

    def has_space(self) -> bool:
        """Whether fewer live."""
        return sum(map(is_alive, self._pids)) < 3


@pytest.mark.slow
def test_where_few_processes_fit_the_best_ones_stay_and_others_start_again(tmp_path: Path) -> None:
    places, events = Places(), list[Event]()
    report = run(
        search("bf16", "int8_weight_only", "int8_kv_cache"),
        events.append,
        lock_dir=tmp_path / "locks",
        program=program("well_behaved"),
        memory_rule=lambda _device, _environment: places,
    )
    assert places.most == 3
    best = max(report.results, key=lambda each: each.metrics["tokens_per_s"].value or 0)
    assert len(best.variant.stack) == 3
    assert best.facts.recorded["search_round"] == 3
    starts = started(events)
    assert {index for index, _ in starts[:8]} == set(range(8))
    assert 8 < len(starts) <= 8 + 2 + 1, "of three that go on one process at least was still there"
    assert starts.count((best.variant.index, 0)) == 1, "the best one stayed from the first round to the last"


def started(events: list[Event]) -> list[tuple[int, int]]:
    """The variant and the replicate of each process that was started; what goes on for long is told again."""
    told = [(e.index, e.replicate, e.doing) for e in events if isinstance(e, Progressed)]
    new = (each for each, before in zip(told, [None, *told], strict=False) if each != before)
    return [(index, replicate) for index, replicate, doing in new if doing.endswith(": starting")]


def test_what_is_predicted_to_be_too_large_is_not_measured(tmp_path: Path) -> None:
    small = search("int8_weight_only", limits={"max_bytes": 1_000_000, "wait_for_quiet_s": 0})
    report, _ = searched(small, tmp_path)
    ended = {outcome.index: outcome for outcome in report.outcomes}
    assert ended[0].status is VariantStatus.UNSUPPORTED
    assert "weights take 0.00144 GB, predicted" in str(ended[0].reason)
    assert ended[1].result is not None


def test_the_pareto_set_drops_what_another_surpasses(tmp_path: Path) -> None:
    report, _ = searched(search("bf16", "int8_weight_only"), tmp_path)
    slow, *_, fast = sorted(report.results, key=lambda each: each.metrics["tokens_per_s"].value or 0)
    assert pareto([slow, fast], "tokens_per_s") == [fast]
    few = slow.metrics["weight_bytes"].model_copy(update={"value": 1.0, "ci": None})
    smaller = slow.model_copy(update={"metrics": slow.metrics | {"weight_bytes": few}})
    assert pareto([smaller, fast], "tokens_per_s") == [smaller, fast]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"plan": "grid", "limits": {"max_bytes": 8e9}},
            "only the plans search and batch_scaling have such a bound",
        ),
        ({"workload": {"kind": "batch_sweep"}}, "a search compares stacks of one workload"),
    ],
)
def test_what_no_search_can_mean_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        search("bf16", **changes)
