"""classify on a folder of labelled images: which are read, what a model is given of them, and its accuracy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from optigpu.backends.torch.runtime import TorchPassRuntime
from optigpu.conductor.provenance import provenance_of
from optigpu.documents.facts import RunFacts
from optigpu.hardware.probe import probe
from optigpu.job.measured import measured
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.meters.base import MeterContext, QualityOptions, Reading
from optigpu.meters.quality import QualityMeter, make_reference
from optigpu.models.held import MODELS_DIR
from optigpu.quality import pictures
from optigpu.quality.pictures import class_indices, open_pictures
from optigpu.quality.text import DATASETS_DIR
from optigpu.techniques.base import Technique
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.vocabulary import SpecError, UnsupportedError
from optigpu.workloads.classify import Classify
from tests.engine.image_models import asked_to_pass, image_runtime, squares

__all__ = ["squares"]

pytestmark = pytest.mark.usefixtures("squares")
COUNT, SIDE = 22, 37
WORKLOAD = Classify(batch_size=8, images="quarters")


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`quarters`: images with a bright quarter, in folders by its number; OPTIGPU_DATASETS_DIR names it."""
    root = tmp_path_factory.mktemp("datasets")
    source = np.random.default_rng(0)
    for index in range(COUNT):
        label = index % 4
        pixels = source.normal(110, 45, (SIDE, SIDE, 3))
        half = SIDE // 2
        pixels[half * (label // 2) :, half * (label % 2) :][:half, :half] += 60
        folder = root / "quarters" / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{index:02}.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DATASETS_DIR, str(root))
        yield root


def context(folder: Path, *stack: Technique, model: str = "path:squares") -> MeterContext:
    runtime = asked_to_pass(image_runtime(model, *stack), folder)
    return MeterContext(runtime, WORKLOAD.prepare(runtime), WORKLOAD, model, folder, 0, QualityOptions())


def by_hand(folder: Path, runtime: TorchPassRuntime) -> tuple[Any, Any]:
    """The model's logits and the labels, image by image, by torch's own operations."""
    import torch

    logits, labels = [], []
    for path in sorted(folder.glob("*/*.png")):
        pixels = np.asarray(Image.open(path), np.float32)[2:34, 2:34] / 255
        scaled = (pixels - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
        given = torch.tensor(scaled, dtype=torch.float32).permute(2, 0, 1)[None]
        logits.append(runtime.passing.model(pixel_values=given).logits[0].detach().numpy())
        labels.append(int(path.parent.name))
    return np.array(logits), np.array(labels)


def test_accuracy_is_the_share_of_images_that_the_model_classifies_as_labelled(
    datasets: Path, tmp_path: Path
) -> None:
    assert make_reference(context(tmp_path)).reasons == {}
    judged = context(tmp_path)
    reading: Reading = QualityMeter().read(judged)
    logits, labels = by_hand(datasets / "quarters", judged.runtime)  # type: ignore[arg-type]
    expected = float((logits.argmax(1) == labels).mean())
    assert reading.values["accuracy"] == pytest.approx(expected)
    assert 0.4 < expected <= 1
    low, high = reading.facts.quality.intervals["accuracy"]  # type: ignore[union-attr]
    assert low < expected < high or expected == high == 1
    assert reading.values["accuracy_loss_percent"] == 0
    assert reading.values["kld_mean"] < 1e-6
    quality = reading.facts.model_dump()["quality"]
    assert (quality["images"], quality["of"]) == (COUNT, "the folder quarters")
    assert quality["dataset_sha256"] == open_pictures("quarters").sha256


def test_a_stack_is_judged_on_the_same_images(datasets: Path, tmp_path: Path) -> None:
    make_reference(context(tmp_path))
    reading = QualityMeter().read(context(tmp_path, Bf16()))
    assert 1e-9 < reading.values["kld_mean"] < 0.05
    assert reading.facts.model_dump()["quality"]["fp32_accuracy"] > 0.4
    assert set(reading.values) | set(reading.reasons) == set(QualityMeter.metrics)


def test_what_is_timed_are_the_folders_images_batch_by_batch(datasets: Path, tmp_path: Path) -> None:
    made = context(tmp_path)
    request: Any = made.request
    assert request.check().problem is None
    assert set(request.run()) == set(Classify.metrics)
    assert request._inputs.shape == (8, 3, 32, 32)
    assert not np.array_equal(request.fresh(7)._inputs, request._inputs)
    facts: Any = made.runtime.notes.facts["pictures"]
    assert (facts.folder, facts.images) == ("quarters", COUNT)
    assert facts.labels == "numbers of the model's classes"
    assert "no processor with the model: shorter side to 37 pixels" in facts.preprocessing


def test_a_models_own_processor_is_used(
    squares: Path, datasets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForImageClassification, ViTImageProcessor

    AutoModelForImageClassification.from_pretrained(squares).save_pretrained(tmp_path / "own")
    ViTImageProcessor(
        size={"height": 48, "width": 48}, image_mean=[0.5] * 3, image_std=[0.25] * 3
    ).save_pretrained(tmp_path / "own")
    monkeypatch.setenv(MODELS_DIR, str(tmp_path))
    made: Any = context(tmp_path, model="path:own")
    assert made.request._inputs.shape == (8, 3, 48, 48)
    assert '"image_std": [0.25, 0.25, 0.25]' in made.runtime.notes.facts["pictures"].preprocessing
    assert made.runtime.notes.facts["network"].input == (48, 48, 3)


def test_the_folders_hash_is_in_the_result_and_in_its_digest(datasets: Path, tmp_path: Path) -> None:
    spec = JobSpec.model_validate({"workload": WORKLOAD, "model": "path:squares"})
    (variant,) = variants_of(spec)
    facts = RunFacts.gathered(context(tmp_path).runtime.notes.facts)
    found = provenance_of(spec, variant, probe(), facts)
    assert found.dataset_hash == open_pictures("quarters").sha256
    known = measured(variant, found)
    assert known.dataset == found.dataset_hash
    assert known.workload_digest != variant.workload_digest


def test_the_hash_changes_with_a_label_and_with_a_pixel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DATASETS_DIR, str(tmp_path))
    image = tmp_path / "set" / "cat" / "a.png"
    image.parent.mkdir(parents=True)
    Image.new("RGB", (4, 4), "red").save(image)
    first = open_pictures("set").sha256
    Image.new("RGB", (4, 4), "blue").save(image)
    second = open_pictures("set").sha256
    (tmp_path / "set" / "labels.csv").write_text("file,label\ncat/a.png,dog\n")
    listed = open_pictures("set")
    assert len({first, second, listed.sha256}) == 3
    assert [each.label for each in listed.pictures] == ["dog"]


@pytest.mark.parametrize(
    ("name", "listed", "said"),
    [
        ("none", None, "There is no folder none"),
        ("empty", None, "holds no labelled image"),
        ("empty", "name,class\n", "columns file and label"),
        ("empty", "file,label\nb.png,1\n", "there is no such file"),
        ("empty", "file,label\n../../outside.png,1\n", "leads out of the folder"),
    ],
)
def test_a_folder_that_cannot_be_read_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, listed: str | None, said: str
) -> None:
    root = tmp_path / "root"
    (root / "empty").mkdir(parents=True)
    (tmp_path / "outside.png").write_bytes(b"")
    monkeypatch.setenv(DATASETS_DIR, str(root))
    if listed:
        (root / "empty" / "labels.csv").write_text(listed)
    with pytest.raises(UnsupportedError, match=said):
        open_pictures(name)


def test_without_pillow_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, datasets: Path
) -> None:
    monkeypatch.setattr(pictures, "find_spec", lambda _: None)
    with pytest.raises(UnsupportedError, match="pip install pillow"):
        open_pictures("quarters")


