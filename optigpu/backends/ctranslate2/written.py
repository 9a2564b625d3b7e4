"""CTranslate2's converter on a loaded model, with a vocabulary of numbers: prompts and answers are ids here."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from ctranslate2.converters import TransformersConverter

from optigpu.models.loading.load import count_weights, load_model
from optigpu.models.reference import parse_reference
from optigpu.vocabulary import UnsupportedError

LLAMA3_CONTEXT = 8192
"""A constant of its operators."""


@dataclass(frozen=True)
class Numbers:
    """What a converter asks of a tokenizer: a token for each id, named by the id.

    No token ends a sequence or stands for others; names are needed for them all the same.
    """

    count: int
    bos_token: str = "0"
    eos_token: str = "0"
    unk_token: str = "0"

    def get_vocab(self) -> dict[str, int]:
        """The id of each token."""
        return {str(number): number for number in range(self.count)}


def write(model: str, output: Path, kind: str, seed: int, threads: int) -> int:
    """Writes a model in one of CTranslate2's types; how many weights it had.

    Raises UnsupportedError for a model that cannot be had here, and one that CTranslate2 has no converter for.
    """
    torch.set_num_threads(threads)
    loaded = load_model(parse_reference(model), device="cpu", dtype="float32", seed=seed)
    _require_rotation(loaded.config.to_dict().get("rope_parameters") or {})
    parameters = count_weights(loaded)
    with TemporaryDirectory() as folder:
        loaded.config.save_pretrained(folder)
        converter = TransformersConverter(folder)
        converter.load_model = lambda *_, **__: loaded
        converter.load_tokenizer = lambda *_, **__: Numbers(loaded.config.vocab_size)
        try:
            converter.convert(str(output), quantization=kind)
        except (ValueError, KeyError, AttributeError, NotImplementedError) as error:
            why = str(error).strip().partition("(supported")[0].rstrip(". ")
            raise UnsupportedError(
                f"CTranslate2 cannot convert {loaded.config.model_type} models: {why}; ask for the backend torch."
            ) from error
    return parameters


def _require_rotation(rotation: Mapping[str, object]) -> None:
    """CTranslate2 scales a rotary embedding as those models need whose first context was of LLAMA3_CONTEXT tokens."""
    context = rotation.get("original_max_position_embeddings")
    if rotation.get("rope_type") == "llama3" and context != LLAMA3_CONTEXT:
        raise UnsupportedError(
            f"CTranslate2 supports scaled rotary embeddings from a first context of {LLAMA3_CONTEXT} tokens, and this "
            f"model's is {context}; ask for the backend torch."
        )
