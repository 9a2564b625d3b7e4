"""The openvino backend on image classifiers: logits as torch has them, facts, and a job beside torch."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from optigpu.job.spec import JobSpec
from optigpu.measure import run
from optigpu.vocabulary import SpecError, UnsupportedError
from optigpu.workloads.classify import Classify
from tests.engine.converted_engines import error, own_cache, prepared, transformers_classes

MODELS = ("preset:tiny-resnet-test", "preset:tiny-mobilenet-test", "preset:tiny-vit-test")
SIDE = 32


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield from own_cache(tmp_path_factory.mktemp("openvino"))


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.openvino
def test_another_size_is_another_graph(tmp_path: Path) -> None:
    workload = Classify(image_size=48)
    runtime = prepared("openvino", tmp_path, model=MODELS[0], workload=workload)
    images = np.random.default_rng(2).standard_normal((1, 3, 48, 48), np.float32)
    assert error(runtime.forward(images).logits, transformers_classes(MODELS[0], images)) <= 1e-4


@pytest.mark.slow
@pytest.mark.openvino
def test_its_facts_are_those_of_the_torch_backend(tmp_path: Path) -> None:
    workload = Classify(batch_size=2)
    ours = prepared("openvino", tmp_path, model=MODELS[0], workload=workload)
    theirs = prepared("torch", tmp_path, model=MODELS[0], workload=workload)
    workload.prepare(theirs)
    assert ours.facts == theirs.facts
    assert ours.weights().hash == theirs.weights().hash
    assert ours.weights().parameters == theirs.weights().parameters
    assert ours.footprint().flops == theirs.footprint().flops
    assert ours.footprint().pixels == theirs.footprint().pixels
    assert 0.8 < ours.footprint().streamed_bytes / theirs.footprint().streamed_bytes < 1.1


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


@pytest.mark.long
@pytest.mark.openvino
def test_a_job_beside_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path / "data"))
    measure = {"replicates": 1, "min_seconds": 0.01, "max_seconds": 1, "meters": ["latency", "quality"]}
    spec = JobSpec.model_validate(
        {"workload": {"kind": "classify"}, "model": MODELS[0], "measure": measure}
        | {"beside": [{"backend": "openvino"}], "limits": {"wait_for_quiet_s": 0}}
    )
    report = run(spec, lambda _: None, lock_dir=tmp_path, threads=1)
    assert [outcome.reason for outcome in report.outcomes] == [None, None]
    theirs = report.results[1]
    assert theirs.variant.backend == "openvino"
    assert theirs.metrics["images_per_s"].value
