"""OpenVINO: decoders and classifiers as torch has them, its techniques, what it refuses, and jobs beside torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from optigpu.job.spec import JobSpec
from optigpu.models.loading.load import count_weights, load_model
from optigpu.models.reference import parse_reference
from optigpu.techniques.memory.openvino_kv_cache import OpenVinoKvCache
from optigpu.techniques.quantization.openvino_int4 import OpenVinoInt4
from optigpu.techniques.quantization.openvino_int8 import OpenVinoInt8
from optigpu.vocabulary import SpecError, UnsupportedError
from optigpu.workloads.classify import Classify
from tests.engine.causal_families import causal_model
from tests.engine.converted_engines import (
    TINY,
    error,
    loaded_by_measuring,
    own_cache,
    prepared,
    prompts,
    scored,
    transformers_classes,
    transformers_logits,
)
from tests.engine.sessions import assert_measured, by_label, measured, quick_job, value
from tests.engine.tiny_models import VOCABULARY

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_children")]


EXACT = 1e-4
"""The largest difference of a logit over the largest logit, with everything in float32."""


@pytest.mark.openvino
@pytest.mark.parametrize("family", ["gpt2", "llama", "opt", "qwen2"])
def test_scored_logits_are_transformers_logits(models_dir: Path, tmp_path: Path, family: str) -> None:
    """Of a folder's model, step by step after a prompt's pass."""
    tokens = prompts(2, 48, VOCABULARY)
    found = scored(prepared("openvino", tmp_path, model=f"path:{family}"), tokens, 8)
    assert found.dtype == np.float32
    assert error(found, transformers_logits(f"path:{family}", tokens)[:, 8:]) <= EXACT


@pytest.mark.openvino
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_mixture_computes_what_transformers_does_and_is_quantized_with_its_experts(
    models_dir: Path, tmp_path: Path, family: str
) -> None:
    made = causal_model(family)
    made.save_pretrained(models_dir / family)
    whole = sum(parameter.numel() for parameter in made.parameters())
    matrices = sum(parameter.numel() for parameter in made.parameters() if parameter.dim() > 1)
    tokens = prompts(2, 20, VOCABULARY)
    plain = prepared("openvino", tmp_path, model=f"path:{family}")
    assert error(scored(plain, tokens, 8), transformers_logits(f"path:{family}", tokens)[:, 8:]) <= EXACT
    assert plain.weights().quantized is None
    weights = prepared("openvino", tmp_path, OpenVinoInt8(), model=f"path:{family}").weights()
    assert weights.quantized == pytest.approx(matrices / whole, abs=1e-9)
    assert weights.bytes < 1.1 * whole


@pytest.mark.openvino
@pytest.mark.parametrize("model", [TINY, "preset:tiny-llama-test"])
def test_its_weights_are_those_of_the_model(tmp_path: Path, model: str) -> None:
    whole = prepared("openvino", tmp_path, model=model)
    small = prepared("openvino", tmp_path, OpenVinoInt4(), model=model)
    weights, quantized = whole.weights(), small.weights()
    loaded = load_model(parse_reference(model), device="cpu", dtype="float32")
    assert weights.parameters == quantized.parameters == count_weights(loaded)
    assert weights.bytes == pytest.approx(4 * weights.parameters, rel=0.01), "what is equal is stored once"
    assert weights.bytes > 6 * quantized.bytes
    assert weights.hash == quantized.hash, "it says which model it is, not in which file"
    assert weights.hash_of == ("files" if model == TINY else "recipe")
    assert whole.footprint().streamed_bytes > 6 * small.footprint().streamed_bytes > 0
    positions = 4 * whole.facts.hidden_size if model == TINY else 0
    assert whole.footprint().row_bytes == positions
    assert whole.footprint().facts == whole.facts


@pytest.mark.openvino
def test_a_window_of_all_layers_is_kept(models_dir: Path, tmp_path: Path) -> None:
    settings = AutoConfig.from_pretrained(models_dir / "llama").to_dict() | {"sliding_window": 8}
    settings.pop("model_type")
    config = AutoConfig.for_model("mistral", **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(models_dir / "window")
    tokens = prompts(2, 32, VOCABULARY)
    found = scored(prepared("openvino", tmp_path, model="path:window"), tokens, 20)
    assert error(found, transformers_logits("path:window", tokens)[:, 20:]) <= EXACT


@pytest.mark.openvino
def test_a_cache_of_8_bits_is_smaller_and_rounds(tmp_path: Path) -> None:
    tokens = prompts(1, 40)
    plain, small = prepared("openvino", tmp_path), prepared("openvino", tmp_path, OpenVinoKvCache())
    assert 0 < error(scored(small, tokens), scored(plain, tokens)) < 0.1
    sizes = [runtime.notes.facts["kv_cache_bytes_per_token"] for runtime in (plain, small)]
    assert sizes == [2 * 4 * 256 * 4, 2 * 4 * 4 * (64 + 8)]


MODELS = ("preset:tiny-resnet-test", "preset:tiny-mobilenet-test", "preset:tiny-vit-test")
SIDE = 32


@pytest.mark.openvino
@pytest.mark.parametrize("model", MODELS)
def test_logits_are_torch_s(tmp_path: Path, model: str) -> None:
    """Also for another number of images than the workload has."""
    runtime = prepared("openvino", tmp_path, model=model, workload=Classify(batch_size=3))
    for batch in (3, 1):
        images = np.random.default_rng(2).standard_normal((batch, 3, SIDE, SIDE), np.float32)
        done = runtime.forward(images)
        expected = transformers_classes(model, images)
        assert error(done.logits, expected) <= 1e-4
        assert done.chosen.tolist() == expected.argmax(axis=1).tolist()
        assert done.seconds > 0


@pytest.mark.openvino
def test_what_is_no_preset_of_a_classifier_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="only presets of image classifiers are converted"):
        prepared("openvino", tmp_path, model="bundled:tiny", workload=Classify())


def test_pictures_are_refused_when_a_job_is_posted() -> None:
    workload = {"kind": "classify", "images": "folder"}
    with pytest.raises((SpecError, ValueError), match="openvino reads no images"):
        JobSpec.model_validate(
            {"workload": workload, "model": "hub:microsoft/resnet-50", "backend": "openvino"}
        )


NAMES = ("openvino_int8", "openvino_int4")
LARGEST_KLD = {"openvino_int8": 0.02, "openvino_int4": 0.5}


@pytest.fixture(scope="module", autouse=True)
def _folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield from own_cache(tmp_path_factory.mktemp("engines"))


@pytest.mark.long
@pytest.mark.openvino
def test_it_is_measured_beside_torch(tmp_path: Path) -> None:
    beside: list[dict[str, Any]] = [{"backend": "openvino", "label": "plain"}]
    beside += [{"backend": "openvino", "stack": [{"name": name}], "label": name} for name in NAMES]
    results = by_label(measured(quick_job(beside=beside), tmp_path))
    assert list(results) == ["baseline", "plain", *NAMES]
    assert len({result.variant.workload_digest for result in results.values()}) == 1
    for result in results.values():
        assert_measured(result)
        assert result.facts.footprint is not None
    assert len({result.facts.weights.hash for result in results.values() if result.facts.weights}) == 1
    assert value(results["plain"], "kld_mean") < 1e-6
    assert value(results["plain"], "top1_agreement") == 1
    for name in NAMES:
        assert 0 < value(results[name], "kld_mean") < LARGEST_KLD[name]
        assert value(results[name], "weight_bytes") < value(results["plain"], "weight_bytes") / 3


@pytest.mark.openvino
def test_its_measuring_process_loads_no_torch_and_no_network_client(tmp_path: Path) -> None:
    """Once the model is kept; writing one is another process's affair."""
    unwanted = ("torch", "transformers", "openvino_telemetry")
    assert loaded_by_measuring("openvino", tmp_path, *unwanted) == "[]"
