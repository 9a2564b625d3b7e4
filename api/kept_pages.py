"""Pages of the leaderboard are kept as they were sent, for as long as the leaderboard does not change."""

from collections import OrderedDict
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth import ADMITTED, call_of
from api.gate import Gate
from api.problems import ProblemError, from_store, problem_response
from api.tags import is_known, tag_of
from optigpu.store.revisions import Part
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


@dataclass(frozen=True)
class Answer:
    """What the application sent."""

    status: int
    headers: Headers
    body: bytes

    def messages(self) -> tuple[Message, Message]:
        """The same, to be sent."""
        start = {"type": "http.response.start", "status": self.status, "headers": self.headers.raw}
        return start, {"type": "http.response.body", "body": self.body}


@dataclass(frozen=True)
class Kept:
    """A page, and the leaderboard's revision that it shows or is older than."""

    answer: Answer
    revision: str | None
    route: object


class KeptPages:
    """Answers from memory what was asked before and holds still, and 304 where the client has it."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self.app = app
        self._gate = gate
        self._pages: OrderedDict[PageKey, Kept] = OrderedDict()
        self._bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _is_page(scope):
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        try:
            admitted = await self._gate.admit(call_of(request))
        except ProblemError as problem:
            await problem_response(scope, problem)(scope, receive, send)
            return
        except StoreError as error:
            await problem_response(scope, from_store(error))(scope, receive, send)
            return
        scope["state"][ADMITTED] = admitted
        answer = await self._answer(scope, receive, admitted.revisions.get(Part.LEADERBOARD))
        for message in _unless_known(answer, request.headers).messages():
            await send(message)

    async def _answer(self, scope: Scope, receive: Receive, revision: str | None) -> Answer:
        headers = Headers(scope=scope)
        takes_gzip = "gzip" in headers.get("accept-encoding", "")
        key = scope["query_string"], headers.get("accept", ""), takes_gzip
        kept = self._pages.get(key)
        if kept is not None and kept.revision == revision:
            self._pages.move_to_end(key)
            scope["route"] = kept.route
            scope["state"][FROM_MEMORY] = True
            return kept.answer
        answer = await _collected(self.app, scope, receive)
        if answer.status != 200:
            return answer
        answer = _to_be_kept(answer)
        self._keep(key, Kept(answer, revision, scope.get("route")))
        return answer

    def _keep(self, key: PageKey, page: Kept) -> None:
        before = self._pages.pop(key, None)
        self._bytes += len(page.answer.body) - (len(before.answer.body) if before else 0)
        self._pages[key] = page
        while self._bytes > MOST_BYTES:
            _, oldest = self._pages.popitem(last=False)
            self._bytes -= len(oldest.answer.body)


def _is_page(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "GET":
        return False
    return str(scope["path"]).removeprefix(scope.get("root_path", "")) == PATH


async def _collected(app: ASGIApp, scope: Scope, receive: Receive) -> Answer:
    """The application's whole answer."""
    messages: list[Message] = []

    async def collect(message: Message) -> None:
        messages.append(message)

    await app(scope, receive, collect)
    start, *parts = messages
    body = b"".join(part.get("body", b"") for part in parts)
    return Answer(start["status"], Headers(raw=list(start["headers"])), body)


def _to_be_kept(answer: Answer) -> Answer:
    """The same with what lets a client ask whether it has changed. Each encoding of a page has a tag of its own."""
    headers = MutableHeaders(raw=list(answer.headers.raw))
    headers["ETag"] = tag_of(answer.body)
    headers["Cache-Control"] = "private, no-cache"
    headers.add_vary_header("Authorization")
    return Answer(answer.status, Headers(raw=headers.raw), answer.body)


def _unless_known(answer: Answer, asked: Headers) -> Answer:
    """304 without a body if the client has this very answer."""
    if not is_known(answer.headers.get("etag"), asked.get("if-none-match")):
        return answer
    return Answer(
        304, Headers({name: answer.headers[name] for name in UNCHANGED if name in answer.headers}), b""
    )
