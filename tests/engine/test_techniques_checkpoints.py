"""gptq and awq: a ready checkpoint computes with its unpacked weights, in four bits and without its library."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from optigpu.job.spec import resolve
from optigpu.models.loading.footprint import weight_bytes
from optigpu.models.loading.load import count_weights, load_model
from optigpu.models.loading.packed_checkpoints import packed_layers, weights_of
from optigpu.models.reference import parse_reference
from optigpu.ops.four_bits.quantize import dequantize_groups
from optigpu.ops.four_bits.scheme import Int4Scheme
from optigpu.surgery.gptqmodel.checkpoints import int4_weights_of
from optigpu.surgery.int4_layers import int4_bytes
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import Notes, Technique
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.quantization.awq import Awq
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.gptq import Gptq
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.vocabulary import SpecError, UnsupportedError
from tests.engine.decoded import assert_right
from tests.engine.packed_models import (
    GROUP,
    PACKED_FAMILIES,
    Layout,
    as_rows,
    linear_layers,
    write_packed_tiny,
)
from tests.engine.tiny_models import assert_needs_hook, prompt, runtime_of

pytestmark = pytest.mark.usefixtures("one_torch_thread")
LAYOUTS = {
    "gptq": Layout(),
    "gptq_v2": Layout(less_one=False),
    "act_order": Layout(act_order=True),
    "awq": Layout("awq"),
}
TECHNIQUE: dict[str, Technique] = {"gptq": Gptq(), "awq": Awq()}
EVERY = [(name, family) for name, layout in LAYOUTS.items() for family in PACKED_FAMILIES[layout.method]]


@pytest.fixture(scope="module")
def written(models_dir: Path) -> dict[tuple[str, str], Any]:
    """Each checkpoint as `path:packed/LAYOUT-FAMILY`, with its unpacked weights as a float64 model."""
    return {
        (name, family): write_packed_tiny(models_dir / "packed" / f"{name}-{family}", family, LAYOUTS[name])
        for name, family in EVERY
    }


@pytest.mark.parametrize(("layout", "family"), EVERY)
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


@pytest.mark.parametrize(("layout", "family"), EVERY)
def test_a_packed_model_decodes_as_its_weights_and_rounding_allow(
    layout: str, family: str, written: dict[tuple[str, str], Any]
) -> None:
    technique = TECHNIQUE[LAYOUTS[layout].method]
    runtime = runtime_of(reference(layout, family), technique)
    assert_right(runtime, written[layout, family], "float32")
    assert runtime.notes.facts["int4_source"] == "checkpoint"
    assert runtime.notes.facts["int4_layers"] == len(linear_layers(written[layout, family]))


@pytest.mark.parametrize(("layout", "family"), EVERY)
def test_without_its_technique_a_packed_model_is_the_widened_one(
    layout: str, family: str, written: dict[tuple[str, str], Any]
) -> None:
    runtime = runtime_of(reference(layout, family))
    assert_right(runtime, written[layout, family], "float32")
    assert {type(layer).__name__ for layer in linear_layers(runtime.model).values()} == {"Linear"}


@pytest.mark.slow
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


@pytest.mark.parametrize(("layout", "family"), EVERY)
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
        for name, why in {**technique.conflicts, "int8_weight_only": "weights are quantized once"}.items():
            with pytest.raises(SpecError, match=why):
                resolve((technique, TECHNIQUES[name](name=name)), "generate")


def load(layout: str, family: str, packed: str | None) -> Any:
    return load_model(
        parse_reference(reference(layout, family)), device="cpu", dtype="float32", packed=packed
    )


def reference(layout: str, family: str) -> str:
    return f"path:packed/{layout}-{family}"
