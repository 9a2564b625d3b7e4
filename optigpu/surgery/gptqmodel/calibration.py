"""The tokens for the calibration of a quantization."""

import hashlib
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedModel

from optigpu.quality.text import SELF_WRITTEN, read_source
from optigpu.surgery.gptqmodel.recipe import Calibration
from optigpu.vocabulary import UnsupportedError


def calibration_ids(model: PreTrainedModel, calibration: Calibration, technique: str) -> list[list[int]]:
    """The sequences of ids, all of one length.

    Raises UnsupportedError when the sequences are longer than the model's context, when the text is too short or
    missing, and when the model has no tokenizer or one whose ids are out of its range.
    """
    config = model.config.get_text_config(decoder=True)
    if calibration.length > config.max_position_embeddings:
        raise UnsupportedError(
            f"{technique}: calibration sequences of {calibration.length} tokens are longer than this model's context "
            f"of {config.max_position_embeddings}; choose a smaller length."
        )
    if calibration.text == SELF_WRITTEN:
        from optigpu.models.loading.self_written import sampled

        drawn = sampled(model, config.vocab_size, calibration.samples, calibration.length, calibration.seed)
        ids: list[list[int]] = drawn.tolist()
        return ids
    return _cut(_encoded(model, config.vocab_size, calibration.text, technique), calibration, technique)


def digest_of(ids: list[list[int]]) -> str:
    """SHA-256 of the sequences, in hexadecimal."""
    return hashlib.sha256(repr(ids).encode()).hexdigest()


def _encoded(model: PreTrainedModel, vocabulary: int, text: str, technique: str) -> list[int]:
    name = model.name_or_path
    if not name:
        raise UnsupportedError(
            f"{technique} needs a tokenizer to read {text}, and a model with random weights has none; set calibration "
            f"to {SELF_WRITTEN}."
        )
    try:
        words = read_source(text).words()
        revision = getattr(model.config, "_commit_hash", None) or "main"
        local = Path(name).is_dir()
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, local_files_only=local)
    except Exception as error:  # of a damaged tokenizer the library raises whatever it stumbles over
        why = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UnsupportedError(f"{technique} cannot calibrate with {text}: {why}.") from error
    ids: list[int] = tokenizer.encode(words, add_special_tokens=False)
    if max(ids, default=0) >= vocabulary:
        raise UnsupportedError(
            f"{technique}: the tokenizer gives token id {max(ids)}, and this model's ids are 0 to {vocabulary - 1}; "
            "put the tokenizer that the model was trained with beside it."
        )
    return ids


def _cut(ids: list[int], calibration: Calibration, technique: str) -> list[list[int]]:
    """Sequences that do not overlap, spread evenly over the text."""
    samples, length = calibration.samples, calibration.length
    if len(ids) < samples * length:
        raise UnsupportedError(
            f"{technique}: {samples} calibration sequences of {length} tokens need {samples * length} tokens, and "
            f"{calibration.text} has {len(ids)}; choose fewer samples or a longer text."
        )
    step = len(ids) // samples
    return [ids[start : start + length] for start in range(0, samples * step, step)]
