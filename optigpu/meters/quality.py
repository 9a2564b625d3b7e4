"""quality: how far a variant's predictions are from those of the fp32 model with the same weights.

Every predicted token is forced through the decode step that was timed, and every image through the pass that was. The
fp32 model's predictions are made once in a job by `make_reference`, in a process of its own: of text by passes over
whole sequences, with no cache and no step of a variant.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from optigpu.documents.facts import ImageQuality, MeterFacts, TextQuality
from optigpu.meters.base import QualityOptions, Reading, Scene
from optigpu.models.reference import parse_reference
from optigpu.quality.divergence import Agreement
from optigpu.quality.hellaswag import accuracy, item_passages, read_items
from optigpu.quality.images import (
    MADE,
    ImageSetting,
    classifier,
    compare_images,
    image_setting,
    write_image_reference,
)
from optigpu.quality.passages import Ids, Passage, Score, predictions
from optigpu.quality.perplexity import perplexity, windows
from optigpu.quality.reference import (
    Manifest,
    Reference,
    Setting,
    describe,
    open_reference,
    refuse_reference,
    window_of,
    write_reference,
)
from optigpu.quality.text import HELLASWAG, SELF, Source, read_source
from optigpu.vocabulary import OptiGPUError
from optigpu.workloads.base import DecodingRuntime

PREFILL = 8
"""Tokens of a self-written sequence that are its prompt; what is timed begins after one."""
FOLDER = "quality"

_DIVERGENCE = ("kld_mean", "kld_p99", "top1_agreement")
_PERPLEXITY = ("perplexity", "perplexity_delta")
_ACCURACY = ("accuracy", "accuracy_loss_percent")


class QualityMeter:
    """Divergence from fp32 on any text, perplexity of a text, accuracy of a multiple-choice test."""

    once: ClassVar[bool] = True
    metrics: ClassVar[tuple[str, ...]] = _DIVERGENCE + _PERPLEXITY + _ACCURACY

    def read(self, scene: Scene) -> Reading:
        """Compares with what `make_reference` left in the scene's folder; where it cannot, says why."""
        try:
            return _compared_images(scene) if scene.workload.classified_images else _compared(scene)
        except OptiGPUError as error:
            return Reading(reasons=dict.fromkeys(self.metrics, str(error)))


def make_reference(scene: Scene) -> Reading:
    """Leaves the fp32 model's predictions in the scene's folder; its stack is empty and its dtype float32.

    Where it cannot, the reason is left instead, and is what every variant's meter then gives.
    """
    folder = scene.folder / FOLDER
    folder.mkdir(exist_ok=True)
    made: Manifest | ImageSetting
    try:
        if scene.workload.classified_images:
            exact = classifier(scene.runtime, exact=True)
            made = write_image_reference(folder, _image_setting(scene), exact)
        else:
            made = _written(scene, folder)
    except OptiGPUError as error:
        refuse_reference(folder, str(error))
        return Reading(reasons=dict.fromkeys(QualityMeter.metrics, str(error)))
    return Reading(facts=MeterFacts(recorded={"quality_reference": made.model_dump(mode="json")}))


def _compared_images(scene: Scene) -> Reading:
    setting = _image_setting(scene)
    agreement = compare_images(scene.folder / FOLDER, setting, classifier(scene.runtime))
    how = ImageQuality(images=setting.images, of=MADE, kld_standard_error=agreement.standard_error())
    why = "The images are made up, so no answer is the right one; compare kld_mean and top1_agreement."
    facts = MeterFacts(quality=how)
    return Reading(agreement.metrics(), dict.fromkeys(_PERPLEXITY + _ACCURACY, why), facts)


def _image_setting(scene: Scene) -> ImageSetting:
    _require_trained(scene)
    batch = scene.workload.classified_images or 1
    return image_setting(str(scene.model), scene.seed, batch, scene.runtime)


def _written(scene: Scene, folder: Path) -> Manifest:
    runtime, source = _runtime(scene), _source(scene)
    setting = _setting(scene, runtime, source)
    passages, cut = _passages(setting, runtime, source)
    manifest = describe(setting, passages, setting.tokens, source.origin if source else None, cut)
    made = predictions(passages, _batch(runtime), _in_numpy(runtime.whole, runtime))
    write_reference(folder, manifest, passages, made)
    return manifest


