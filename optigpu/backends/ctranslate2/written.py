"""CTranslate2's converter on a loaded model, with a vocabulary of numbers: prompts and answers are ids here."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from ctranslate2.converters import TransformersConverter
from transformers import PreTrainedModel

from optigpu.backends.ctranslate2.families import require_family
from optigpu.models.loading.load import count_weights, load_model
from optigpu.models.reference import parse_reference
from optigpu.vocabulary import UnsupportedError


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

    Raises UnsupportedError for a model that cannot be had here, and one that CTranslate2 does not compute as it is.
    """
    torch.set_num_threads(threads)
    return converted(
        load_model(parse_reference(model), device="cpu", dtype="float32", seed=seed), output, kind
    )


def converted(loaded: PreTrainedModel, output: Path, kind: str) -> int:
    """Writes a loaded model, whose layers are gone then. Returns and raises as `write`."""
    require_family(loaded.config)
    parameters = count_weights(loaded)
    with TemporaryDirectory() as folder:
        loaded.config.save_pretrained(folder)
        converter = TransformersConverter(folder)
        converter.load_model = lambda *_, **__: loaded
        converter.load_tokenizer = lambda *_, **__: Numbers(loaded.config.vocab_size)
        try:
            converter.convert(str(output), quantization=kind)
        except (ValueError, KeyError, AttributeError, NotImplementedError) as error:
            why = str(error).strip().splitlines()[0].partition("(supported")[0].rstrip(".: ")
            raise UnsupportedError(
                f"CTranslate2 cannot convert {loaded.config.model_type} models: {why}; ask for the backend torch."
            ) from error
    return parameters
