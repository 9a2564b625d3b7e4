"""prefill and classify: what a pass yields, which hooks it goes through, and what its check finds."""

from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

from optigpu.backends.runtime import Pass
from optigpu.documents.shapes import ImageFacts
from optigpu.meters.base import MeterContext, QualityOptions, Reading
from optigpu.meters.quality import QualityMeter, make_reference
from optigpu.models.facts import known_facts
from optigpu.models.loading.load import load_image_model
from optigpu.models.reference import parse_reference
from optigpu.quality.images import ImageSetting, batches
from optigpu.techniques.base import Forward, Notes, Phase, Technique
from optigpu.techniques.memory.inference_mode import InferenceMode
from optigpu.techniques.memory.no_kv_cache import NoKvCache
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.vocabulary import Layer, UnsupportedError
from optigpu.workloads.classify import Classify
from optigpu.workloads.prefill import Prefill
from tests.engine import tiny_models
from tests.engine.image_models import FAMILIES, asked_to_pass, image_runtime, prefill_runtime, squares
from tests.engine.rounding import in_float64, logits_of, rounding_bound, rounding_bound_of

__all__ = ["squares"]

pytestmark = pytest.mark.usefixtures("models_dir")
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


def test_a_request_yields_each_metric_that_the_workload_names(runtime: Any) -> None:
    assert set(PREFILL.prepare(runtime).run()) == set(Prefill.metrics)
    assert set(CLASSIFY.prepare(asked_to_pass(image_runtime("preset:tiny-vit-test"))).run()) == set(
        Classify.metrics
    )


def test_the_metrics_follow_from_the_time_of_the_pass(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "forward", lambda inputs: Pass(inputs, inputs, 0.5))
    found = PREFILL.prepare(runtime).run()
    assert found == {"prefill_tokens_per_s": 32.0, "ttft_s": 0.5, "latency_s": 0.5}
    images = asked_to_pass(image_runtime("preset:tiny-resnet-test"))
    monkeypatch.setattr(images, "forward", lambda inputs: Pass(inputs, inputs, 0.5))
    found = Classify(batch_size=3).prepare(images).run()
    assert found == {"images_per_s": 6.0, "latency_s": 0.5, "requests_per_s": 6.0}


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


@pytest.mark.parametrize(
    ("stack", "caches"),
    [((), ["DynamicCache"] * 2), ((StaticKvCache(),), ["StaticCache"] * 2), ((NoKvCache(),), [None] * 2)],
)
def test_every_prompt_goes_into_an_empty_cache_of_the_stack(
    stack: tuple[Technique, ...], caches: list[str | None]
) -> None:
    runtime = prefill_runtime("path:gpt2", *stack)
    seen: list[tuple[str | None, int]] = []

    def see(module: Any, arguments: Any, named: dict[str, Any]) -> None:
        cache = named.get("past_key_values")
        seen.append((type(cache).__name__ if cache else None, int(cache.get_seq_length()) if cache else 0))

    runtime.model.register_forward_pre_hook(see, with_kwargs=True)
    for _ in range(2):
        runtime.forward(tiny_models.prompt())
    assert seen == [(cache, 0) for cache in caches]
    assert runtime.notes.facts["kv_cache"] == {"DynamicCache": "dynamic", "StaticCache": "static"}.get(
        str(caches[0]), "none"
    )


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


@pytest.mark.parametrize("make", [prefill_runtime, image_runtime], ids=["prefill", "classify"])
def test_a_pass_runs_in_the_stacks_mode_and_dtype(make: Any) -> None:
    import torch

    model = "path:gpt2" if make is prefill_runtime else "preset:tiny-resnet-test"
    workload: Any = PREFILL if make is prefill_runtime else CLASSIFY
    applied = make(model, InferenceMode(), Bf16())
    runtime = asked_to_pass(applied)
    modes = []
    applied.model.register_forward_hook(lambda *_: modes.append(torch.is_inference_mode_enabled()))
    request = workload.prepare(runtime)
    assert request.check().problem is None
    assert modes == [True]
    inputs = torch.from_numpy(request._inputs)
    given = inputs if make is prefill_runtime else inputs.bfloat16()
    assert applied.forward(given).logits.dtype is torch.bfloat16
    assert runtime.forward(request._inputs).logits.dtype == np.float32
    assert (runtime.notes.facts["dtype"], runtime.notes.facts["autograd"]) == ("bfloat16", "inference")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stack", [(), (Bf16(),)], ids=["fp32", "bf16"])
def test_images_go_in_in_the_weights_dtype(family: str, stack: tuple[Technique, ...]) -> None:
    applied = image_runtime(f"preset:tiny-{family}-test", *stack)
    runtime, given = asked_to_pass(applied), []
    applied.model.register_forward_pre_hook(
        lambda _, __, named: given.append(named["pixel_values"].dtype), with_kwargs=True
    )
    request = CLASSIFY.prepare(runtime)
    assert request.check().problem is None
    assert given == [applied.model.dtype]
    assert tuple(request._inputs.shape) == (2, 3, 32, 32)
    assert runtime.notes.facts["image_shape"] == [3, 32, 32]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_over_images_gives_the_models_logits(family: str) -> None:
    import torch

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


def test_attention_is_recorded_where_there_is_any() -> None:
    vit, resnet = (image_runtime(f"preset:tiny-{name}-test") for name in ("vit", "resnet"))
    for runtime in (vit, resnet):
        CLASSIFY.prepare(asked_to_pass(runtime)).observe()
    assert vit.notes.facts["attn_implementation"] == "sdpa"
    assert vit.notes.facts["attention_kernels"] == ["aten::_scaled_dot_product_flash_attention_for_cpu"]
    assert resnet.notes.facts["attention_kernels"] == []
    assert "attn_implementation" not in resnet.notes.facts


