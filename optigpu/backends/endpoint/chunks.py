"""The events of a streamed completion, read line by line as they come."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
from pydantic import BaseModel, Field, ValidationError

from optigpu.backends.endpoint.errors import StreamError

MOST_BYTES = 256 * 2**20
"""Of one answer."""
MOST_LINE_BYTES = 4 * 2**20
DONE = "[DONE]"


@dataclass(frozen=True)
class Chunk:
    """One event: a piece of text, the server's count of tokens, or both.

    `ids` are those of the text's tokens, None where the server does not tell. `usage` is the tokens decoded so far, and
    those of the prompt where they are told. `ends` is True from the one that says why the completion ended.
    """

    has_choice: bool
    text: str
    ends: bool
    ids: tuple[int, ...] | None
    usage: tuple[int, int | None] | None


class _Choice(BaseModel):
    text: str | None = ""
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | None = None


class _Usage(BaseModel):
    completion_tokens: int = Field(0, ge=0)
    prompt_tokens: int | None = Field(None, ge=0)


class _Fault(BaseModel):
    message: str = ""


class _Event(BaseModel):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: _Fault | str | None = None


async def chunks_of(response: httpx.Response) -> AsyncIterator[Chunk]:
    """The chunks of a streamed answer up to its end. Raises StreamError for what is none."""
    async for line in _lines(response):
        name, _, value = line.partition(":")
        if name != "data":
            continue
        value = value.strip()
        if value == DONE:
            return
        yield _chunk(value)


def _chunk(text: str) -> Chunk:
    try:
        event = _Event.model_validate_json(text)
    except ValidationError:
        raise StreamError(f"The server sent {text[:80]!r}, which is not a chunk of a completion.") from None
    if event.error is not None:
        said = event.error if isinstance(event.error, str) else event.error.message
        raise StreamError(f"The server ended the stream with an error: {said[:300]}")
    choice = event.choices[0] if event.choices else None
    usage = event.usage
    return Chunk(
        has_choice=choice is not None,
        text=(choice.text or "") if choice else "",
        ends=choice is not None and choice.finish_reason is not None,
        ids=choice.token_ids if choice else None,
        usage=None if usage is None else (usage.completion_tokens, usage.prompt_tokens),
    )


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Raises StreamError for an answer or a line that is too long to be one."""
    total, rest = 0, b""
    async for piece in response.aiter_bytes():
        total += len(piece)
        *lines, rest = (rest + piece).split(b"\n")
        if total > MOST_BYTES or len(rest) > MOST_LINE_BYTES:
            raise StreamError("The server's answer is longer than any completion; it was cut off.")
        for line in lines:
            yield line.decode(errors="replace").rstrip("\r")
    if rest:
        yield rest.decode(errors="replace")
