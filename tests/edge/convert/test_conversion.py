"""Real conversions: what comes out runs on both interpreters, is what its manifest says, and is the same each time; and
what TensorFlow must look at before it is refused."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from optigpu.documents.manifest import ModelManifest, read_manifest
from optigpu.edge.gate import check_model, read_golden
from optigpu.edge.tflite import operator_counts, parse_tflite, read_tflite
from optigpu.vocabulary import SpecError, UnsupportedError
from tests.breadth import cases
from tests.edge.convert.conftest import RANDOM, Convert, Ran, document_of, leaves_nothing, run_edge, said

pytestmark = pytest.mark.slow

INTERPRETERS = Path(__file__).with_name("interpreters.py")
FILES = {"tiny.tflite", "tiny.cc", "tiny.h", "golden.bin", "manifest.json"}


def test_the_files_are_those_of_the_contract_and_nothing_else(tiny: Ran) -> None:
    assert {path.name for path in tiny.output.iterdir()} == FILES
    assert [path.name for path in tiny.output.parent.iterdir()] == ["out"]
    assert {Path(each).name for each in document_of(tiny)["files"]} == FILES
    assert document_of(tiny)["manifest"] == json.loads((tiny.output / "manifest.json").read_text())


def test_the_manifest_says_what_the_file_is(tiny: Ran, tiny_manifest: ModelManifest) -> None:
    model = (tiny.output / "tiny.tflite").read_bytes()
    assert tiny_manifest.sha256 == hashlib.sha256(model).hexdigest()
    assert tiny_manifest.model_bytes == len(model)
    assert (tiny_manifest.input.shape, tiny_manifest.output.shape) == ((1, 16, 16, 3), (1, 4))
    network = tiny_manifest.network
    assert (network.family, network.input, network.classes, network.weights) == (
        "file",
        (16, 16, 3),
        4,
        "file",
    )
    assert tiny_manifest.calibration.model_dump() == {"kind": "npz", "samples": 48}
    assert tiny_manifest.rankable
    assert {"tensorflow-cpu", "keras", "ai-edge-litert", "tflite-micro", "numpy"} <= set(tiny_manifest.tools)


def test_the_macs_are_those_counted_by_hand(tiny_manifest: ModelManifest) -> None:
    """Output elements times window times input channels: 8x8x8 of 3x3x3, 8x8x8 of 3x3, 8x8x16 of 8, 4 of 16."""
    macs = {each.name: (each.count, each.macs) for each in tiny_manifest.operators}
    assert macs["CONV_2D"] == (2, 8 * 8 * 8 * 27 + 8 * 8 * 16 * 8)
    assert macs["DEPTHWISE_CONV_2D"] == (1, 8 * 8 * 8 * 9)
    assert macs["FULLY_CONNECTED"] == (1, 4 * 16)
    assert tiny_manifest.macs == 13_824 + 4_608 + 8_192 + 64


def test_the_interpreters_give_the_golden_outputs_and_read_the_same_model(
    edge: Path, tiny: Ran, tiny_manifest: ModelManifest
) -> None:
    path = tiny.output / "tiny.tflite"
    found = json.loads(run_edge(edge, INTERPRETERS, path, tiny.output / "golden.bin"))
    pairs = read_golden(tiny.output / "golden.bin")
    assert found["litert"] == found["micro"] == [pair.output.hex() for pair in pairs]
    assert list(tiny_manifest.golden.outputs) == found["micro"]
    inputs = b"".join(pair.input for pair in pairs)
    assert tiny_manifest.golden.inputs_sha256 == hashlib.sha256(inputs).hexdigest()
    assert len(set(found["micro"])) > 1
    model = read_tflite(path)
    assert [each.name for each in model.operators] == found["operators"]
    assert {each.shape for each in model.tensors} <= {tuple(shape) for shape in found["shapes"]}
    assert 0 < tiny_manifest.parameter_bytes <= found["parameters"]
    for tensor, entry in ((tiny_manifest.input, found["input"]), (tiny_manifest.output, found["output"])):
        assert [tensor.scale, tensor.zero_point, list(tensor.shape)] == [pytest.approx(entry[0]), *entry[1:]]
    # The interpreter aligns what it is given to 16 bytes.
    assert 0 <= found["smallest_arena"] - tiny_manifest.arena_bytes <= 64


@pytest.mark.long
def test_one_seed_gives_the_same_bytes_and_another_one_does_not(
    convert: Convert, soon: Convert, models: Path, samples: Path, tiny: Ran
) -> None:
    """Whether processes of its own make them, or one that has made others."""
    again = convert(models / "tiny.keras", "--npz", samples, "--name", "tiny", "--format", "json")
    other = soon(models / "tiny.keras", "--npz", samples, "--name", "tiny", "--seed", "7")
    for name in FILES:
        assert (again.output / name).read_bytes() == (tiny.output / name).read_bytes()
    assert (other.output / "golden.bin").read_bytes() != (tiny.output / "golden.bin").read_bytes()


def test_a_saved_model_is_the_same_network(
    soon: Convert, models: Path, samples: Path, tiny_manifest: ModelManifest
) -> None:
    ran = soon("--model", models / "saved", "--npz", samples)
    assert ran.status == 0, ran.err
    found = read_manifest(ran.output)
    assert found.operators == tiny_manifest.operators
    assert found.golden.outputs == tiny_manifest.golden.outputs


@pytest.mark.long
def test_mobilenet_is_converted_with_images(mobilenet: Ran) -> None:
    """Keras's table of MobileNetV2 has 11 million MACs for it; its largest tensors take 138,240 bytes at once."""
    found = read_manifest(mobilenet.output)
    assert found.network.model_dump() == {
        "family": "mobilenet_v2",
        "alpha": "0.35",
        "input": (96, 96, 3),
        "classes": 10,
        "weights": "random",
        "seed": 0,
    }
    assert found.macs == 10_666_928
    assert 600_000 < found.model_bytes < 700_000
    assert 138_240 < found.arena_bytes < 266_240
    assert found.calibration.model_dump() == {"kind": "images", "samples": 32}
    assert found.agreement.top1 is not None
    assert len(set(found.golden.outputs)) > 2
    assert operator_counts(read_tflite(mobilenet.output / "model.tflite")) == found.operators
    shown = " ".join(mobilenet.out.split())
    assert "Random weights" in shown
    assert "prediction, not measured" in shown
    assert "The founding claim is implausible here" in shown


