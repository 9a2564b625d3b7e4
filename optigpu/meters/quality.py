"""quality: how far a variant's predictions are from those of the fp32 model with the same weights.

Every predicted token is forced through the decode step that was timed, and every image through the pass that was. The
fp32 model's predictions are made once in a job by `make_reference`, in a separate process: of text by passes over whole
sequences, with no cache and no step of a variant. Of a workload that trains the losses are compared instead.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from optigpu.backends.runtime import (
    DecodingRuntime,
    EncodingRuntime,
    ImageRuntime,
    Images,
    ReferenceRuntime,
)
from optigpu.backends.serving import TellingRuntime
from optigpu.backends.training import TrainingRuntime
from optigpu.documents.facts import ImageQuality, MeterFacts, TextQuality, ToldFacts
from optigpu.documents.selftest import Comparison
from optigpu.meters.base import Meter, MeterContext, QualityOptions, Reading, require_read
from optigpu.models.held import TFLITE
from optigpu.models.reference import parse_reference
from optigpu.quality.divergence import FLOAT_ERROR, divergence
from optigpu.quality.figures import (
    PICTURES,
    Figures,
    accuracy_figures,
    answer_figures,
    divergence_figures,
    perplexity_figures,
    told_figures,
    windows_of,
)
from optigpu.quality.hellaswag import ENDINGS, item_passages, read_items
from optigpu.quality.passages import Passage, Score, after, predictions, scored_at_once, windows, within
from optigpu.quality.pictures import (
    IMAGES,
    IMAGES_RECIPE,
    ImageSetting,
    ReadPictures,
    batches,
    compare_images,
    read_pictures,
    write_image_reference,
)
from optigpu.quality.reference import (
    Manifest,
    Reference,
    Setting,
    describe,
    keep_reference,
    kept_reference,
    open_reference,
    reference_key,
    refuse_reference,
    window_of,
    write_reference,
)
from optigpu.quality.text import HELLASWAG, SELF_WRITTEN, Source, read_source
from optigpu.quality.told import Bounded, Telling, expected_by_told
from optigpu.quality.training import DrawOf, LossSetting, compare_losses, window_means, write_loss_reference
from optigpu.vocabulary import OptiGPUError, Task, UnsupportedError, canonical_json
from optigpu.workloads.base import DecodeShape, LoadRequest, Workload

PREFILL_TOKENS = 8
"""Tokens of a self-written sequence that are its prompt; what is timed begins after one."""
OWN_WINDOW = 128
"""Tokens of a self-written sequence. A model writes several at once in the time of one; 512 tokens in sequences of 256
were three, too few for an interval, and took SmolLM2-135M 22 s on two cores instead of 11."""
QUALITY_FOLDER = "quality"
CHECKED = 32
"""Positions at which passes are compared with the timed step."""

_DIVERGENCE = ("kld_mean", "kld_p99", "top1_agreement")
_PERPLEXITY = ("perplexity", "perplexity_delta")
_ACCURACY = ("accuracy", "accuracy_loss_percent")
_LOSSES = ("loss_final", "loss_deviation", "gradient_norm")
_PREDICTIONS = _DIVERGENCE + _PERPLEXITY + _ACCURACY
_ALONE = "alone_agreement"


class QualityMeter(Meter):
    """Divergence from fp32 on any text, perplexity of a text, accuracy of a multiple-choice test."""

    once: ClassVar[bool] = True
    metrics: ClassVar[tuple[str, ...]] = (*_PREDICTIONS, *_LOSSES, _ALONE)

    def read(self, context: MeterContext) -> Reading:
        """Compares with the reference in the context's folder; gives a reason if it cannot. Under load tokens are also
        compared with those of each request alone, which needs no reference."""
        try:
            if context.workload.task is Task.TRAINING:
                reading = _compared_losses(context)
            elif context.workload.classified_images:
                reading = _compared_images(context)
            else:
                reading = _compared(context)
        except OptiGPUError as error:
            reading = self.none(str(error))
        else:
            reading = replace(reading, reasons=reading.reasons | _of_another_task(context.workload))
        request = context.request
        return _under_load(reading, request, context) if isinstance(request, LoadRequest) else reading

    def self_test(self, context: MeterContext) -> Comparison:
        """The unmodified model's decode steps diverge from its own whole passes by rounding alone."""
        make_reference(context)
        reading = self.read(context)
        require_read(reading, "kld_mean", "top1_agreement")
        return Comparison(abs(reading.values["kld_mean"]), FLOAT_ERROR, "a nat", str(context.model))


