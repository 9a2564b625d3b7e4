"""`optigpu fit`: cards by any spelling, what fits them, and what would where nothing does."""

import json

import pytest
from typer.testing import CliRunner

from optigpu.cli import app
from optigpu.fit.fitting import Asked, Fit, fit
from optigpu.fit.stacks import memory_ladder, usual_stacks
from optigpu.hardware.cards import gpu_of
from optigpu.job.memory_ladder import MEMORY_LADDER
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.models.described import decoder_shape
from optigpu.models.reference import parse_reference
from optigpu.vocabulary import Role, SpecError, UnsupportedError

CARDS = "T4 A10 L4 L40 L40S H200 rtx3090 rtx4060 RTX-4080 rtx_4090 rtx5090"


def found(model: str, gpu: str, **asked: int) -> Fit:
    shape, card = decoder_shape(parse_reference(model)), gpu_of(gpu)
    stacks = usual_stacks(card, shape.facts)
    return fit(shape, card, stacks, Asked(**asked))


@pytest.mark.parametrize("name", CARDS.split())
def test_a_card_is_found_in_any_spelling(name: str) -> None:
    plain = name.replace("-", "").replace("_", "").removeprefix("rtx").removeprefix("RTX")
    assert gpu_of(name).name.endswith(plain)


def test_a_name_that_several_cards_share_means_the_one_that_people_mean() -> None:
    assert found("preset:gpt2", "a100").gpu == "NVIDIA A100 SXM 80GB"
    assert found("preset:gpt2", "H100 PCIe").gpu == "NVIDIA H100 PCIe"


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stack": [{"name": "bf16"}]}, "memory-ladder has its own stacks; leave stack out"),
        ({"workload": {"kind": "prefill"}}, "memory-ladder measures models that generate text, not prefill"),
    ],
)
def test_a_memory_ladder_refuses_what_it_cannot_measure(changes: dict[str, object], message: str) -> None:
    plan = {"workload": {"kind": "generate"}, "model": "bundled:tiny", "plan": "memory-ladder"}
    with pytest.raises(SpecError, match=message):
        JobSpec.model_validate(plan | changes)


def test_the_command_prints_predictions_as_json_and_as_a_table() -> None:
    flags = ["fit", "--model", "preset:llama-3.1-8b", "--gpu", "rtx4060"]
    document = json.loads(CliRunner().invoke(app, [*flags, "--json"]).stdout)
    assert document["basis"] == "predicted"
    assert len(document["stacks"]) == 13
    table = CliRunner().invoke(app, [*flags, "--plan", "memory-ladder", "--format", "md"]).stdout
    assert "predicted memory of 1 x 2,048 tokens" in table
    assert table.count("\n| ") == 10
    only = CliRunner().invoke(app, [*flags, "--stack", "bf16,native_decode", "--json"])
    (packed,) = json.loads(only.stdout)["stacks"]
    assert packed["reason"] is None
    assert packed["weight_bytes"] == pytest.approx(
        7_504_924_672 * 4.25 / 8 + 128_256 * 4096 * 8.25 / 8, rel=0.01
    )
    other = CliRunner().invoke(
        app, ["fit", "--model", "preset:gpt-j-6b", "--gpu", "a100", "--stack", "native_decode", "--json"]
    )
    assert json.loads(other.stdout)["stacks"][0]["reason"].startswith("native_decode supports the families")
