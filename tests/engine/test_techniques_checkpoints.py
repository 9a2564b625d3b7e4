"""gptq and awq: ready checkpoints compute with their unpacked weights, and other models are quantized by GPTQModel."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from optigpu.backends.torch.applied import DecodingModel
from optigpu.hardware import probe
from optigpu.job.spec import resolve
from optigpu.models.loading.checkpoint import packed_layers, weights_of
from optigpu.models.loading.footprint import footprint_of, weight_bytes
from optigpu.models.loading.load import MODELS_DIR, count_weights, load_model
from optigpu.models.loading.self_written import sampled
from optigpu.models.reference import parse_reference
from optigpu.ops.four_bits.quantize import dequantize_groups, quantize_groups
from optigpu.ops.four_bits.scheme import Int4Scheme
from optigpu.surgery.gptqmodel.checkpoints import calibration_ids, int4_weights_of, result_digest
from optigpu.surgery.gptqmodel.technique import Calibration, Recipe
from optigpu.surgery.integer_layers import int4_bytes
from optigpu.surgery.places import weight_of
from optigpu.techniques.base import Notes, Technique
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.quantization.awq import Awq
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.gptq import Gptq
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.vocabulary import DeviceKind, SpecError, UnsupportedError
from tests.breadth import cases
from tests.engine.decoded import assert_right
from tests.engine.decoder_models import divergence_of
from tests.engine.packed_models import (
    GROUP,
    PACKED_FAMILIES,
    Layout,
    as_rows,
    linear_layers,
    write_packed_tiny,
)
from tests.engine.tiny_models import FAMILIES, assert_needs_hook, prompt, runtime_of
from tests.engine.trained_model import save_trained_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("models_dir", "one_torch_thread")]
LAYOUTS = {
    "gptq": Layout(),
    "gptq_v2": Layout(less_one=False),
    "act_order": Layout(act_order=True),
    "awq": Layout("awq"),
}
TECHNIQUE: dict[str, Technique] = {"gptq": Gptq(), "awq": Awq()}
EVERY = [(name, family) for name, layout in LAYOUTS.items() for family in PACKED_FAMILIES[layout.method]]
BY_DEFAULT = [("gptq", "gpt2"), ("act_order", "llama"), ("awq", "qwen2"), ("gptq_v2", "opt")]
EVERY_LAYOUT = pytest.mark.parametrize(("layout", "family"), cases(dict.fromkeys([*BY_DEFAULT, *EVERY]), 4))


@pytest.fixture(scope="module")
def written(models_dir: Path) -> dict[tuple[str, str], Any]:
    """Each checkpoint as `path:packed/LAYOUT-FAMILY`, with its unpacked weights as a float64 model."""
    return {
        (name, family): write_packed_tiny(models_dir / "packed" / f"{name}-{family}", family, LAYOUTS[name])
        for name, family in EVERY
    }


@EVERY_LAYOUT
def test_a_checkpoint_stands_for_the_weights_that_were_written(
    layout: str, family: str, written: dict[tuple[str, str], Any]
) -> None:
    method = LAYOUTS[layout].method
    model = load(layout, family, packed=method)
    expected = linear_layers(written[layout, family])
    found = dict(packed_layers(model))
    assert set(found) == set(expected)
    for path, layer in found.items():
        assert weights_of(layer.unpacked()).double().equal(as_rows(expected[path]))
    assert count_weights(model) == count_weights(written[layout, family])


@EVERY_LAYOUT
def test_a_packed_model_decodes_as_its_weights_and_rounding_allow(
    layout: str, family: str, written: dict[tuple[str, str], Any]
) -> None:
    technique = TECHNIQUE[LAYOUTS[layout].method]
    runtime = runtime_of(reference(layout, family), technique)
    assert_right(runtime, written[layout, family], "float32")
    found, plain = (
        footprint_of(each, runtime.facts).facts for each in (runtime.model, written[layout, family])
    )
    assert found == plain
    assert runtime.notes.facts["int4_source"] == "checkpoint"
    assert runtime.notes.facts["int4_layers"] == len(linear_layers(written[layout, family]))


@EVERY_LAYOUT
def test_without_its_technique_a_packed_model_is_the_widened_one(
    layout: str, family: str, written: dict[tuple[str, str], Any]
) -> None:
    runtime = runtime_of(reference(layout, family))
    assert_right(runtime, written[layout, family], "float32")
    assert {type(layer).__name__ for layer in linear_layers(runtime.model).values()} == {"Linear"}


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_a_packed_model_may_compute_in_bfloat16_and_in_a_compiled_graph(
    layout: str, written: dict[tuple[str, str], Any]
) -> None:
    technique = TECHNIQUE[LAYOUTS[layout].method]
    half = runtime_of(reference(layout, "llama"), technique, Bf16())
    assert_right(half, written[layout, "llama"], "bfloat16")
    plain = runtime_of(reference(layout, "llama"), technique)
    compiled = runtime_of(reference(layout, "llama"), technique, TorchCompile(backend="aot_eager"))
    assert compiled.generate(prompt(), 4).tokens.equal(plain.generate(prompt(), 4).tokens)


@EVERY_LAYOUT
def test_weights_stay_packed_in_four_bits(
    layout: str, family: str, written: dict[tuple[str, str], Any]
) -> None:
    """As many bytes as weights of the same shapes that were rounded here, and the order of inputs if there is one."""
    model = copy.deepcopy(written[layout, family]).float()
    layers = linear_layers(model).values()
    kept = weight_bytes(model) - sum(layer.weight.nbytes for layer in layers)
    orders = sum(8 * as_rows(layer).shape[1] for layer in layers) if LAYOUTS[layout].act_order else 0
    scheme = Int4Scheme(symmetric=False)  # in groups of GROUP
    expected = kept + orders + sum(int4_bytes(as_rows(layer), scheme) for layer in layers)

    def claim() -> None:
        runtime = runtime_of(reference(layout, family), TECHNIQUE[LAYOUTS[layout].method])
        assert weight_bytes(runtime.model) == expected

    assert_needs_hook(TECHNIQUE[LAYOUTS[layout].method], "modules", claim)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_scales_that_bfloat16_cannot_hold_move_weights_by_a_16th_of_a_step(
    method: str, models_dir: Path
) -> None:
    name = f"packed/inexact-{method}"
    exact = linear_layers(write_packed_tiny(models_dir / name, "llama", Layout(method, exact=False)))
    model = load_model(parse_reference(f"path:{name}"), device="cpu", dtype="float32", packed=method)
    moved = 0.0
    for path, layer in packed_layers(model):
        unpacked = layer.unpacked()
        distance = (dequantize_groups(int4_weights_of(unpacked)).double() - as_rows(exact[path])).abs()
        steps = distance.view(*unpacked.scale.shape, GROUP) / unpacked.scale[..., None]
        moved = max(moved, float(steps.max()))
    assert 0 < moved <= 1 / 16


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"bits": 8}, "8 bits"),
        ({"group_size": -1}, "groups of -1"),
        ({"checkpoint_format": "marlin"}, "the layout marlin"),
        (
            {"quant_method": "awq", "version": "gemv", "zero_point": True, "checkpoint_format": None},
            "the layout gemv",
        ),
        ({"quant_method": "awq", "checkpoint_format": "gemm", "zero_point": False}, "no zero points"),
        ({"group_size": 64}, "not packed as the checkpoint's configuration says"),
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_refused(
    change: dict[str, Any], why: str, models_dir: Path
) -> None:
    folder = models_dir / "packed" / f"refused-{abs(hash(why))}"
    write_packed_tiny(folder, "llama", Layout())
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    for technique in ((), (Gptq(),)):
        with pytest.raises(UnsupportedError, match=why):
            runtime_of(f"path:packed/{folder.name}", *technique)


@pytest.mark.parametrize(
    ("name", "why"), [("scales", "NaN or infinite"), ("g_idx", "groups of different sizes")]
)
def test_damaged_tensors_are_refused_and_leave_the_model(name: str, why: str, models_dir: Path) -> None:
    write_packed_tiny(models_dir / "packed" / f"damaged-{name}", "llama", Layout())
    reference = parse_reference(f"path:packed/damaged-{name}")
    model = load_model(reference, device="cpu", dtype="float32", packed="gptq")
    *_, (_, layer) = packed_layers(model)
    getattr(layer, name)[0] = float("nan") if name == "scales" else 1
    before = [type(module) for module in model.modules()]
    with pytest.raises(UnsupportedError, match=why):
        Gptq().modules(model, Notes())
    assert [type(module) for module in model.modules()] == before


def test_the_wrong_technique_and_a_second_quantization_are_refused(
    written: dict[tuple[str, str], Any],
) -> None:
    with pytest.raises(UnsupportedError, match="was quantized by gptq; use gptq in the stack"):
        runtime_of(reference("gptq", "llama"), Awq())
    with pytest.raises(UnsupportedError, match="quantized already"):
        runtime_of(reference("gptq", "llama"), Int8WeightOnly())
    for technique in TECHNIQUE.values():
        with pytest.raises(SpecError, match="weights are quantized once"):
            resolve((technique, Int8WeightOnly()), "generate")


def load(layout: str, family: str, packed: str | None) -> Any:
    return load_model(
        parse_reference(reference(layout, family)), device="cpu", dtype="float32", packed=packed
    )


def reference(layout: str, family: str) -> str:
    return f"path:packed/{layout}-{family}"


# ---- Models that are not quantized yet. A stand-in for GPTQModel rounds; tests of the marker gptq run the library.


STAND_IN = Path(__file__).parent / "stand_in"


@pytest.mark.long
@pytest.mark.parametrize(("method", "model"), [("gptq", "path:gpt2"), ("awq", "preset:tiny-llama-test")])
def test_what_the_library_made_is_computed_with_and_kept(
    method: str, model: str, stand_in: Path, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(models_dir / f"stood-in-{method}"))
    runtime = runtime_of(model, quick(method))
    assert_computes_with_what_was_made(runtime, models_dir / f"stood-in-{method}", method)
    assert runtime.notes.facts["int4_source"] == "gptqmodel 0.0.1"
    again = runtime_of(model, quick(method))
    assert again.notes.facts["int4_source"] == "gptqmodel 0.0.1, quantized before"
    assert again.logits(prompt()).equal(runtime.logits(prompt()))
    assert stand_in.read_text().splitlines() == [f"{method} 2 1"]


def test_another_model_recipe_or_text_is_another_result(stand_in: Path) -> None:
    model = runtime_of("path:llama").model
    recipes = [
        Recipe(method, size, Calibration("self", 2, 16, 0))
        for method, size in (("gptq", 32), ("awq", 32), ("gptq", 64))
    ]
    found = {result_digest(model, recipe, [[0]]) for recipe in recipes}
    found.add(result_digest(model, recipes[0], [[1]]))
    model.model.norm.weight[0] += 1
    found.add(result_digest(model, recipes[0], [[0]]))
    model.config.rms_norm_eps = 1.0
    found.add(result_digest(model, recipes[0], [[0]]))
    assert len(found) == 6
    assert result_digest(model, recipes[0], [[0]]) in found


@pytest.mark.long
def test_what_the_library_cannot_quantize_is_refused_with_its_words(
    stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = runtime_of("path:llama").model
    model.config.bos_token_id = 3
    before = [type(module) for module in model.modules()]
    with pytest.raises(UnsupportedError, match=r"by gptq \(ValueError: token 3 is no beginning\)"):
        quick("gptq").modules(model, Notes())
    assert [type(module) for module in model.modules()] == before
    assert list((tmp_path / "optigpu" / "quantized").iterdir()) == []


@pytest.mark.parametrize("method", TECHNIQUE)
def test_without_the_library_only_ready_checkpoints_can_be_had(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    technique, facts = TECHNIQUE[method], runtime_of("path:llama").facts
    environment = probe()
    software = {name: version for name, version in environment.software.items() if name != "gptqmodel"}
    without = environment.model_copy(update={"software": software})
    assert "pip install -e '.[gptq]'" in (technique.check(without, DeviceKind.CPU, facts) or "")
    assert technique.check(without, DeviceKind.CPU, None) is None
    model = runtime_of("path:llama").model
    with pytest.raises(UnsupportedError, match=r"\.\[gptq\]"):
        technique.modules(model, Notes())
    assert len(linear_layers(model)) == 14


def test_awq_refuses_an_opt_model_without_relu_and_outputs_that_are_no_multiple_of_64(stand_in: Path) -> None:
    model = runtime_of("path:opt").model
    with pytest.raises(UnsupportedError, match=r"outputs are a multiple of 64; .*fc1 has 96"):
        Awq().modules(model, Notes())
    model.config.activation_function = "gelu"
    with pytest.raises(UnsupportedError, match="OPT models with the activation relu; this one has gelu"):
        Awq().modules(model, Notes())
    assert not stand_in.exists()


@pytest.mark.parametrize(
    ("text", "samples", "length", "why"),
    [
        ("self", 2, 8000, r"8000 tokens are longer than this model's context of \d+;"),
        (
            "file:mine.txt",
            900,
            60,
            r"900 calibration sequences of 60 tokens need 54000 tokens, and file:mine.txt has \d+",
        ),
        ("file:none.txt", 1, 8, "cannot calibrate with file:none.txt: none.txt under"),
    ],
)
def test_calibration_text_that_does_not_fit_is_refused(
    text: str, samples: int, length: int, why: str, trained_model: Path, language_dir: Path
) -> None:
    model = runtime_of("path:trained").model
    with pytest.raises(UnsupportedError, match=why):
        calibration_ids(model, Calibration(text, samples, length, seed=0), "gptq")


def test_calibration_text_is_drawn_with_the_seed_or_spread_over_the_file(
    trained_model: Path, language_dir: Path
) -> None:
    model = runtime_of("path:trained").model
    drawn = [calibration_ids(model, Calibration("self", 3, 16, seed), "gptq") for seed in (0, 0, 1)]
    assert [len(row) for row in drawn[0]] == [16, 16, 16]
    assert drawn[0] == drawn[1] != drawn[2]
    words = (language_dir / "mine.txt").read_text()
    ids = AutoTokenizer.from_pretrained(trained_model).encode(words, add_special_tokens=False)
    cut = calibration_ids(model, Calibration("file:mine.txt", 3, 16, 0), "gptq")
    assert cut == [ids[start : start + 16] for start in (0, len(ids) // 3, 2 * (len(ids) // 3))]


@pytest.mark.parametrize("text", ["wikitext-2", "hellaswag", "mine.txt", "file:../mine.txt"])
def test_what_quality_is_measured_on_is_no_calibration_text(text: str) -> None:
    for kind in (Gptq, Awq):
        with pytest.raises(ValueError, match=r"calibration must be|without '\.\.'"):
            kind(calibration=text)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for GPTQModel, for this process and its children; the file that it leaves its traces in."""
    facts = tmp_path / "library" / "gptqmodel-0.0.1.dist-info" / "METADATA"
    facts.parent.mkdir(parents=True)
    facts.write_text("Metadata-Version: 2.1\nName: gptqmodel\nVersion: 0.0.1\n")
    folders = [str(STAND_IN), str(tmp_path / "library")]
    for folder in folders:
        monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*folders, str(STAND_IN.parents[2])]))
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "log.txt"))
    return tmp_path / "log.txt"


