"""What a model needs of each of several GPUs, checked against sums done by hand."""

import json

import pytest
from typer.testing import CliRunner

from optigpu.cli import app
from optigpu.fit.fitting import Asked
from optigpu.fit.several import Division, fit_several
from optigpu.fit.stacks import stack_of
from optigpu.hardware.cards import gpu_of
from optigpu.models.described import decoder_shape
from optigpu.models.reference import parse_reference
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.vocabulary import SpecError

H100 = gpu_of("H100 SXM")
BF16 = stack_of((Bf16(),))
LINK = 450e9


def divisions(model: str, **asked: int) -> dict[tuple[int, int], Division]:
    shape = decoder_shape(parse_reference(model))
    found = fit_several(shape, H100, BF16, Asked(**asked), LINK)
    return {(each.tensor, each.pipeline): each for each in found.divisions}


def test_seventy_billion_weights_are_divided_evenly() -> None:
    found = divisions("preset:llama-3.1-70b")
    assert found[1, 1].weight_bytes == pytest.approx(2 * 70.55e9, rel=0.001)
    assert found[8, 1].weight_bytes == pytest.approx(2 * 70.55e9 / 8, rel=0.001)
    assert not found[1, 1].fits
    assert found[4, 1].fits


def test_405_billion_take_two_machines_of_eight() -> None:
    found = divisions("preset:llama-3.1-405b")
    assert not found[8, 1].fits
    assert found[8, 2].fits
    assert found[8, 2].gpus == 16


@pytest.mark.parametrize(("card", "ways"), [("h200", (8, 1)), ("h100", (8, 2)), ("a100", (8, 2))])
def test_the_fewest_cards_for_405_billion_are_those_whose_memory_holds_them(
    card: str, ways: tuple[int, int]
) -> None:
    gpu = gpu_of(card)
    shape = decoder_shape(parse_reference("preset:llama-3.1-405b"))
    found = fit_several(shape, gpu, BF16, Asked(), None).divisions
    fewest = min((each for each in found if each.fits), key=lambda each: (each.gpus, each.pipeline))
    assert fewest.gpus == ways[0] * ways[1]
    held = 2 * 405.85e9 / fewest.gpus
    assert fewest.weight_bytes == pytest.approx(held, rel=0.02)
    assert gpu.memory_bytes is not None
    assert held < fewest.peak_bytes < gpu.memory_bytes


def test_every_sum_goes_around_a_ring() -> None:
    layers, hidden, width = 80, 8192, 2
    one = divisions("preset:llama-3.1-70b")
    assert one[1, 1].sent_bytes_per_step == 0
    assert one[8, 1].sent_bytes_per_step == layers * 2 * 2 * 7 * hidden * width // 8
    assert one[1, 2].sent_bytes_per_step == hidden * width, "the states alone"
    many = divisions("preset:llama-3.1-70b", batch=16)
    assert many[8, 1].sent_bytes_per_step == 16 * one[8, 1].sent_bytes_per_step
    assert one[8, 1].sent_s == pytest.approx(one[8, 1].sent_bytes_per_step / LINK)


def test_stages_make_room_and_no_speed() -> None:
    found = divisions("preset:llama-3.1-70b")
    alone, two = found[4, 1], found[4, 2]
    assert two.weight_bytes == pytest.approx(alone.weight_bytes / 2, rel=0.02)
    assert alone.read_s is not None
    assert two.read_s == pytest.approx(alone.read_s, rel=0.02)


def test_heads_are_shared_evenly() -> None:
    assert {tensor for tensor, _ in divisions("preset:gpt2", context=1024)} == {1, 2, 4}, "it has 12"


def test_a_context_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(SpecError, match="takes from 2 to 1024 tokens"):
        divisions("preset:gpt2", context=4096)


def test_the_command_says_that_it_predicts_and_what_it_lacks() -> None:
    asked = ["fit", "--model", "preset:llama-3.1-70b", "--gpu", "h100", "--plan", "several-gpus", "--json"]
    answer = CliRunner().invoke(app, asked)
    assert answer.exit_code == 0, answer.output
    document = json.loads(answer.stdout)
    assert document["basis"] == "predicted"
    assert document["divisions"][0]["sent_s"] is None
    assert "--link" in document["reasons"]["sent_s"]


@pytest.mark.parametrize("model", ["preset:llama-3.1-70b", "preset:llama-3.1-405b"])
def test_the_table_says_that_it_predicts(model: str) -> None:
    asked = ["fit", "--model", model, "--gpu", "h200", "--plan", "several-gpus", "--link", "450GB"]
    table = CliRunner().invoke(app, [*asked, "--format", "md"]).stdout
    assert "over several NVIDIA H200" in table
    assert "predicted for a GPU" in table
    assert "All figures are predicted from shapes and the catalog, none is measured." in table
    assert "| GPUs | tensor | pipeline | fits | weights | cache | peak (GB) | sent a step (MB) |" in table


def test_a_link_is_about_several_gpus() -> None:
    asked = ["fit", "--model", "preset:gpt2", "--gpu", "h100", "--link", "450GB"]
    answer = CliRunner().invoke(app, asked)
    assert answer.exit_code
    assert "several-gpus" in str(answer.exception or answer.output)