def test_the_seed_chooses_the_inputs_and_a_fresh_request_has_others(runtime: Any) -> None:
    first, again = PREFILL.prepare(runtime), PREFILL.prepare(runtime)
    assert np.array_equal(first._inputs, again._inputs)
    assert not np.array_equal(first.fresh(7)._inputs, first._inputs)
    assert int(first._inputs.max()) < tiny_models.VOCABULARY
    images = asked_to_pass(image_runtime("preset:tiny-resnet-test"))
    one, same = CLASSIFY.prepare(images), CLASSIFY.prepare(images)
    assert np.array_equal(one._inputs, same._inputs)
    assert not np.array_equal(one.fresh(7)._inputs, one._inputs)


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


def test_a_choice_that_the_logits_do_not_make_is_found(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    request, forward = PREFILL.prepare(runtime), runtime.forward
    worst = lambda done: Pass(done.logits, done.logits.argmin(axis=-1), done.seconds)  # noqa: E731
    monkeypatch.setattr(runtime, "forward", lambda inputs: worst(forward(inputs)))
    assert "another token or class than the one with the largest logit" in (request.check().problem or "")


@pytest.mark.slow
def test_a_classifier_generates_no_text_and_a_model_of_text_is_no_classifier(squares: Path) -> None:
    with pytest.raises(UnsupportedError, match="path:squares is a resnet model, which generates no text"):
        prefill_runtime("path:squares")
    assert image_runtime("path:squares").facts == known_facts(parse_reference("preset:tiny-resnet-test"))
    with pytest.raises(UnsupportedError, match="path:gpt2 is a gpt2 model, which classifies no images"):
        image_runtime("path:gpt2")


@pytest.mark.parametrize(("size", "fits"), [(None, True), (224, True), (256, False)])
def test_a_model_with_places_takes_images_of_its_size_alone(size: int | None, fits: bool) -> None:
    vit, resnet = (known_facts(parse_reference(f"preset:{name}")) for name in ("vit-base", "resnet-50"))
    assert isinstance(vit, ImageFacts)
    assert isinstance(resnet, ImageFacts)
    assert (Classify(image_size=size).check(vit) is None) == fits
    assert Classify(image_size=size).check(resnet) is None


@pytest.mark.parametrize(("tokens", "fits"), [(1024, True), (1025, False)])
def test_a_prompt_must_fit_the_context(tokens: int, fits: bool) -> None:
    facts: Any = known_facts(parse_reference("preset:gpt2"))
    assert (Prefill(prompt_tokens=tokens).check(facts) is None) == fits


class TestQuality:
    """A classifier's predictions against those of fp32, on images made from the seed."""

    pytestmark = pytest.mark.usefixtures("squares")

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

    def test_a_little_rounding_is_seen(self, tmp_path: Path) -> None:
        reading = self.measured(tmp_path, Bf16())
        assert 1e-9 < reading.values["kld_mean"] < 0.01
        assert 0.8 < reading.values["top1_agreement"] <= 1

    def test_a_spoiled_model_shows(self, tmp_path: Path) -> None:
        make_reference(self.context(tmp_path))
        spoiled: Any = self.context(tmp_path)
        spoiled.runtime.passing.model.classifier[1].weight.neg_()
        values = QualityMeter().read(spoiled).values
        assert values["kld_mean"] > 0.05
        assert values["top1_agreement"] < 0.9

    def test_another_seed_is_another_reference(self, tmp_path: Path) -> None:
        make_reference(self.context(tmp_path))
        reading = QualityMeter().read(self.context(tmp_path, seed=1))
        assert "made for other images" in reading.reasons["kld_mean"]

    def test_without_a_reference_there_is_a_reason(self, tmp_path: Path) -> None:
        assert "no fp32 reference" in QualityMeter().read(self.context(tmp_path)).reasons["kld_mean"]

    def test_random_weights_have_no_quality(self, tmp_path: Path) -> None:
        context = self.context(tmp_path, model="preset:tiny-resnet-test")
        assert set(make_reference(context).reasons) == set(QualityMeter.metrics)
        assert "random weights" in QualityMeter().read(context).reasons["kld_mean"]

    def test_the_images_have_the_spectrum_of_photographs(self) -> None:
        setting = ImageSetting(model="m", seed=3, images=4, batch_size=2, shape=(3, 64, 64), classes=10)
        first, second = batches(setting)
        again = next(iter(batches(setting)))
        assert np.array_equal(first, again)
        assert not np.array_equal(first, second)
        assert first.shape == (2, 3, 64, 64)
        assert np.allclose(first.std(axis=(2, 3)), 1, atol=1e-3)
        assert np.allclose(first.mean(axis=(2, 3)), 0, atol=1e-3)
        amplitude = np.abs(np.fft.fft2(np.concatenate([first, second]))).mean(axis=(0, 1))
        assert amplitude[0, 2] / amplitude[0, 16] == pytest.approx(8, rel=0.5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_gives_the_same_classifier_again(family: str) -> None:
    reference = parse_reference(f"preset:tiny-{family}-test")
    first, again, other = (
        load_image_model(reference, device="cpu", dtype="float32", seed=seed).state_dict()
        for seed in (1, 1, 2)
    )
    assert all(first[name].equal(again[name]) for name in first)
    assert not all(first[name].equal(other[name]) for name in first)
    assert all(tensor.isfinite().all() for tensor in first.values())
