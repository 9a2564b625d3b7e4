"""Plans of several models, of a search and of the largest batch: their variants, decisions and tables."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from optigpu.child.messages import Metered, Ready, RunMeter
from optigpu.conductor.preparation import make_references
from optigpu.conductor.search import LargestBatch, largest_batch
from optigpu.documents.events import Event, Finished, Planned, Progressed, VariantFinished, VariantStarted
from optigpu.job.attribution import attribute
from optigpu.job.measured import replay_request
from optigpu.job.plan import variants_of
from optigpu.job.search import round_spec, stacks_of
from optigpu.job.spec import JobSpec, Measure, digest
from optigpu.measure import Report, run
from optigpu.report.ladder import ladder_grid
from optigpu.report.tables import batch_grid
from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import Role, SpecError, VariantStatus
from tests.engine.measuring import in_process
from tests.engine.processes import is_alive, program
from tests.engine.sessions import AT_ONCE, session_with, small_job
from tests.engine.test_replicate import answer, ask
from tests.engine.test_workloads_run import as_valid

TWO = ("preset:tiny-gpt2-test", "bundled:tiny")


def job(*models: str, **changes: Any) -> JobSpec:
    asked = {"workload": {"kind": "generate", "prompt_tokens": 16, "new_tokens": 8}, "models": models}
    return JobSpec.model_validate(asked | {"limits": AT_ONCE} | changes)


def test_each_model_has_the_whole_plan_in_the_order_of_the_models() -> None:
    variants = variants_of(job(*TWO, plan="ladder", stack=[{"name": "bf16"}]))
    assert [(each.model, each.role, each.label) for each in variants] == [
        ("preset:tiny-gpt2-test", Role.BASELINE, "tiny-gpt2-test"),
        ("preset:tiny-gpt2-test", Role.ALONE, "tiny-gpt2-test: bf16"),
        ("bundled:tiny", Role.BASELINE, "tiny"),
        ("bundled:tiny", Role.ALONE, "tiny: bf16"),
    ]
    first, second = variants[0], variants[2]
    assert first.workload_digest != second.workload_digest
    (alone,) = variants_of(job("bundled:tiny"))
    assert (alone.label, alone.workload_digest) == ("baseline", second.workload_digest)
    assert alone.digest == second.digest


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "preset:gpt2"}, "name either model or models"),
        ({"models": ["preset:gpt2", "preset:gpt2"]}, "preset:gpt2 occurs twice"),
        ({"models": ["preset:gpt2", "preset:resnet-50"]}, "preset:resnet-50 classifies images"),
        ({"workload": {"kind": "generate", "prompt": "a"}}, "preset:tiny-gpt2-test has random weights"),
    ],
)
def test_each_model_must_fit_the_job(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        job(*TWO, **changes)


@pytest.mark.slow
def test_each_model_s_gains_are_over_its_own_baseline_and_one_table_shows_them(tmp_path: Path) -> None:
    """The measuring processes are stand-ins: 10 tokens/s, and 10 more for each technique."""
    spec = job(
        *TWO, plan="ladder", stack=[{"name": "bf16"}],
        measure={"replicates": 1, "min_seconds": 0.01, "max_seconds": 1, "meters": ["latency"]},
    )  # fmt: skip
    report = run(spec, lambda _: None, lock_dir=tmp_path, program=program("well_behaved"))
    outcomes = {each.index: as_valid(each) for each in report.outcomes}
    attribution = attribute(spec, variants_of(spec), outcomes)
    first, second = attribution.rows[1].speedup, attribution.rows[3].speedup
    assert first is not None
    assert second is not None
    assert (first.compared_with, second.compared_with) == (0, 2)
    assert first.ratio == second.ratio == pytest.approx(2)
    grid = ladder_grid("two models", attribution, [each.model_dump(mode="json") for each in report.results])
    assert [row[0] for row in grid.rows] == ["tiny-gpt2-test", "tiny-gpt2-test: bf16", "tiny", "tiny: bf16"]
    assert {each.variant.model for each in report.results} == set(TWO)


@pytest.mark.slow
@pytest.mark.usefixtures("models_dir")
def test_each_trained_model_is_compared_with_its_own_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose process it is makes no difference to a reference."""
    measure = {"meters": ["latency", "quality"], "quality": {"tokens": 16}}
    spec = job("bundled:tiny", "path:gpt2", stack=[{"name": "bf16"}], measure=measure)
    session, _ = session_with(spec, tmp_path, "well_behaved")
    monkeypatch.setattr(session, "child", lambda _, **_more: in_process())
    variants = variants_of(spec)
    make_references(session, variants)
    hashes = set()
    for variant in variants:
        with in_process() as child:
            child.tell(session.assignment(variant, 0))
            assert isinstance(answer(child), Ready)
            metered = ask(child, RunMeter(meter="quality"))
        assert isinstance(metered, Metered)
        assert 0 < metered.values["kld_mean"] < 0.1
        hashes.add(metered.facts.model_dump()["quality"]["tokens_sha256"])
    assert len(hashes) == 2


MENU = ("bf16", "int8_weight_only", "int4_weight_only", "static_kv_cache")
search = partial(small_job, plan="search", measure={"replicates": 2})


def searched(spec: JobSpec, folder: Path, child: str = "well_behaved") -> tuple[Report, list[Event]]:
    events: list[Event] = []
    return run(spec, events.append, lock_dir=folder / "locks", program=program(child)), events


