"""prefill and classify: what a pass yields, its hooks, its check, and the accuracy on a folder of labelled images."""

from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageClassification, ViTImageProcessor

from optigpu.backends.runtime import Pass
from optigpu.backends.torch.runtime import TorchPassRuntime
from optigpu.meters.base import MeterContext, QualityOptions, Reading
from optigpu.meters.quality import QualityMeter, make_reference
from optigpu.models.held import MODELS_DIR
from optigpu.quality.pictures import open_pictures
from optigpu.quality.text import DATASETS_DIR
from optigpu.techniques.base import Forward, Notes, Phase, Technique
from optigpu.techniques.memory.no_kv_cache import NoKvCache
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.vocabulary import Layer, UnsupportedError
from optigpu.workloads.classify import Classify
from optigpu.workloads.prefill import Prefill
from tests.engine import tiny_models
from tests.engine.image_models import FAMILIES, asked_to_pass, image_runtime, prefill_runtime
from tests.engine.rounding import in_float64, logits_of, rounding_bound, rounding_bound_of

pytestmark = pytest.mark.usefixtures("squares")

PREFILL = Prefill(prompt_tokens=8, batch_size=2)
CLASSIFY = Classify(batch_size=2)


class Twice(Technique):
    """Runs each pass twice and doubles what comes out."""

    layer: ClassVar[Layer] = Layer.COMPILATION
    phase: ClassVar[Phase] = Phase.COMPILATION
    name: Literal["twice"] = "twice"

    def forward(self, forward: Forward, notes: Notes) -> Forward:
        def doubled(inputs: Any) -> Any:
            notes.record(passes=notes.facts.get("passes", 0) + 2)
            return forward(inputs) + forward(inputs)

        return doubled


@pytest.fixture(scope="module")
def runtime(models_dir: Path) -> Any:
    return asked_to_pass(prefill_runtime("path:gpt2"))


@pytest.mark.slow
def test_the_metrics_follow_from_the_time_of_the_pass(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "forward", lambda inputs: Pass(inputs, inputs, 0.5))
    found = PREFILL.prepare(runtime).run()
    assert found == {"prefill_tokens_per_s": 32.0, "ttft_s": 0.5, "latency_s": 0.5}
    images = asked_to_pass(image_runtime("preset:tiny-resnet-test"))
    monkeypatch.setattr(images, "forward", lambda inputs: Pass(inputs, inputs, 0.5))
    found = Classify(batch_size=3).prepare(images).run()
    assert found == {"images_per_s": 6.0, "latency_s": 0.5, "requests_per_s": 6.0}


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
@pytest.mark.parametrize("stack", [(), (StaticKvCache(),), (NoKvCache(),)], ids=["dynamic", "static", "none"])
def test_prefill_gives_the_logits_of_the_prompts_last_token(
    family: str, stack: tuple[Technique, ...]
) -> None:
    runtime = prefill_runtime(f"path:{family}", *stack)
    prompt = tiny_models.prompt()
    reference = in_float64(runtime.model)
    done = runtime.forward(prompt)
    bound = rounding_bound(reference, prompt, "float32")
    assert float((done.logits - logits_of(reference, prompt)).abs().max()) <= bound
    assert done.chosen.equal(done.logits.argmax(-1))
    assert done.seconds > 0