def make_reference(context: MeterContext) -> Reading:
    """Leaves the fp32 model's predictions in the context's folder; its stack is empty. Where it cannot, the reason is
    left, which every variant's meter then gives."""
    folder = context.folder / QUALITY_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    made: Manifest | ImageSetting | LossSetting
    try:
        if context.workload.task is Task.TRAINING:
            made = write_loss_reference(folder, *_training(context))
        elif context.workload.classified_images:
            runtime = cast(ImageRuntime, context.runtime)
            runtime.compute_exactly()
            setting = _image_setting(context)
            made = write_image_reference(
                folder,
                setting,
                lambda images: runtime.forward(images).logits,
                _images(_pictures(context), setting),
            )
        else:
            made = _written(context, folder)
    except OptiGPUError as error:
        refuse_reference(folder, str(error))
        return Reading(reasons=dict.fromkeys(QualityMeter.metrics, str(error)))
    return Reading(facts=MeterFacts(recorded={"quality_reference": made.model_dump(mode="json")}))


def _of_another_task(workload: Workload) -> dict[str, str]:
    """Why the metrics of other tasks have no value."""
    alone = {_ALONE: f"{workload.kind} decodes nothing under load; ask for serve."}
    if workload.task is Task.TRAINING:
        why = f"{workload.kind} is compared with fp32 by its losses: loss_deviation."
        return alone | dict.fromkeys(_PREDICTIONS, why)
    return alone | dict.fromkeys(_LOSSES, f"{workload.kind} trains nothing; ask for train_step.")


def _under_load(reading: Reading, request: LoadRequest, context: MeterContext) -> Reading:
    """The reading with the share of the tokens under load that are those of each request alone."""
    try:
        found = request.alone_agreement(context.quality.tokens)
    except OptiGPUError as error:
        return replace(reading, reasons=reading.reasons | {_ALONE: str(error)})
    others = {name: reason for name, reason in reading.reasons.items() if name != _ALONE}
    facts = reading.facts.model_copy(update={"recorded": {_ALONE: found.model_dump()}})
    return replace(reading, values=reading.values | {_ALONE: found.share}, reasons=others, facts=facts)


def _compared_losses(context: MeterContext) -> Reading:
    setting, runtime, draws = _training(context)
    quality = compare_losses(context.folder / QUALITY_FOLDER, setting, runtime, draws)
    runtime.restart()
    values = {"gradient_norm": runtime.gradient_norm(draws(setting.seed)())}
    facts = MeterFacts(quality=quality)
    if quality.course is None or quality.jitter is None:
        why = f"The loss of step {quality.not_finite_step} is not finite."
        return Reading(values, dict.fromkeys(("loss_final", "loss_deviation"), why), facts)
    values |= {
        "loss_final": float(window_means(np.array(quality.losses))[-1]),
        "loss_deviation": max(quality.course, quality.jitter),
    }
    return Reading(values, facts=facts)


def _training(context: MeterContext) -> tuple[LossSetting, TrainingRuntime, DrawOf]:
    runtime, workload = cast(TrainingRuntime, context.runtime), context.workload
    setting = LossSetting(
        model=str(context.model),
        workload=canonical_json(workload.identity()),
        seed=context.seed,
        steps=context.quality.steps,
        seeds=context.quality.seeds,
    )
    return setting, runtime, lambda seed: workload.draws(runtime.facts, seed)


