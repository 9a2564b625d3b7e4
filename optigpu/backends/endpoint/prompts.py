"""Prompts as text, for servers that take no token ids: of as many tokens as the ids they stand for."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from optigpu.models.files import TOKENIZER, read_object
from optigpu.models.held import model_directory
from optigpu.models.reference import BUNDLED, ModelReference
from optigpu.vocabulary import UnsupportedError

CHANGES = 8
"""How often a text is changed before another beginning is tried; each change moves its length by a token or two."""


def tokenizer_of(reference: ModelReference) -> Tokenizer | None:
    """The model's tokenizer, None where this machine has none. Raises UnsupportedError for a damaged file."""
    file = _file_of(reference)
    if file is None or not file.is_file():
        return None
    read_object(file, reference)
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no class of its own
        raise UnsupportedError(
            f"{file.name} of {reference} holds no tokenizer: {error}; copy or download it again."
        ) from error


class Speller:
    """Writes ids as text that the same tokenizer reads as as many ids; which ones may differ."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, ids: Sequence[int]) -> str:
        """Raises UnsupportedError where no such text is found."""
        wanted = len(ids)
        for start in range(wanted):
            text = self._text_of([*ids[start:], *ids[:start]])
            if text is not None:
                return text
        raise UnsupportedError(
            f"OptiGPU found no text of exactly {wanted} tokens, and this server takes no token ids; ask for longer "
            "prompts."
        )

    def _text_of(self, ids: list[int]) -> str | None:
        """A text of as many tokens, made of these; None where each change goes past that."""
        tried = ids
        for _ in range(CHANGES):
            text: str = self._tokenizer.decode(tried, skip_special_tokens=False)
            difference = len(ids) - len(self._tokenizer.encode(text).ids)
            if difference == 0:
                return text
            # More ids than before from the beginning of the same prompt, or fewer of its end.
            tried = tried + tried[:difference] if difference > 0 else tried[:difference]
            if not tried:
                return None
        return None


def _file_of(reference: ModelReference) -> Path | None:
    if reference.kind == "bundled":
        return BUNDLED[reference.name] / TOKENIZER
    if reference.kind == "path":
        return model_directory(reference.name) / TOKENIZER
    if reference.kind == "hub":
        from huggingface_hub import try_to_load_from_cache  # only a hub's model needs it

        found = try_to_load_from_cache(reference.name, TOKENIZER, revision=reference.revision or "main")
        return Path(found) if isinstance(found, str) else None
    return None