REFUSED = {
    "dynamic": r"The input's shape [None, None, None, 3] is dynamic; give each dimension but the batch a number",
    "two_inputs": "The network has 2 inputs; the device agent runs models with one of each.",
    "whole_numbers": "The network takes int32; build it with a float32 input, which is then quantized.",
    "large": "The output has 131,072 numbers, and golden vectors of at most 65,536 are kept",
    "transposed": "ESP-NN lacks the operator TRANSPOSE_CONV, which would run slowly on the device; replace it",
    "lacking": "TFLite Micro lacks the operator GELU; replace it in the network (it has RELU, RELU6",
    "floating": "The model has floating-point operators left: ELU. Replace them by operators that",
    "bicubic": "TensorFlow cannot convert the operator ResizeBicubic to INT8; replace it",
    "exponential": "TFLite Micro cannot run the model: Node EXP (number 1) failed to prepare",
    "sequence": "The network has a loop, as recurrent layers (LSTM, GRU) have, and TensorFlow cannot convert loops",
    "not_a_number": "The network's outputs hold NaN or infinity, and its weights dense",
    "constant": "The model answers the same to 8 different inputs, so golden vectors would prove nothing",
}


@pytest.mark.parametrize(("name", "sentence"), cases(REFUSED.items()))
def test_a_network_that_no_device_runs_is_one_sentence(
    soon: Convert, models: Path, name: str, sentence: str
) -> None:
    ran = soon(models / f"{name}.keras", *RANDOM)
    assert (ran.status, ran.out) == (1, "")
    assert said(ran).startswith(sentence)
    assert leaves_nothing(ran)


def test_an_arena_that_is_too_small_is_one_sentence(soon: Convert, models: Path) -> None:
    ran = soon(models / "tiny.keras", *RANDOM, "--arena", "2KB")
    assert (ran.status, leaves_nothing(ran)) == (1, True)
    assert said(ran).startswith("The model's tensors do not fit into an arena of 2,000 bytes (")
    assert said(ran).endswith("use a smaller input or width, or a larger --arena.")


def test_data_that_does_not_fit_the_network_is_one_sentence(
    soon: Convert, models: Path, tmp_path: Path
) -> None:
    path = tmp_path / "inputs.npz"
    np.savez(path, inputs=np.zeros((4, 8, 8, 3), np.float32))
    ran = soon(models / "tiny.keras", "--npz", path)
    assert (ran.status, leaves_nothing(ran)) == (2, True)
    assert (
        said(ran) == f"{path}: inputs has the shape [4, 8, 8, 3], and the network takes [samples, 16, 16, 3]."
    )


def test_a_truncated_model_is_one_sentence(tiny: Ran) -> None:
    model = (tiny.output / "tiny.tflite").read_bytes()
    for length in [*range(0, 400, 7), *range(400, len(model) - 64, 131)]:
        with pytest.raises(SpecError, match=r"is (a damaged|not a) TensorFlow Lite model"):
            parse_tflite(model[:length], "model.tflite")


def test_a_model_with_wrong_bytes_is_refused_or_read_but_never_crashes(tiny: Ran) -> None:
    model = bytearray((tiny.output / "tiny.tflite").read_bytes())
    random = np.random.default_rng(1)
    refused = 0
    for _ in range(3000):
        damaged = bytearray(model)
        for place in random.integers(0, len(model), 4):
            damaged[place] = random.integers(0, 256)
        try:
            check_model(parse_tflite(bytes(damaged), "model.tflite"))
        except (SpecError, UnsupportedError):
            refused += 1
    assert refused > 300
