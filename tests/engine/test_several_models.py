"""Several models in one job: its plan, its needs, its one table, and what each model has for itself."""

from pathlib import Path
from typing import Any

import pytest

from optigpu.child.messages import Metered, Ready, RunMeter
from optigpu.cli.options import spec_of
from optigpu.conductor.preparation import make_references
from optigpu.facade.measuring import job_spec
from optigpu.hardware.probe import probe
from optigpu.job.attribution import attribute
from optigpu.job.needs import needs_of
from optigpu.job.plan import variants_of, with_default_stack
from optigpu.job.spec import JobSpec
from optigpu.measure import run
from optigpu.report.catalog import job_title
from optigpu.report.ladder import ladder_grid
from optigpu.store.jobs import _row_of
from optigpu.vocabulary import DeviceKind, Role, SpecError
from tests.engine.in_process import in_process
from tests.engine.processes import program
from tests.engine.sessions import session_with
from tests.engine.test_replicate import answer, ask
from tests.engine.test_workloads_run import AT_ONCE, as_valid

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


def test_models_of_one_name_are_told_apart_by_their_kind() -> None:
    variants = variants_of(job("preset:gpt2", "hub:gpt2"))
    assert [each.label for each in variants] == ["preset:gpt2", "hub:gpt2"]


def test_models_and_workloads_multiply_and_the_limit_holds() -> None:
    sweep = {"kind": "batch_sweep", "batch_sizes": [1, 2], "prompt_tokens": 8, "new_tokens": 4}
    variants = variants_of(job(*TWO, workload=sweep, stack=[{"name": "bf16"}]))
    assert [each.label for each in variants] == [
        "tiny-gpt2-test batch 1: bf16",
        "tiny-gpt2-test batch 2: bf16",
        "tiny batch 1: bf16",
        "tiny batch 2: bf16",
    ]
    with pytest.raises(SpecError, match=r"limits\.max_variants"):
        variants_of(job(*TWO, workload=sweep, limits={"max_variants": 3}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "preset:gpt2"}, "name either model or models"),
        ({"models": ["preset:gpt2", "preset:gpt2"]}, "preset:gpt2 occurs twice"),
        ({"models": ["preset:gpt2", "preset:nothing"]}, "Unknown preset 'nothing'"),
        ({"models": ["preset:gpt2", "preset:resnet-50"]}, "preset:resnet-50 classifies images"),
        ({"workload": {"kind": "matmul"}}, "matmul runs no model"),
        ({"limits": {"max_kld": 0.1}}, "need a trained model"),
        ({"workload": {"kind": "generate", "prompt": "a"}}, "preset:tiny-gpt2-test has random weights"),
    ],
)
def test_each_model_must_fit_the_job(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        job(*TWO, **changes)


def test_a_worker_needs_every_model_that_is_not_everywhere() -> None:
    needs = needs_of(job("hub:a/b", "path:c", "bundled:tiny"))
    assert [need.name for need in needs] == ["torch", "hub:a/b", "path:c"]


def test_the_queue_and_the_titles_name_all_models() -> None:
    spec = job(*TWO)
    assert _row_of(spec, "open", None, ())["model"] == "preset:tiny-gpt2-test, bundled:tiny"
    assert "preset:tiny-gpt2-test, bundled:tiny 16+8" in job_title(spec.model_dump(mode="json"), [])


def test_the_command_line_and_the_library_take_models_in_the_place_of_one() -> None:
    spec = spec_of({"models": "preset:gpt2,bundled:tiny"}, lambda: DeviceKind.CPU)
    assert (spec.model, spec.models) == (None, ("preset:gpt2", "bundled:tiny"))
    assert job_spec("generate", None, (), {"models": TWO, "device": "cpu"}).models == TWO
    ladder = with_default_stack(spec, probe())
    assert ladder.stack
    assert len(variants_of(ladder)) == 2 * (1 + len(ladder.beside))


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
    monkeypatch.setattr(session, "child", lambda _: in_process())
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