def _compared_images(context: MeterContext) -> Reading:
    setting, runtime = _image_setting(context), cast(ImageRuntime, context.runtime)
    pictures = _pictures(context)
    folder, given = context.folder / QUALITY_FOLDER, _images(pictures, setting)
    compared = compare_images(folder, setting, lambda images: runtime.forward(images).logits, given)
    found = divergence_figures(compared.agreement, np.arange(setting.images))
    missing = dict.fromkeys(_PERPLEXITY, "Images have no perplexity; compare kld_mean and top1_agreement.")
    if pictures is None:
        missing |= dict.fromkeys(
            _ACCURACY, "The images are synthetic and have no labels; name a folder of images."
        )
    else:
        right = [each.argmax(axis=1) == pictures.labels for each in (compared.found, compared.expected)]
        found |= answer_figures(right[0], right[1], PICTURES)
    how = ImageQuality(
        images=setting.images,
        of=f"the folder {pictures.facts.folder}" if pictures else IMAGES_RECIPE,
        dataset_sha256=setting.dataset_sha256,
        **_about(found),
    )
    return Reading(found.values, found.reasons | missing, MeterFacts(quality=how))


def _pictures(context: MeterContext) -> ReadPictures | None:
    """The labelled images of the workload; None where it has none."""
    if not context.workload.has_labels:
        return None
    runtime = cast(ImageRuntime, context.runtime)
    return read_pictures(runtime, runtime.notes.facts["pictures"].folder)


def _images(pictures: ReadPictures | None, setting: ImageSetting) -> Iterator[Images]:
    return pictures.batches(setting.batch_size) if pictures else batches(setting)