def test_the_space_holds_every_stack_without_a_conflict_once() -> None:
    techniques = [TECHNIQUES[name](name=name) for name in MENU]
    stacks = list(stacks_of(techniques, "generate"))
    assert len(stacks) == len(set(stacks)) == 2 * 3 * 2, "weights are quantized once"
    assert stacks[0] == ()
    assert list(map(len, stacks)) == sorted(map(len, stacks))


def test_rounds_measure_longer_and_the_last_one_as_asked() -> None:
    measure = Measure(replicates=3, min_seconds=9, max_seconds=90)
    asked = search("bf16").model_copy(update={"measure": measure})
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
    done = {span.doing for span in report.timeline}
    assert {"starting", "measuring", "checking with fresh inputs", "memory"} <= done
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


@pytest.mark.slow
def test_what_is_predicted_to_be_too_large_is_not_measured(tmp_path: Path) -> None:
    small = search("int8_weight_only", limits={"max_bytes": 1_000_000, "wait_for_quiet_s": 0})
    report, _ = searched(small, tmp_path)
    ended = {outcome.index: outcome for outcome in report.outcomes}
    assert ended[0].status is VariantStatus.UNSUPPORTED
    assert "weights take 0.00144 GB, predicted" in str(ended[0].reason)
    assert ended[1].result is not None


LLAMA = "preset:tiny-llama-test"
CHECKPOINTED = [{"name": "gradient_checkpointing"}]
LIMIT = 45_000_000
"""The arenas of threads take some megabytes of it, more or fewer from run to run, and one kind of CPU needs more than
another: 60 MB were enough for 23 rows on one and for 29 on the next."""


def scaling(**changes: Any) -> JobSpec:
    document = {"workload": {"kind": "train_step", "sequence_tokens": 64}, "model": LLAMA}
    limits = {"max_bytes": LIMIT, "max_batch": 64, "wait_for_quiet_s": 0} | changes.pop("limits", {})
    return JobSpec.model_validate(document | {"plan": "batch_scaling", "limits": limits} | changes)


def found_by(folder: Path, *arguments: object, most: int = 64) -> LargestBatch:
    spec = scaling(limits={"max_batch": most})
    session, _ = session_with(spec, folder, "batches", *arguments)
    (variant,) = variants_of(spec)
    return largest_batch(session, variant, program("batches", *arguments))


@pytest.mark.long
def test_a_job_ends_with_the_largest_batches_and_how_many_times_as_many_they_are(tmp_path: Path) -> None:
    events: list[Event] = []
    asked = scaling(stack=CHECKPOINTED, limits={"max_batch": 24})
    report = run(asked, events.append, lock_dir=tmp_path, threads=1)
    plain, checkpointed = (int(each.metrics["largest_batch"].value or 0) for each in report.results)
    assert 1 <= plain < checkpointed
    for result in report.results:
        assert result.verdict.valid
        assert result.variant.primary_metric == "largest_batch"
        assert result.variant.workload["memory_limit_bytes"] == LIMIT
        assert "batch_size" not in result.variant.workload
        tried = result.facts.recorded["batches_tried"]
        assert isinstance(tried, list)
        assert [1, True] in tried
        assert ([plain + 1, False] in tried) == (result.variant.index == 0), "memory ran out, and only there"
        assert result.provenance is not None
        assert result.provenance.weight_hash
    rows = report.attribution.rows
    assert report.attribution.metric == "largest_batch"
    assert rows[1].speedup is not None
    assert rows[1].speedup.ratio == pytest.approx(checkpointed / plain)
    assert batch_grid(report).rows[1][:3] == (
        "gradient_checkpointing",
        str(checkpointed),
        f"{checkpointed / plain:.2f}",
    )
    kinds = [type(event) for event in events]
    assert kinds[0] is Planned
    assert kinds[-1] is Finished
    assert kinds.count(VariantStarted) == kinds.count(VariantFinished) == 2
    fractions = [event.fraction for event in events if isinstance(event, Progressed)]
    assert fractions == sorted(fractions)
    _refuses_to_replay(report)


def _refuses_to_replay(report: Report) -> None:
    with pytest.raises(SpecError, match="post its job, or run batch-scaling, again"):
        replay_request(report.results[0].model_dump(mode="json"), None, {})


@pytest.mark.parametrize("how", ["dies", "recovers"])
@pytest.mark.parametrize(("bound", "most", "found"), [(0, 64, 0), (5, 64, 5), (100, 64, 64)])
def test_bisection_finds_the_last_batch_that_fits(
    tmp_path: Path, bound: int, most: int, found: int, how: str
) -> None:
    measured = found_by(tmp_path, bound, how, most=most)
    assert measured.largest == found
    failed = sum(not fits for _, fits in measured.tried)
    assert measured.restarts == (failed if how == "dies" else 0)
    assert measured.facts.recorded == {"loaded": True}


@pytest.mark.slow
def test_where_not_even_one_sample_fits_the_variant_says_why(tmp_path: Path) -> None:
    report = run(scaling(limits={"max_bytes": 1_000_000}), lambda _: None, lock_dir=tmp_path)
    (outcome,) = report.outcomes
    assert outcome.status is VariantStatus.FAILED
    assert "Not even a batch of 1 found enough memory under 1000000 bytes" in str(outcome.reason)
