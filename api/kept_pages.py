"""Pages of the leaderboard are kept as they were sent, for as long as the leaderboard does not change."""

from collections import OrderedDict
from typing import NamedTuple

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth import ADMITTED, call_of
from api.gate import Gate
from api.problems import ProblemError, from_store, problem_response
from api.tags import is_known, tag_of
from optigpu.store.database import Part
from optigpu.vocabulary import StoreError

PATH = "/v1/leaderboard"
MOST_BYTES = 64 * 2**20
"""Of kept pages in a process."""
FROM_MEMORY = "from_memory"
"""Where the state of a request says that a kept page answered it."""
UNCHANGED = ("etag", "cache-control", "vary", "link")
"""Headers that 304 has as well."""

PageKey = tuple[bytes, str, bool]
"""The query, the header Accept, and whether the client takes gzip."""


class Answer(NamedTuple):
    """What the application sent, on which route, and the leaderboard's revision that it shows or is older than."""

    status: int
    headers: Headers
    body: bytes
    route: object
    revision: str | None


class KeptPages:
    """Answers from memory what was asked before and holds still, and 304 where the client has it."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self.app = app
        self._gate = gate
        self._pages: OrderedDict[PageKey, Answer] = OrderedDict()
        self._bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _is_page(scope):
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        try:
            admitted = await self._gate.admit(call_of(request))
        except (ProblemError, StoreError) as error:
            problem = error if isinstance(error, ProblemError) else from_store(error)
            await problem_response(scope, problem)(scope, receive, send)
            return
        scope["state"][ADMITTED] = admitted
        answer = await self._answer(scope, receive, admitted.revisions.get(Part.LEADERBOARD))
        if is_known(answer.headers.get("etag"), request.headers.get("if-none-match")):
            kept = {name: answer.headers[name] for name in UNCHANGED if name in answer.headers}
            answer = answer._replace(status=304, headers=Headers(kept), body=b"")
        await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers.raw})
        await send({"type": "http.response.body", "body": answer.body})

    async def _answer(self, scope: Scope, receive: Receive, revision: str | None) -> Answer:
        headers = Headers(scope=scope)
        takes_gzip = "gzip" in headers.get("accept-encoding", "")
        key = scope["query_string"], headers.get("accept", ""), takes_gzip
        kept = self._pages.get(key)
        if kept is not None and kept.revision == revision:
            self._pages.move_to_end(key)
            scope["route"] = kept.route
            scope["state"][FROM_MEMORY] = True
            return kept
        answer = await _collected(self.app, scope, receive, revision)
        if answer.status == 200:
            before = self._pages.pop(key, None)  # another request may have kept the same page meanwhile
            self._bytes += len(answer.body) - (len(before.body) if before else 0)
            self._pages[key] = answer
        while self._bytes > MOST_BYTES:
            _, oldest = self._pages.popitem(last=False)
            self._bytes -= len(oldest.body)
        return answer


def _is_page(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "GET":
        return False
    return str(scope["path"]).removeprefix(scope.get("root_path", "")) == PATH


async def _collected(app: ASGIApp, scope: Scope, receive: Receive, revision: str | None) -> Answer:
    """The application's whole answer; a page with what lets a client ask whether it has changed. Each encoding of a
    page has a tag of its own."""
    messages: list[Message] = []

    async def collect(message: Message) -> None:
        messages.append(message)

    await app(scope, receive, collect)
    start, *parts = messages
    body = b"".join(part.get("body", b"") for part in parts)
    headers = MutableHeaders(raw=list(start["headers"]))
    if start["status"] == 200:
        headers["ETag"] = tag_of(body)
        headers["Cache-Control"] = "private, no-cache"
        headers.add_vary_header("Authorization")
    return Answer(start["status"], Headers(raw=headers.raw), body, scope.get("route"), revision)
