"""The text that a quantization is calibrated with: which text may be asked for, and its tokens."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optigpu.quality.text import FILE, SELF, check_name, read_source
from optigpu.vocabulary import OptiGPUError, UnsupportedError


@dataclass(frozen=True)
class Calibration:
    """`samples` sequences of `length` tokens: drawn from the model itself with `seed`, or cut from a file."""

    text: str
    samples: int
    length: int
    seed: int


def check_text(text: str) -> str:
    """The name itself. Raises ValueError for what is no text to calibrate with.

    The datasets that quality is measured on are none: a model that was calibrated on them would look better than it is.
    """
    if text != SELF and not text.startswith(FILE):
        raise ValueError(f"{text!r} is no text to calibrate with; write {SELF} or {FILE}NAME")
    return check_name(text)


def calibration_ids(model: Any, calibration: Calibration, technique: str) -> list[list[int]]:
    """The sequences of ids, all of one length.

    Raises UnsupportedError when the model takes no sequences of that length, when the text is too short or not there,
    and when the model has no tokenizer or one that gives ids which it does not have.
    """
    config = model.config.get_text_config(decoder=True)
    if calibration.length > config.max_position_embeddings:
        raise UnsupportedError(
            f"{technique}: sequences of {calibration.length} tokens are too long to calibrate with, this model takes "
            f"{config.max_position_embeddings}; ask for a smaller length."
        )
    if calibration.text == SELF:
        from optigpu.models.loading.self_written import sampled

        drawn = sampled(model, config.vocab_size, calibration.samples, calibration.length, calibration.seed)
        ids: list[list[int]] = drawn.tolist()
        return ids
    return _cut(_encoded(model, config.vocab_size, calibration.text, technique), calibration, technique)


def digest_of(ids: list[list[int]]) -> str:
    """SHA-256 of the sequences, in hexadecimal."""
    return hashlib.sha256(repr(ids).encode()).hexdigest()


def _encoded(model: Any, vocabulary: int, text: str, technique: str) -> list[int]:
    from transformers import AutoTokenizer

    name = model.name_or_path
    if not name:
        raise UnsupportedError(
            f"{technique}: a model with random weights has no tokenizer to read {text} with; calibrate with {SELF}."
        )
    try:
        words = read_source(text).words()
        revision = getattr(model.config, "_commit_hash", None) or "main"
        local = Path(name).is_dir()
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, local_files_only=local)
    except (OptiGPUError, OSError, ValueError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UnsupportedError(f"{technique} cannot calibrate with {text}: {why}.") from error
    ids: list[int] = tokenizer.encode(words, add_special_tokens=False)
    if max(ids, default=0) >= vocabulary:
        raise UnsupportedError(
            f"{technique}: the tokenizer gives id {max(ids)} and the model has {vocabulary}; put the tokenizer that it "
            "was trained with beside it."
        )
    return ids


def _cut(ids: list[int], calibration: Calibration, technique: str) -> list[list[int]]:
    """Sequences that do not overlap, spread evenly over the text."""
    samples, length = calibration.samples, calibration.length
    if len(ids) < samples * length:
        raise UnsupportedError(
            f"{technique}: {calibration.text} has {len(ids)} tokens and {samples} sequences of {length} are "
            f"{samples * length}; ask for fewer samples or a longer text."
        )
    step = len(ids) // samples
    return [ids[start : start + length] for start in range(0, samples * step, step)]