def test_a_file_that_is_no_image_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, datasets: Path
) -> None:
    monkeypatch.setenv(DATASETS_DIR, str(tmp_path))
    broken = tmp_path / "quarters" / "1" / "broken.png"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"no image")
    with pytest.raises(UnsupportedError, match=r"broken\.png cannot be read as an image"):
        context(tmp_path)


def test_labels_are_names_numbers_or_as_many_as_classes() -> None:
    classes = ("tench, Tinca tinca", "goldfish")
    assert class_indices(["Goldfish", "tinca tinca"], classes)[0].tolist() == [1, 0]
    assert class_indices(["1", "0", "0"], classes)[0].tolist() == [1, 0, 0]
    assert class_indices(["n02", "n01"], classes)[0].tolist() == [1, 0]
    with pytest.raises(UnsupportedError, match="'cat' is no class of this model"):
        class_indices(["cat"], classes)


@pytest.mark.parametrize(
    ("workload", "fields", "said"),
    [
        ({"images": "../up"}, {}, "must be a folder under OPTIGPU_DATASETS_DIR"),
        ({"images": "a", "image_size": 64}, {}, "image_size follows from the model's processor"),
        ({"images": "a"}, {"measure": {"meters": ["latency"]}}, "needs the meter 'quality'"),
        ({"images": "a"}, {"model": "preset:resnet-50"}, "random weights"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_posted(
    workload: dict[str, Any], fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(SpecError, match=said):
        JobSpec.model_validate(
            {"workload": {"kind": "classify"} | workload, "model": "path:squares"} | fields
        )


def test_random_images_have_the_digest_that_they_had() -> None:
    assert Classify().identity() == {"kind": "classify", "batch_size": 1, "image_size": None}
