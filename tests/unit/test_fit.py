"""`optigpu fit` and `advise`: cards by any spelling, what fits them alone or several, and what to choose."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from typer.testing import CliRunner

from optigpu.cli import app
from optigpu.fit.advice import best_measured, best_predicted, code_of, evidence_of
from optigpu.fit.fitting import Asked, Division, Fit, fit, fit_several, memory_ladder, stack_of, usual_stacks
from optigpu.hardware.catalog import gpu_of
from optigpu.job.plan import MEMORY_LADDER, variants_of
from optigpu.job.spec import JobSpec
from optigpu.models.described import decoder_shape
from optigpu.models.reference import parse_reference
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.vocabulary import DeviceKind, Role, SpecError, UnsupportedError

CARDS = "T4 A10 L4 L40 L40S H200 rtx3090 rtx4060 RTX-4080 rtx_4090 rtx5090"


def found(model: str, gpu: str, **asked: int) -> Fit:
    shape, card = decoder_shape(parse_reference(model)), gpu_of(gpu)
    stacks = usual_stacks(card, shape.facts)
    return fit(shape, card, stacks, Asked(**asked))


@pytest.mark.parametrize("name", CARDS.split())
def test_a_card_is_found_in_any_spelling(name: str) -> None:
    plain = name.replace("-", "").replace("_", "").removeprefix("rtx").removeprefix("RTX")
    assert gpu_of(name).name.endswith(plain)


def test_an_unknown_card_lists_the_valid_ones_with_the_closest_first() -> None:
    with pytest.raises(
        SpecError,
        match=r"gpu: 'rtx4070' is not in the catalog\. Did you mean .*RTX 40.0.*\? Its GPUs are A10, ",
    ):
        gpu_of("rtx4070", "gpu")


def test_eight_billion_weights_fit_eight_gigabytes_in_four_bits_alone() -> None:
    rows = {row.label: row for row in found("preset:llama-3.1-8b", "rtx4060").stacks}
    assert not rows["bf16"].fits
    assert not rows["bf16 + int8_weight_only"].fits
    assert rows["bf16 + nf4"].fits
    assert rows["bf16 + int4_weight_only"].fits
    assert rows["bf16"].weight_bytes == pytest.approx(2 * 8_030_261_248, rel=1e-6)
    assert rows["gguf Q4_K_M"].host
    assert rows["gguf Q4_K_M"].weight_bytes == pytest.approx(4.92e9, rel=0.01)


def test_what_fits_up_to_the_largest_context_and_batch_fits_no_further() -> None:
    whole = found("preset:llama-3.1-8b", "rtx3090")
    row = next(row for row in whole.stacks if row.label == "bf16")
    tokens, sequences = row.largest_context or 0, row.largest_batch or 0
    for context, batch, fits in (
        (tokens, 1, True),
        (tokens + 1, 1, False),
        (2048, sequences, True),
        (2048, sequences + 1, False),
    ):
        again = found("preset:llama-3.1-8b", "rtx3090", context=context, batch=batch)
        assert next(row for row in again.stacks if row.label == "bf16").fits is fits


def test_a_model_that_does_not_fit_says_what_would() -> None:
    nothing = found("preset:llama-3.1-405b", "rtx4060")
    assert not any(row.fits for row in nothing.stacks if not row.host)
    assert any("fits NVIDIA " in line or "takes several" in line for line in nothing.advice)
    assert any("of the host's memory" in line for line in nothing.advice)
    batched = found("preset:llama-3.1-8b", "rtx4060", batch=4000)
    assert any("fits with one sequence of up to" in line for line in batched.advice)


def test_a_card_without_bfloat16_gets_float16() -> None:
    labels = [row.label for row in found("preset:gpt2", "T4").stacks]
    assert "fp16" in labels
    assert not any("bf16" in label for label in labels)
    assert not any("awq" in label for label in labels), "GPTQModel's AWQ does not support Conv1D layers"


def test_impossible_requests_are_one_sentence() -> None:
    with pytest.raises(SpecError, match="takes from 2 to 1024 tokens"):
        found("preset:gpt2", "T4", context=4096)
    with pytest.raises(SpecError, match="reserve less"):
        found("preset:gpt2", "T4", reserve_bytes=2**40)
    with pytest.raises(UnsupportedError, match="preset:resnet-50 classifies images; name a model"):
        found("preset:resnet-50", "T4")


def test_the_memory_ladder_is_one_plan_of_eight_rungs_and_the_baseline() -> None:
    spec = JobSpec.model_validate(
        {"workload": {"kind": "generate"}, "model": "bundled:tiny", "plan": "memory-ladder"}
    )
    variants = variants_of(spec)
    assert [variant.label for variant in variants] == ["baseline", *(rung.label for rung in MEMORY_LADDER)]
    assert variants[0].role is Role.BASELINE
    assert variants[-1].backend == "llama_cpp"
    assert [stack.label for stack in memory_ladder()] == [rung.label for rung in MEMORY_LADDER]


H100 = gpu_of("H100 SXM")
BF16 = stack_of((Bf16(),))
LINK = 450e9


def divisions(model: str, **asked: int) -> dict[tuple[int, int], Division]:
    shape = decoder_shape(parse_reference(model))
    found = fit_several(shape, H100, BF16, Asked(**asked), LINK)
    return {(each.tensor, each.pipeline): each for each in found.divisions}


def test_weights_are_divided_evenly_and_every_sum_goes_around_a_ring() -> None:
    layers, hidden, width = 80, 8192, 2
    one = divisions("preset:llama-3.1-70b")
    assert one[8, 1].weight_bytes == pytest.approx(2 * 70.55e9 / 8, rel=0.001)
    assert (one[1, 1].fits, one[4, 1].fits) == (False, True)
    assert one[1, 1].sent_bytes_per_step == 0
    assert one[8, 1].sent_bytes_per_step == layers * 2 * 2 * 7 * hidden * width // 8
    assert one[1, 2].sent_bytes_per_step == hidden * width, "the states alone"
    many = divisions("preset:llama-3.1-70b", batch=16)
    assert many[8, 1].sent_bytes_per_step == 16 * one[8, 1].sent_bytes_per_step
    assert one[8, 1].sent_s == pytest.approx(one[8, 1].sent_bytes_per_step / LINK)


def test_the_command_says_that_it_predicts_and_what_it_lacks() -> None:
    asked = [
        "fit",
        "--model",
        "preset:llama-3.1-70b",
        "--gpu",
        "h100",
        "--plan",
        "several-gpus",
        "--format",
        "json",
    ]
    answer = CliRunner().invoke(app, asked)
    assert answer.exit_code == 0, answer.output
    document = json.loads(answer.stdout)
    assert document["basis"] == "predicted"
    assert document["divisions"][0]["sent_s"] is None
    assert "--link" in document["reasons"]["sent_s"]


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


@pytest.mark.long
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