def _compared(scene: Scene) -> Reading:
    runtime, source = _runtime(scene), _source(scene)
    reference = open_reference(scene.folder / FOLDER, _setting(scene, runtime, source))
    made = predictions(reference.passages, _batch(runtime), _in_numpy(runtime.score, runtime))
    agreement, likelihoods = reference.judge(made)
    parts = [
        _divergence(agreement),
        _perplexity(reference, likelihoods),
        _accuracy(reference, likelihoods, source),
    ]
    found = {name: value for part in parts for name, value in part.found.items()}
    how = _how(reference.manifest, runtime).model_copy(update=found)
    return Reading(
        values={name: value for part in parts for name, value in part.values.items()},
        reasons={name: reason for part in parts for name, reason in part.reasons.items()},
        facts=MeterFacts(quality=how),
    )


def _runtime(scene: Scene) -> DecodingRuntime:
    """The scene's runtime. Raises OptiGPUError where quality means nothing: no decoding, or random weights."""
    runtime: Any = scene.runtime
    if scene.model is None or getattr(runtime, "decoded", None) is None:
        raise OptiGPUError(f"{scene.workload.kind} decodes nothing, so it has no quality; ask for generate.")
    _require_trained(scene)
    found: DecodingRuntime = runtime
    return found


def _require_trained(scene: Scene) -> None:
    if scene.model is not None and parse_reference(scene.model).kind == "preset":
        raise OptiGPUError(
            f"{scene.model} has random weights, which do not behave like trained ones; quality needs a trained model, "
            "for example bundled:tiny."
        )


def _source(scene: Scene) -> Source | None:
    return None if scene.quality.text == SELF else read_source(scene.quality.text)


def _setting(scene: Scene, runtime: DecodingRuntime, source: Source | None) -> Setting:
    window = _window(scene, _decoded(runtime)[1])
    return Setting(
        model=str(scene.model),
        seed=scene.seed,
        text=scene.quality.text,
        tokens=scene.quality.tokens,
        items=scene.quality.items,
        window=window,
        stride=None if scene.quality.text in (SELF, HELLASWAG) else _stride(scene.quality, window),
        vocabulary=runtime.facts.vocabulary,
        dataset_sha256=source.sha256 if source else None,
    )


def _decoded(runtime: DecodingRuntime) -> tuple[int, int]:
    if runtime.decoded is None:
        raise OptiGPUError("Nothing was decoded yet, so no decode step is known to have been timed.")
    return runtime.decoded


def _batch(runtime: DecodingRuntime) -> int:
    return _decoded(runtime)[0]


def _window(scene: Scene, decoded: int) -> int:
    """What is timed is made for the length that the workload decodes: a longer window would run something else.

    The workloads of one job share its reference, and so the window of the first of them.
    """
    options = scene.quality
    window = options.window or window_of(scene.folder / FOLDER) or min(decoded, options.tokens)
    if window > decoded:
        raise OptiGPUError(
            f"quality.window is {window} tokens and the workload decodes {decoded}; ask for a smaller window, or for "
            "longer prompts or outputs."
        )
    return window


def _stride(options: QualityOptions, window: int) -> int:
    stride = options.stride or window // 2
    if stride >= window:
        raise OptiGPUError(
            f"quality.stride is {stride} tokens and a window has {window}; ask for a smaller stride."
        )
    return stride


def _passages(setting: Setting, runtime: DecodingRuntime, source: Source | None) -> tuple[list[Passage], int]:
    """What is predicted, and how many contexts had to be cut for it."""
    if source is None:
        return _own_passages(setting, runtime), 0
    encode = _encoder(setting)
    if setting.text == HELLASWAG:
        return item_passages(read_items(source.content)[: setting.items], encode, setting.window)
    tokens = np.array(encode(source.words())[: setting.tokens], np.int64)
    return windows(tokens, setting.window, setting.stride or 1), 0


