"""What a server's refusal, its other answers and a broken connection mean, each in one sentence."""

import httpx
from pydantic import BaseModel, ValidationError

from optigpu.vocabulary import OptiGPUError

STREAM = "text/event-stream"
MOST_BYTES = 4096
"""So much of a refusal is read."""
_MEANINGS = {
    400: "refused the request",
    401: "asks for a key; set OPTIGPU_ENDPOINT_KEYS for the worker",
    403: "does not allow it with this key",
    404: "has no such address or model; compare the endpoint with its /v1/models",
    422: "refused the request",
    429: "has too many requests; ask for fewer at once",
}
_OF_THE_REQUEST = frozenset({400, 405, 415, 422, 500, 501})
"""With which servers answer what they do not understand; some take a list of ids for an error of their own."""


class StreamError(OptiGPUError):
    """An answer that is not a whole completion."""


class RefusedError(StreamError):
    """The server does not take the request as it was written."""


class _Problem(BaseModel):
    error: object = None
    message: object = None
    detail: object = None

    def said(self) -> str:
        """The first sentence that the document has."""
        inner = self.error.get("message") if isinstance(self.error, dict) else self.error
        return next((str(text) for text in (inner, self.message, self.detail) if text), "")


async def require_stream(response: httpx.Response) -> None:
    """Raises StreamError for an answer that is no stream, with what the server said; else reads nothing of it."""
    if response.has_redirect_location:
        raise StreamError(
            f"The server sends requests on to {response.headers['location'][:200]!r}, and redirects are not followed; "
            "name that address as the endpoint."
        )
    if not response.is_success:
        status = response.status_code
        said = _said(await _start_of(response))
        sentence = (
            f"The server {_MEANINGS.get(status, 'failed')} (status {status}){f': {said}' if said else '.'}"
        )
        raise (RefusedError if status in _OF_THE_REQUEST else StreamError)(sentence)
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != STREAM:
        start = " ".join(_text(await _start_of(response)).split())[:80]
        raise StreamError(
            f"The server answered with {kind or 'no content type'} instead of a stream: {start!r}; correct the "
            "endpoint's address."
        )


def transport_error(error: Exception, url: str, received: str) -> str:
    """What a connection that failed means; `received` is what came before."""
    if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
        return f"No server answers at {url} ({error}); start it, or correct the endpoint."
    if isinstance(error, (httpx.RemoteProtocolError, httpx.ReadError)):
        return f"The server closed the stream before the completion's end, with {received}."
    return f"The request to {url} failed: {type(error).__name__}: {error}"


async def _start_of(response: httpx.Response) -> bytes:
    found = b""
    async for piece in response.aiter_bytes():
        found += piece
        if len(found) >= MOST_BYTES:
            break
    return found[:MOST_BYTES]


def _said(body: bytes) -> str:
    try:
        return _Problem.model_validate_json(body).said()[:300]
    except ValidationError:
        return " ".join(_text(body).split())[:200]


def _text(body: bytes) -> str:
    return body.decode(errors="replace")
