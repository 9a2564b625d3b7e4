"""What a server takes beyond OpenAI's fields, found out by asking: servers refuse, or ignore, what they do not know."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from optigpu.backends.endpoint.client import Completions, Options, Server, Spelling, no_options
from optigpu.vocabulary import UnsupportedError

NEW_TOKENS = 4
"""Of the completions that find out."""


def _told(new_tokens: int) -> Mapping[str, object]:
    return {**_ignoring(new_tokens), "return_token_ids": True}


def _ignoring(new_tokens: int) -> Mapping[str, object]:
    return {"ignore_eos": True, "min_tokens": new_tokens}


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
    Dialect(True, no_options, "token ids"),
    Dialect(False, _configured, "text; generation_config"),
    Dialect(False, _ignoring, "text; ignore_eos, min_tokens"),
    Dialect(False, no_options, "text"),
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
        asked = replace(server, options=dialect.options, spelling=None if dialect.ids else spelling)
        async with Completions(asked) as completions:
            found = await completions.stream(prompt, NEW_TOKENS)
        if found.error is None and (found.ids is not None or not dialect.tells):
            return asked, dialect
        error = found.error or error
        if found.error is not None and not found.refused:
            break
    raise UnsupportedError(error)
