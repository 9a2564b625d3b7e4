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


def test_every_sum_goes_around_a_ring() -> None:
    layers, hidden, width = 80, 8192, 2
    one = divisions("preset:llama-3.1-70b")
    assert one[1, 1].sent_bytes_per_step == 0
    assert one[8, 1].sent_bytes_per_step == layers * 2 * 2 * 7 * hidden * width // 8
    assert one[1, 2].sent_bytes_per_step == hidden * width, "the states alone"
    many = divisions("preset:llama-3.1-70b", batch=16)
    assert many[8, 1].sent_bytes_per_step == 16 * one[8, 1].sent_bytes_per_step
    assert one[8, 1].sent_s == pytest.approx(one[8, 1].sent_bytes_per_step / LINK)


def test_heads_are_shared_evenly() -> None:
    assert {tensor for tensor, _ in divisions("preset:gpt2", context=1024)} == {1, 2, 4}, "it has 12"


def test_the_command_says_that_it_predicts_and_what_it_lacks() -> None:
    asked = ["fit", "--model", "preset:llama-3.1-70b", "--gpu", "h100", "--plan", "several-gpus", "--json"]
    answer = CliRunner().invoke(app, asked)
    assert answer.exit_code == 0, answer.output
    document = json.loads(answer.stdout)
    assert document["basis"] == "predicted"
    assert document["divisions"][0]["sent_s"] is None
    assert "--link" in document["reasons"]["sent_s"]


def test_a_link_is_about_several_gpus() -> None:
    asked = ["fit", "--model", "preset:gpt2", "--gpu", "h100", "--link", "450GB"]
    answer = CliRunner().invoke(app, asked)
    assert answer.exit_code
    assert "several-gpus" in str(answer.exception or answer.output)
