"""Classifiers in ONNX Runtime: logits as torch has them."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optigpu.techniques.compilation.onnx_graph import OnnxGraph
from optigpu.techniques.quantization.onnx_static_int8 import OnnxStaticInt8
from optigpu.vocabulary import UnsupportedError
from optigpu.workloads.classify import Classify
from optigpu.workloads.generate import Generate
from tests.engine import converted_engines
from tests.engine.caches import cache_with
from tests.engine.converted_engines import TINY, error, transformers_classes, transformers_classifier
from tests.engine.resident_converter import resident_converter

pytestmark = [pytest.mark.onnxruntime, pytest.mark.slow]

prepared = partial(converted_engines.prepared, "onnxruntime")
NEAR = 1e-3
TINY_CLASSIFIERS = ("tiny-resnet-test", "tiny-mobilenet-test", "tiny-vit-test")


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with resident_converter(), pytest.MonkeyPatch.context() as patch:
        folder = cache_with(tmp_path_factory.mktemp("onnx"))
        patch.setenv("XDG_CACHE_HOME", str(folder.parent))
        yield


def images(batch: int, side: int = 32) -> Any:
    return np.random.default_rng(3).standard_normal((batch, 3, side, side)).astype(np.float32)


@pytest.mark.parametrize("name", TINY_CLASSIFIERS)
def test_the_logits_are_torch_s_for_every_batch_and_level(tmp_path: Path, name: str) -> None:
    for batch, stack in ((1, ()), (3, ()), (2, (OnnxGraph(level="disabled"),))):
        given = images(batch)
        runtime = prepared(tmp_path, *stack, model=f"preset:{name}", workload=Classify(batch_size=batch))
        done = runtime.forward(given)
        expected = transformers_classes(f"preset:{name}", given)
        assert error(done.logits, expected) <= NEAR
        assert done.chosen.tolist() == expected.argmax(axis=1).tolist()
        assert done.seconds > 0


def test_images_of_another_size_are_a_graph_of_their_own(tmp_path: Path) -> None:
    workload = Classify(image_size=64)
    runtime = prepared(tmp_path, model="preset:tiny-mobilenet-test", workload=workload)
    given = images(1, 64)
    expected = transformers_classes("preset:tiny-mobilenet-test", given)
    assert error(runtime.forward(given).logits, expected) <= NEAR


@pytest.mark.parametrize("name", TINY_CLASSIFIERS)
def test_its_facts_are_those_of_torch(tmp_path: Path, name: str) -> None:
    from optigpu.models.loading.footprint import image_footprint_of
    from optigpu.models.loading.load import count_weights, loaded_image_facts

    runtime = prepared(tmp_path, model=f"preset:{name}", workload=Classify())
    model = transformers_classifier(f"preset:{name}")
    facts = loaded_image_facts(model)
    footprint = image_footprint_of(model, facts, (3, 32, 32))
    found = runtime.footprint()
    assert (found.facts, found.flops, found.pixels) == (facts, footprint.flops, footprint.pixels)
    assert 0.5 * footprint.streamed_bytes < found.streamed_bytes <= 1.1 * footprint.streamed_bytes
    weights = runtime.weights()
    assert weights.parameters == count_weights(model)
    assert weights.bytes == found.streamed_bytes
    assert weights.hash_of == "recipe"


def test_the_request_of_classify_is_checked_and_repeated(tmp_path: Path) -> None:
    workload = Classify(batch_size=2)
    runtime = prepared(tmp_path, model="preset:tiny-vit-test", workload=workload)
    request = workload.prepare(runtime)
    assert request.check().problem is None
    assert request.run()["images_per_s"] > 0
    request.observe()
    assert request.fresh(7).check().problem is None


@pytest.mark.parametrize(
    ("model", "workload"), [(TINY, Classify()), ("preset:tiny-vit-test", Generate())], ids=["text", "images"]
)
def test_a_model_of_another_task_is_refused(tmp_path: Path, model: str, workload: Any) -> None:
    with pytest.raises(UnsupportedError):
        prepared(tmp_path, model=model, workload=workload)


@pytest.mark.parametrize("name", TINY_CLASSIFIERS)
def test_static_int8_is_smaller_and_near(tmp_path: Path, name: str) -> None:
    given = images(8)
    model, workload = f"preset:{name}", Classify(batch_size=8)
    runtime = prepared(tmp_path, OnnxStaticInt8(), model=model, workload=workload)
    assert 0 < error(runtime.forward(given).logits, transformers_classes(model, given)) <= 0.5
    plain = prepared(tmp_path, model=model, workload=workload)
    assert runtime.weights().bytes < 0.6 * plain.weights().bytes
    assert runtime.footprint().product_dtypes == ("int8",)
    assert runtime.weights().hash == plain.weights().hash