@pytest.mark.slow
@pytest.mark.parametrize("make", [prefill_runtime, image_runtime], ids=["prefill", "classify"])
def test_a_pass_goes_through_the_stacks_forward_hook(make: Any) -> None:
    model = "path:gpt2" if make is prefill_runtime else "preset:tiny-resnet-test"
    workload: Any = PREFILL if make is prefill_runtime else CLASSIFY
    plain, doubled = asked_to_pass(make(model)), asked_to_pass(make(model, Twice()))
    request = workload.prepare(doubled)
    assert request.check().problem is None
    found = doubled.forward(request._inputs).logits
    assert np.array_equal(found, 2 * plain.forward(request._inputs).logits)
    assert doubled.notes.facts["passes"] == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_over_images_gives_the_models_logits(family: str) -> None:
    runtime = image_runtime(f"preset:tiny-{family}-test")
    images = torch.from_numpy(CLASSIFY.prepare(asked_to_pass(runtime))._inputs)
    reference = in_float64(runtime.model)

    def exact() -> Any:
        return reference(pixel_values=images.double()).logits

    done = runtime.forward(images)
    bound = rounding_bound_of(reference, exact, "float32")
    assert float((done.logits - exact()).abs().max()) <= bound
    assert float((done.logits.flip(0) - exact()).abs().max()) > bound
    assert float(exact().std()) > 0.05, "images neither fade away nor grow without bounds"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda logits: logits[:, :-1], "shape"),
        (lambda logits: logits.index_fill(1, logits.argmax(-1), float("nan")), "NaN or infinite"),
        (lambda logits: logits * float("inf"), "NaN or infinite"),
    ],
)
@pytest.mark.parametrize("kind", ["prefill", "classify"])
def test_a_wrong_output_is_found(spoil: Any, words: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make: Any = prefill_runtime if kind == "prefill" else image_runtime
    workload: Any = PREFILL if kind == "prefill" else CLASSIFY
    runtime = make("path:gpt2" if kind == "prefill" else "preset:tiny-resnet-test")
    request, whole = workload.prepare(asked_to_pass(runtime)), runtime._forward
    monkeypatch.setattr(runtime, "_forward", lambda inputs: spoil(whole(inputs)))
    problem = request.check().problem
    assert problem is not None
    assert words in problem


class TestQuality:
    """A classifier's predictions against those of fp32, on images made from the seed."""

    @staticmethod
    def context(folder: Path, *stack: Technique, model: str = "path:squares", seed: int = 0) -> MeterContext:
        runtime = asked_to_pass(image_runtime(model, *stack), folder)
        workload = Classify(batch_size=24)
        return MeterContext(
            runtime, workload.prepare(runtime), workload, model, folder, seed, QualityOptions()
        )

    def measured(self, folder: Path, *stack: Technique) -> Reading:
        assert make_reference(self.context(folder)).reasons == {}
        return QualityMeter().read(self.context(folder, *stack))

    def test_fp32_does_not_diverge_from_itself(self, tmp_path: Path) -> None:
        reading = self.measured(tmp_path)
        assert reading.values["kld_mean"] <= 1e-9
        assert reading.values["top1_agreement"] == 1
        assert reading.facts.model_dump()["quality"]["images"] == 72, "whole batches"
        assert set(reading.values) | set(reading.reasons) == set(QualityMeter.metrics)

    def test_a_spoiled_model_shows(self, tmp_path: Path) -> None:
        make_reference(self.context(tmp_path))
        spoiled: Any = self.context(tmp_path)
        spoiled.runtime.passing.model.classifier[1].weight.neg_()
        values = QualityMeter().read(spoiled).values
        assert values["kld_mean"] > 0.05
        assert values["top1_agreement"] < 0.9


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


def labelled_context(folder: Path, *stack: Technique, model: str = "path:squares") -> MeterContext:
    runtime = asked_to_pass(image_runtime(model, *stack), folder)
    return MeterContext(runtime, WORKLOAD.prepare(runtime), WORKLOAD, model, folder, 0, QualityOptions())


def by_hand(folder: Path, runtime: TorchPassRuntime) -> tuple[Any, Any]:
    """The model's logits and the labels, image by image, by torch's own operations."""
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
    assert make_reference(labelled_context(tmp_path)).reasons == {}
    judged = labelled_context(tmp_path)
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


def test_what_is_timed_are_the_folders_images_batch_by_batch(datasets: Path, tmp_path: Path) -> None:
    made = labelled_context(tmp_path)
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
    AutoModelForImageClassification.from_pretrained(squares).save_pretrained(tmp_path / "own")
    ViTImageProcessor(
        size={"height": 48, "width": 48}, image_mean=[0.5] * 3, image_std=[0.25] * 3
    ).save_pretrained(tmp_path / "own")
    monkeypatch.setenv(MODELS_DIR, str(tmp_path))
    made: Any = labelled_context(tmp_path, model="path:own")
    assert made.request._inputs.shape == (8, 3, 48, 48)
    assert '"image_std": [0.25, 0.25, 0.25]' in made.runtime.notes.facts["pictures"].preprocessing
    assert made.runtime.notes.facts["network"].input == (48, 48, 3)


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
