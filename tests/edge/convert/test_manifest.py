"""A manifest holds what the contract says, is consistent with itself, and refuses everything else by its field."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from optigpu.documents.manifest import ModelManifest, read_manifest
from optigpu.vocabulary import SpecError
from tests.edge.convert.manifests import OPERATORS, document, manifest


def test_a_manifest_is_the_same_after_it_was_written_and_read(tmp_path: Path) -> None:
    made = manifest()
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(made.model_dump(mode="json")))
    assert json.loads(path.read_text())["schema"] == 1
    assert read_manifest(path) == made
    assert read_manifest(tmp_path) == made


def test_the_digest_of_golden_outputs_holds_the_run_s_id() -> None:
    golden = manifest().golden
    outputs = bytes(10) + b"\x7f" * 10
    assert golden.digest() == hashlib.sha256(outputs).hexdigest()
    assert golden.digest("run-1") == hashlib.sha256(b"run-1" + outputs).hexdigest()


def test_inputs_and_outputs_have_a_byte_for_each_number() -> None:
    assert (manifest().input.bytes, manifest().output.bytes) == (27_648, 10)
    assert manifest().network.label == "mobilenet_v2 alpha 0.35 96x96x3"


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"macs": 1}, "macs: It is not the sum"),
        ({"parameter_bytes": 10**6}, "parameter_bytes: The parameters cannot be larger"),
        (
            {"calibration": {"kind": "random", "samples": 9}},
            "rankable: A model that was calibrated with random",
        ),
        ({"sha256": "AB" * 32}, "sha256"),
        ({"schema": 2}, "schema"),
        ({"arena_bytes": 0}, "arena_bytes: 0 is too small; the least is 1."),
        ({"arena_bytes": -5}, "arena_bytes: -5 is too small"),
        ({"model_bytes": 2**41}, "model_bytes"),
        ({"unknown": 1}, "unknown: Unknown field 'unknown'."),
        ({"operators": []}, "operators"),
        ({"operators": [OPERATORS[0] | {"name": "A<script>"}], "macs": 9_074_304}, r"operators\.0\.name"),
        (
            {"golden": {"count": 1, "inputs_sha256": "cd" * 32, "outputs": ["00" * 9]}},
            "golden.outputs: Each must",
        ),
        ({"golden": {"count": 2, "inputs_sha256": "cd" * 32, "outputs": ["00" * 10]}}, "count is 2"),
        ({"golden": {"count": 1, "inputs_sha256": "cd" * 32, "outputs": ["0" * 19]}}, r"golden\.outputs\.0"),
        ({"input": {"shape": [1, 2**24, 2], "dtype": "int8", "scale": 1, "zero_point": 0}}, "too large"),
        ({"input": {"shape": [1, 4], "dtype": "float32", "scale": 1, "zero_point": 0}}, r"input\.dtype"),
        ({"input": {"shape": [1, 4], "dtype": "int8", "scale": 0, "zero_point": 0}}, r"input\.scale"),
        ({"input": {"shape": [1, 4], "dtype": "int8", "scale": 1, "zero_point": 128}}, r"input\.zero_point"),
        ({"agreement": {"samples": 4}}, "need values, or the reason"),
        ({"agreement": {"samples": 4, "top1": 1.5, "kld_mean": 0}}, r"agreement\.top1"),
        ({"network": {"family": "mobilenet_v2", "input": [96, 96, 3]}}, "needs its width multiplier"),
    ],
)
def test_what_is_wrong_is_named_by_its_field(changed: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(document(**changed)))
    with pytest.raises(SpecError, match=sentence):
        read_manifest(path)


@pytest.mark.parametrize(("text", "sentence"), [("[]", "must hold one JSON object"), ("{", "is not JSON")])
def test_a_file_that_is_no_manifest_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(text)
    with pytest.raises(SpecError, match=sentence):
        read_manifest(path)
    with pytest.raises(SpecError, match="cannot be read"):
        read_manifest(tmp_path / "none.json")


def test_a_network_from_a_file_has_no_width() -> None:
    made = ModelManifest.model_validate(document(network={"family": "file", "input": [6]}))
    assert (made.network.label, made.network.weights) == ("file 6", "file")
