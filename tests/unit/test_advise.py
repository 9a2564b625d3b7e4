"""`optigpu advise`: measurements answer first, predictions where there are none; the code that it prints runs."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from typer.testing import CliRunner

from optigpu.cli import app
from optigpu.fit.advice import best_measured, best_predicted, code_of, evidence_of
from optigpu.fit.fitting import Asked, fit
from optigpu.fit.stacks import usual_stacks
from optigpu.hardware.cards import gpu_of
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.models.described import decoder_shape
from optigpu.models.reference import parse_reference
from optigpu.vocabulary import DeviceKind

NOW = datetime(2026, 1, 10, tzinfo=UTC)
SOFTWARE = {"optigpu": "1.0", "torch": "2.13.0", "transformers": "5.23.0"}
SPEC = JobSpec.model_validate({"workload": {"kind": "generate"}, "model": "bundled:tiny"})


def stored(value: float = 10.0, **changes: Any) -> dict[str, Any]:
    """A result as it is stored, of int8_weight_only by default."""
    variant = variants_of(SPEC.model_copy(update={"stack": ()}))[0].model_copy(update={"weights": "a" * 64})
    return {
        "id": "1",
        "schema_version": 2,
        "created_at": (NOW - timedelta(days=3)).isoformat(),
        "variant": {
            "label": "int8_weight_only",
            "backend": "torch",
            "stack": [{"name": "int8_weight_only", "version": 1}],
            "workload_digest": variant.workload_digest,
        },
        "verdict": {"valid": True},
        "metrics": {"tokens_per_s": {"value": value}, "kld_mean": {"value": 0.01}},
        "environment": {"hardware_class": "A CPU 2 cores", "software": SOFTWARE | {"numpy": "2.4"}},
        "provenance": {"weight_hash": "a" * 64},
    } | changes


def measured(*results: dict[str, Any], max_kld: float | None = None) -> Any:
    evidence = evidence_of(results, SPEC, "a run")
    return best_measured(evidence, SPEC, "A CPU 2 cores", SOFTWARE, max_kld=max_kld, now=NOW)


def test_the_best_valid_result_answers_with_its_age() -> None:
    advice = measured(stored(), stored(20.0, id="2"), stored(99.0, id="3", verdict={"valid": False}))
    assert (advice.basis, advice.evidence.result_id, advice.age_s) == ("measured", "2", 3 * 86400)
    assert "The best of 2 valid results" in advice.reason
    assert "3 days ago" in advice.reason
    assert advice.stack == ({"name": "int8_weight_only"},)


@pytest.mark.parametrize(
    "changes",
    [
        {"variant": stored()["variant"] | {"workload_digest": "another"}},
        {"environment": {"hardware_class": "A CPU 4 cores", "software": SOFTWARE}},
        {"environment": {"hardware_class": "A CPU 2 cores", "software": SOFTWARE | {"torch": "2.12.0"}}},
        {"metrics": {"tokens_per_s": {"value": None}}},
    ],
    ids=["another workload", "other hardware", "other versions", "no figure"],
)
def test_what_is_not_comparable_does_not_answer(changes: dict[str, Any]) -> None:
    assert measured(stored(**changes)) is None


def test_with_a_bound_only_a_known_divergence_below_it_counts() -> None:
    unknown = stored(50.0, metrics={"tokens_per_s": {"value": 50.0}})
    assert measured(stored(), unknown, max_kld=0.02).evidence.value == 10.0
    assert measured(stored(), max_kld=0.001) is None


def predicted(model: str, gpu: str, max_kld: float | None = None) -> Any:
    card, shape = gpu_of(gpu), decoder_shape(parse_reference(model))
    stacks = usual_stacks(card, shape.facts)
    spec = JobSpec.model_validate({"workload": {"kind": "generate"}, "model": model, "device": "cuda"})
    found = fit(shape, card, stacks, Asked(context=256))
    return best_predicted(found, stacks, spec, card.name, max_kld=max_kld)


@pytest.mark.parametrize(
    ("gpu", "label"),
    [("rtx3090", "bf16 + int8_weight_only"), ("rtx4060", "bf16 + nf4")],
)
def test_eight_bits_are_preferred_and_four_are_for_what_does_not_fit_else(gpu: str, label: str) -> None:
    advice = predicted("preset:llama-3.1-8b", gpu, max_kld=0.02)
    assert (advice.basis, advice.label, advice.device) == ("predicted", label, DeviceKind.CUDA)
    assert "Only a measurement shows whether its kld_mean is at most 0.02" in advice.reason


def test_a_model_that_fits_no_card_runs_on_the_host() -> None:
    advice = predicted("preset:llama-3.1-405b", "rtx4060")
    assert (advice.backend, advice.device) == ("llama_cpp", DeviceKind.CPU)
    assert "GB of the host's memory instead" in advice.reason


def test_the_command_prints_a_stack_its_reason_and_code(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path))
    made = CliRunner().invoke(app, ["advise", "--model", "preset:llama-3.1-8b", "--gpu", "rtx4060"])
    assert made.stdout.startswith("bf16 + nf4 (predicted)\nNothing was measured there")
    assert "spec = JobSpec.model_validate(" in made.stdout
    wrong = CliRunner().invoke(app, ["advise", "--model", "preset:gpt9"])
    assert "Unknown preset 'gpt9'" in str(wrong.exception)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_children", "own_lock")
def test_the_code_that_is_printed_measures_the_stack(capsys: pytest.CaptureFixture[str]) -> None:
    """In less time: that it works is all that is asked."""
    small = {"kind": "generate", "prompt_tokens": 4, "new_tokens": 4}
    spec = JobSpec.model_validate({"workload": small, "model": "preset:tiny-llama-test"})
    code = code_of(spec, "torch", DeviceKind.CPU, ({"name": "int8_weight_only"},))
    seconds = "'min_seconds': 1"
    assert seconds in code
    brief = code.replace("'measure'", "'limits': {'wait_for_quiet_s': 0}, 'measure'").replace(
        seconds, "'min_seconds': 0.05"
    )
    exec(brief, {})
    label, value, unit = capsys.readouterr().out.split()
    assert label == "int8_weight_only"
    assert float(value) > 0
    assert unit == "1/s"