def _image_setting(context: MeterContext) -> ImageSetting:
    _require_trained(context)
    if str(context.model).endswith(TFLITE):
        raise OptiGPUError(
            f"{context.model} is a converted file, without the fp32 weights that it was made of; its manifest has its "
            "agreement with them."
        )
    batch = context.workload.classified_images or 1
    runtime = cast(ImageRuntime, context.runtime)
    facts = runtime.notes.facts["pictures"] if context.workload.has_labels else None
    return ImageSetting(
        model=str(context.model),
        seed=context.seed,
        images=facts.images if facts else -(-IMAGES // batch) * batch,
        batch_size=batch,
        shape=runtime.notes.facts["image_shape"],
        classes=runtime.facts.classes,
        dataset_sha256=facts.sha256 if facts else None,
    )


def _written(context: MeterContext, folder: Path) -> Manifest:
    runtime, source = cast(ReferenceRuntime, _runtime(context)), _source(context)
    decoded = _to_decode(context, runtime)
    setting = _setting(context, runtime, source, decoded)
    key = reference_key(setting, runtime.weights, decoded[0])
    if key and (kept := kept_reference(key, folder)):
        return kept
    passages, cut = _passages(setting, runtime, source)
    manifest = describe(setting, passages, setting.tokens, source.origin if source else None, cut)
    made = predictions(passages, decoded[0], runtime.whole)
    write_reference(folder, manifest, passages, made)
    if key:
        keep_reference(key, folder)
    return manifest


def _compared(context: MeterContext) -> Reading:
    runtime, source = _runtime(context), _source(context)
    beside = context.quality.reference
    if isinstance(runtime, TellingRuntime):
        compared = _compared_told if beside is None else _compared_servers
        return compared(context, runtime, source)
    if beside is not None:
        raise OptiGPUError(
            f"quality.reference is {beside}, with which servers alone are compared; leave it out to compare with fp32."
        )
    batch, length = _decoded(runtime)
    setting = _setting(context, runtime, source, (batch, length))
    reference = open_reference(context.folder / QUALITY_FOLDER, setting)
    began = time.monotonic()
    score, checked = _scoring(runtime, reference.passages, batch)
    made = predictions(reference.passages, batch, score)
    left_s = context.quality.most_seconds - (time.monotonic() - began)
    agreement, likelihoods = reference.judge(made if setting.text == HELLASWAG else within(made, left_s))
    found = divergence_figures(agreement, _units(reference)) | _of_text(reference, likelihoods, source)
    how = _text_quality(reference.manifest, likelihoods, len(agreement), batch=batch, checked=checked)
    return Reading(found.values, found.reasons, MeterFacts(quality=how.model_copy(update=_about(found))))


def _compared_told(context: MeterContext, runtime: TellingRuntime, source: Source | None) -> Reading:
    """As `_compared`, by the log-probabilities that a server tells: bounds of the divergence."""
    # A server decodes sequences of any length: the window is the reference's own.
    setting = _setting(context, runtime, source, (1, context.quality.tokens))
    reference = open_reference(context.folder / QUALITY_FOLDER, setting)
    began, telling = time.monotonic(), runtime.telling(_most(context, runtime))
    made = telling.told(reference.passages, setting.text != SELF_WRITTEN)
    left_s = context.quality.most_seconds - (time.monotonic() - began)
    bounded, likelihoods = reference.judge_told(made if setting.text == HELLASWAG else within(made, left_s))
    found = told_figures(bounded, _units(reference)) | _of_text(reference, likelihoods, source)
    told = _told_facts(telling, bounded, likelihoods)
    how = _text_quality(reference.manifest, likelihoods, len(bounded.low), told=told)
    return Reading(found.values, found.reasons, MeterFacts(quality=how.model_copy(update=_about(found))))


def _compared_servers(context: MeterContext, runtime: TellingRuntime, source: Source | None) -> Reading:
    """What two servers tell of a text. None of it is a distance from fp32: the figures are facts, and the reason why
    the metrics of that have no value."""
    name = str(context.quality.reference)
    setting = _setting(context, runtime, source, (1, min(context.quality.tokens, OWN_WINDOW)))
    passages, cut = _passages(setting, runtime, source)
    theirs, ours = _tellings(runtime, _most(context, runtime), name)
    bounded, likelihoods = Bounded(), np.full(sum(passage.positions for passage in passages), np.nan)
    pairs = (pair for pair in zip(theirs.told(passages, False), ours.told(passages, False), strict=True))
    for expected, each in within(pairs, context.quality.most_seconds):
        bounded.add(*expected_by_told(expected, each))
        likelihoods[each.position] = each.log_likelihood
    told = _told_facts(ours, bounded, likelihoods).model_copy(update={"reference": name})
    why = (
        f"Compared with {name} instead of fp32: divergence {told.kld_low:.4g} to {told.kld_high:.4g} nat, top-1 "
        f"agreement {told.top1_agreement:.2%} over {len(bounded.low)} positions (facts.quality.told)."
    )
    manifest = describe(setting, passages, setting.tokens, source.origin if source else None, cut)
    how = _text_quality(manifest, likelihoods, len(bounded.low), told=told)
    return Reading(reasons=dict.fromkeys(_PREDICTIONS, why), facts=MeterFacts(quality=how))


def _most(context: MeterContext, runtime: TellingRuntime) -> int | None:
    """The tokens that a server is asked for at each position."""
    asked = context.quality.probabilities
    return runtime.facts.vocabulary if asked == "all" else asked


def _tellings(runtime: TellingRuntime, most: int | None, reference: str) -> tuple[Telling, Telling]:
    """The reference and the server; asked in a chat where one of them tells nothing in completions."""
    try:
        return runtime.telling(most, reference), runtime.telling(most)
    except UnsupportedError:
        return runtime.telling(most, reference, by_chat=True), runtime.telling(most, by_chat=True)


def _told_facts(telling: Telling, bounded: Bounded, likelihoods: NDArray[np.float64]) -> ToldFacts:
    return ToldFacts(
        asked_in=telling.label,
        tokens=telling.most,
        rest=bounded.rest,
        kld_low=bounded.low.metrics()["kld_mean"],
        kld_high=bounded.high.metrics()["kld_mean"],
        top1_agreement=bounded.low.metrics()["top1_agreement"],
        assumed=bounded.assumed,
        left_out=bounded.left_out,
        untold_targets=int(np.isinf(likelihoods).sum()),
        vocabulary=telling.vocabulary,
    )


def _units(reference: Reference) -> NDArray[np.int64]:
    """What each position belongs to: its window, or its item of a multiple-choice test."""
    of_items = reference.manifest.setting.text == HELLASWAG
    return windows_of(reference.passages) // (ENDINGS if of_items else 1)


def _text_quality(
    manifest: Manifest,
    likelihoods: NDArray[np.float64],
    compared: int,
    *,
    batch: int = 1,
    checked: int | None = None,
    told: ToldFacts | None = None,
) -> TextQuality:
    """On what text it was measured, and how; without its figures."""
    setting = manifest.setting
    return TextQuality(
        text=setting.text,
        dataset=manifest.origin,
        dataset_sha256=setting.dataset_sha256,
        tokens_sha256=manifest.passages_sha256,
        positions=int((~np.isnan(likelihoods)).sum()),
        asked_positions=manifest.positions,
        kld_positions=compared,
        passes_checked=checked,
        window=setting.window,
        stride=setting.stride,
        batch_size=batch,
        contexts_cut=manifest.cut,
        told=told,
    )


def _scoring(runtime: DecodingRuntime, passages: list[Passage], batch: int) -> tuple[Score, int | None]:
    """The timed step; or passes over whole windows, and at how many positions these predicted what the step does."""
    if not (isinstance(runtime, ReferenceRuntime) and runtime.steps_are_passes):
        return runtime.score, None
    tokens, prefill = scored_at_once(passages[:batch], batch)
    checked = tokens[:, : prefill + CHECKED]
    stepped, passed = (np.stack(list(each(checked, prefill))) for each in (runtime.score, runtime.whole))
    if not (np.isfinite(stepped).all() and np.isfinite(passed).all()):
        return runtime.score, None
    same = (divergence(passed, stepped) <= FLOAT_ERROR) & (passed.argmax(-1) == stepped.argmax(-1))
    return (runtime.whole, len(stepped)) if same.all() else (runtime.score, None)


def _about(found: Figures) -> dict[str, Any]:
    named = {"intervals": found.intervals, "without_part": found.without, "no_interval": found.no_interval}
    return named | found.about


def _runtime(context: MeterContext) -> DecodingRuntime:
    """The context's runtime. Raises OptiGPUError where quality means nothing: no decoding, or random weights."""
    if context.workload.task is not Task.DECODING:
        raise OptiGPUError(
            f"{context.workload.kind} decodes nothing, so it has no quality; ask for generate."
        )
    _require_trained(context)
    return cast(DecodingRuntime, context.runtime)


def _require_trained(context: MeterContext) -> None:
    if context.model is not None and parse_reference(context.model).kind == "preset":
        raise OptiGPUError(
            f"{context.model} has random weights, which do not behave like trained ones; quality needs a trained "
            "model, for example bundled:tiny."
        )


def _source(context: MeterContext) -> Source | None:
    return None if context.quality.text == SELF_WRITTEN else read_source(context.quality.text)


def _setting(
    context: MeterContext, runtime: DecodingRuntime, source: Source | None, decoded: tuple[int, int]
) -> Setting:
    window = _window(context, decoded[1])
    return Setting(
        model=str(context.model),
        seed=context.seed,
        text=context.quality.text,
        tokens=context.quality.tokens,
        items=context.quality.items,
        window=window,
        stride=None
        if context.quality.text in (SELF_WRITTEN, HELLASWAG)
        else _stride(context.quality, window),
        vocabulary=runtime.facts.vocabulary,
        dataset_sha256=source.sha256 if source else None,
    )


def _to_decode(context: MeterContext, runtime: DecodingRuntime) -> tuple[int, int]:
    """The batch and the length in tokens that variants will decode, for a reference, before which nothing need be."""
    shape = context.workload.work_shape
    if runtime.decoded is None and isinstance(shape, DecodeShape):
        return shape.batch_size, shape.prompt_tokens + shape.new_tokens
    return _decoded(runtime)


def _decoded(runtime: DecodingRuntime) -> tuple[int, int]:
    if runtime.decoded is None:
        raise OptiGPUError("Nothing was decoded yet, so there is no timed decode step to check.")
    return runtime.decoded


def _window(context: MeterContext, decoded: int) -> int:
    """The timed step is made for the workload's length: a longer window would run another one. The workloads of one
    job share its reference, and so the window of the first of them."""
    options = context.quality
    most = OWN_WINDOW if options.text == SELF_WRITTEN else decoded
    window = (
        options.window or window_of(context.folder / QUALITY_FOLDER) or min(decoded, options.tokens, most)
    )
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


def _passages(setting: Setting, runtime: EncodingRuntime, source: Source | None) -> tuple[list[Passage], int]:
    """The passages to predict, and the number of contexts that were cut."""
    if source is None:
        return _own_passages(setting, cast(ReferenceRuntime, runtime)), 0
    encode, start = partial(_encoded, setting, runtime), np.array(runtime.start_ids(), np.int64)
    window = setting.window - len(start)
    if window < 2:
        raise OptiGPUError(
            f"A window of {setting.window} tokens has no room after the start token of {setting.model}; ask for a "
            "larger quality.window."
        )
    if setting.text == HELLASWAG:
        items = read_items(source.content)[: setting.items]
        passages, cut = item_passages(items, encode, window)
    else:
        tokens = np.array(encode(source.words())[: setting.tokens], np.int64)
        passages, cut = windows(tokens, window, min(setting.stride or 1, window - 1)), 0
    return [after(start, passage) for passage in passages], cut


def _own_passages(setting: Setting, runtime: ReferenceRuntime) -> list[Passage]:
    """Sequences that the model wrote, exactly `tokens` of whose tokens are predicted; the last one may be shorter."""
    first = 1 + min(PREFILL_TOKENS, (setting.window - 1) // 2)
    each = setting.window - first
    rows = -(-setting.tokens // each)
    tokens = runtime.sample(rows, setting.window)
    last = setting.tokens - each * (rows - 1)
    return [Passage(row, first) for row in tokens[:-1]] + [Passage(tokens[-1, : first + last], first)]


def _encoded(setting: Setting, runtime: EncodingRuntime, text: str) -> list[int]:
    ids = runtime.encode(text)
    if max(ids, default=0) >= setting.vocabulary:
        raise OptiGPUError(
            f"The tokenizer of {setting.model} gives id {max(ids)} and the model has {setting.vocabulary}; put the "
            "tokenizer that it was trained with beside it."
        )
    return ids


def _of_text(reference: Reference, likelihoods: NDArray[np.float64], source: Source | None) -> Figures:
    perplexities = _perplexity(reference, likelihoods, _units(reference))
    return perplexities | _accuracy(reference, likelihoods, source)


def _perplexity(reference: Reference, likelihoods: NDArray[np.float64], units: NDArray[np.int64]) -> Figures:
    text = reference.manifest.setting.text
    if text in (SELF_WRITTEN, HELLASWAG):
        why = f"The text is {text}, which has no perplexity; ask for quality.text wikitext-2 or file:NAME."
        return Figures(reasons=dict.fromkeys(_PERPLEXITY, why))
    if np.isinf(likelihoods).any():
        return Figures(reasons=dict.fromkeys(_PERPLEXITY, _untold(likelihoods)))
    known = ~np.isnan(likelihoods)
    try:
        return perplexity_figures(likelihoods[known], reference.likelihoods[known], units[known])
    except OptiGPUError as error:
        return Figures(reasons=dict.fromkeys(_PERPLEXITY, str(error)))


def _accuracy(reference: Reference, likelihoods: NDArray[np.float64], source: Source | None) -> Figures:
    setting = reference.manifest.setting
    if source is None or setting.text != HELLASWAG:
        why = f"The text is {setting.text}, no multiple-choice test; ask for quality.text hellaswag."
        return Figures(reasons=dict.fromkeys(_ACCURACY, why))
    if np.isinf(likelihoods).any():
        return Figures(reasons=dict.fromkeys(_ACCURACY, _untold(likelihoods)))
    items = read_items(source.content)[: setting.items]
    starts = np.cumsum([0, *(passage.positions for passage in reference.passages)])[:-1]
    found, expected = (np.add.reduceat(each, starts) for each in (likelihoods, reference.likelihoods))
    return accuracy_figures(items, found, expected)


def _untold(likelihoods: NDArray[np.float64]) -> str:
    return (
        f"The server did not tell the log-probability of {np.isinf(likelihoods).sum()} of the text's "
        f"{len(likelihoods)} tokens; ask one that tells those of a prompt, or let it tell more at each position."
    )
