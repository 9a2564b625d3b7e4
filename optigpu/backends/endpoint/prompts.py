"""Prompts as text, for servers that take no token ids: of as many tokens as the ids they stand for.

What a server takes beyond OpenAI's fields is found out by asking: servers refuse, or ignore, what they do not know.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from optigpu.backends.endpoint.client import Completions, Options, Server, Spelling
from optigpu.models.held import TOKENIZER, model_directory, read_object
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


NEW_TOKENS = 4
"""Of the completions that find out."""


def _ignoring(new_tokens: int) -> Mapping[str, object]:
    return {"ignore_eos": True, "min_tokens": new_tokens}


def _told(new_tokens: int) -> Mapping[str, object]:
    return {**_ignoring(new_tokens), "return_token_ids": True}


def _configured(new_tokens: int) -> Mapping[str, object]:
    lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    return {"generation_config": json.dumps({**lengths, "do_sample": False})}


@dataclass(frozen=True)
class Dialect:
    """One way to ask for exactly so many tokens: with the prompt as token `ids`, or else as text.

    `tells` says that the ids of the tokens must come back.
    """

    ids: bool
    options: Options
    label: str
    tells: bool = False


DIALECTS = (
    Dialect(True, _told, "token ids; ignore_eos, min_tokens, return_token_ids", tells=True),
    Dialect(True, _ignoring, "token ids; ignore_eos, min_tokens"),
    Dialect(True, lambda _new_tokens: {}, "token ids"),
    Dialect(False, _configured, "text; generation_config"),
    Dialect(False, _ignoring, "text; ignore_eos, min_tokens"),
    Dialect(False, lambda _new_tokens: {}, "text"),
)
"""From what tells and forces the most to what every server takes."""


async def spoken(server: Server, prompt: Sequence[int], spelling: Spelling | None) -> tuple[Server, Dialect]:
    """The server asked in the first dialect that it answers in, found by a short completion in each that it refuses.

    A server that ignores what asks for ids is asked in the next one. `spelling` None leaves out those that need text.
    Raises UnsupportedError with the server's last refusal, and at once where it is not the dialect that is wrong: no
    such model, no key, no answer.
    """
    error = "The server was not asked."
    for dialect in DIALECTS:
        if not dialect.ids and spelling is None:
            break
        if dialect.ids and server.chat:
            continue
        asked = replace(server, options=dialect.options, spelling=None if dialect.ids else spelling)
        async with Completions(asked) as completions:
            found = await completions.stream(prompt, NEW_TOKENS)
        if found.error is None and (found.ids is not None or not dialect.tells):
            return asked, dialect
        error = found.error or error
        if found.error is not None and not found.refused:
            break
    raise UnsupportedError(error)