def quick(method: str) -> Any:
    """The technique with little text to calibrate with."""
    return TECHNIQUE[method].model_copy(update={"samples": 2, "length": 16})


def assert_computes_with_what_was_made(runtime: DecodingModel, cache: Path, method: str) -> None:
    """Each layer multiplies with the numbers in the one folder of the cache, and all other tensors are those in it
    too."""
    (made,) = (cache / "optigpu" / "quantized").iterdir()
    reference = parse_reference(f"path:{made.relative_to(os.environ[MODELS_DIR])}")
    expected = load_model(reference, device="cpu", dtype="float32", packed=method)
    packed = dict(packed_layers(expected))
    for path, layer in packed.items():
        found, weights = (
            runtime.model.get_submodule(path),
            dequantize_groups(int4_weights_of(layer.unpacked())),
        )
        products = found(torch.eye(weights.shape[1])) - (0 if found.bias is None else found.bias)
        torch.testing.assert_close(products.T, weights, rtol=2**-20, atol=2**-20)
    for name, parameter in expected.named_parameters():
        if name.rpartition(".")[0] not in packed:
            assert runtime.model.get_parameter(name).equal(parameter)
    assert runtime.notes.facts["int4_layers"] == len(packed)


@pytest.mark.gptq
@pytest.mark.parametrize(
    ("method", "model"),
    [
        *(("gptq", f"path:{family}") for family in FAMILIES),
        *(("awq", f"preset:tiny-{family}-test") for family in ("llama", "qwen")),
    ],
)
def test_the_library_s_own_layers_are_computed_with(
    method: str, model: str, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = models_dir / f"made-{method}-{model.partition(':')[2]}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    runtime = runtime_of(model, quick(method))
    assert_computes_with_what_was_made(runtime, cache, method)
    assert runtime.generate(prompt(), 4).tokens.shape == (2, 4)


@pytest.mark.gptq
@pytest.mark.parametrize("method", TECHNIQUE)
def test_calibration_loses_less_than_rounding_to_nearest(
    method: str, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In divergence_of from a trained model in fp32, in groups of the same size, the head left as it is.

    On the very text that it was calibrated with, and on text that it has not seen.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(models_dir / f"trained-{method}"))
    name = "bundled:tiny" if method == "gptq" else "path:trained-llama"
    if method == "awq":
        save_trained_model(models_dir / "trained-llama", "llama")
    calibrated = runtime_of(name, TECHNIQUE[method].model_copy(update={"samples": 16, "length": 90})).model
    plain = runtime_of(name).model
    texts = [sampled(plain, plain.config.vocab_size, rows=16, length=90, seed=seed) for seed in (0, 1)]
    rounded = copy.deepcopy(plain)
    scheme = Int4Scheme(symmetric=method == "gptq", solver="min_max")
    for layer in linear_layers(rounded).values():
        weight = weight_of(layer)
        weight.copy_(dequantize_groups(quantize_groups(weight, scheme)))
    for tokens in texts:
        assert 1.2 * divergence_of(calibrated, plain, tokens) < divergence_of(rounded, plain, tokens)