def _own_passages(setting: Setting, runtime: DecodingRuntime) -> list[Passage]:
    """Sequences that the model wrote, exactly `tokens` of whose tokens are predicted; the last one may be shorter."""
    first = 1 + min(PREFILL, (setting.window - 1) // 2)
    each = setting.window - first
    rows = -(-setting.tokens // each)
    tokens: Ids = runtime.sample(rows, setting.window).cpu().numpy()
    last = setting.tokens - each * (rows - 1)
    return [Passage(row, first) for row in tokens[:-1]] + [Passage(tokens[-1, : first + last], first)]


def _encoder(setting: Setting) -> Callable[[str], list[int]]:
    """Text to ids without special tokens, all of them the model's."""
    from optigpu.models.loading.load import load_tokenizer

    tokenizer = load_tokenizer(parse_reference(setting.model))

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        if max(ids, default=0) >= setting.vocabulary:
            raise OptiGPUError(
                f"The tokenizer of {setting.model} gives id {max(ids)} and the model has {setting.vocabulary}; put the "
                "tokenizer that it was trained with beside it."
            )
        return ids

    return encode


def _in_numpy(score: Callable[[Any, int], Iterator[Any]], runtime: DecodingRuntime) -> Score:
    import torch

    def scored(tokens: Ids, prefill: int) -> Iterator[NDArray[np.float32]]:
        for logits in score(torch.from_numpy(tokens).to(runtime.device.value), prefill):
            yield logits.cpu().numpy()

    return scored


@dataclass(frozen=True)
class _Part:
    """Some of the metrics; `found` fills fields of TextQuality."""

    values: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    found: dict[str, float | None] = field(default_factory=dict)


def _divergence(agreement: Agreement) -> _Part:
    return _Part(agreement.metrics(), found={"kld_standard_error": agreement.standard_error()})


def _perplexity(reference: Reference, likelihoods: NDArray[np.float64]) -> _Part:
    text = reference.manifest.setting.text
    if text in (SELF, HELLASWAG):
        why = f"The text is {text}, which has no perplexity; ask for quality.text wikitext-2 or file:NAME."
        return _Part(reasons=dict.fromkeys(_PERPLEXITY, why))
    try:
        found, expected = perplexity(likelihoods), perplexity(reference.likelihoods)
    except OptiGPUError as error:
        return _Part(reasons=dict.fromkeys(_PERPLEXITY, str(error)))
    values = {"perplexity": found, "perplexity_delta": found - expected}
    return _Part(values, found={"fp32_perplexity": expected})


def _accuracy(reference: Reference, likelihoods: NDArray[np.float64], source: Source | None) -> _Part:
    setting = reference.manifest.setting
    if source is None or setting.text != HELLASWAG:
        why = f"The text is {setting.text}, no multiple-choice test; ask for quality.text hellaswag."
        return _Part(reasons=dict.fromkeys(_ACCURACY, why))
    items = read_items(source.content)[: setting.items]
    starts = np.cumsum([0, *(passage.positions for passage in reference.passages)])[:-1]
    found, error = accuracy(items, np.add.reduceat(likelihoods, starts))
    expected, _ = accuracy(items, np.add.reduceat(reference.likelihoods, starts))
    about: dict[str, float | None] = {
        "accuracy_standard_error": error,
        "fp32_accuracy": expected,
        "items": len(items),
    }
    if expected == 0:
        why = "The fp32 model answers no item rightly, so there is no accuracy to lose; ask for more quality.items."
        return _Part({"accuracy": found}, {"accuracy_loss_percent": why}, about)
    loss = 100 * (expected - found) / expected
    return _Part({"accuracy": found, "accuracy_loss_percent": loss}, found=about)


def _how(manifest: Manifest, runtime: DecodingRuntime) -> TextQuality:
    setting = manifest.setting
    return TextQuality(
        text=setting.text,
        dataset=manifest.origin,
        dataset_sha256=setting.dataset_sha256,
        tokens_sha256=manifest.passages_sha256,
        positions=manifest.positions,
        kld_positions=manifest.compared,
        window=setting.window,
        stride=setting.stride,
        batch_size=_batch(runtime),
        contexts_cut=manifest.cut,
    )
