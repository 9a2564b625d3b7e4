"""Middleware: request identifiers, headers for browsers, log lines, metrics, unhandled errors, the check of Host, and
pages of the leaderboard that are kept as they were sent, for as long as the leaderboard does not change."""

import time
from collections import OrderedDict
from collections.abc import Collection
from typing import NamedTuple
from urllib.parse import urlsplit

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth import ADMITTED, SAFE_METHODS, call_of
from api.gate import Gate
from api.metrics import Metrics
from api.problems import ProblemError, from_store, problem_response
from api.rendering import is_known, tag_of
from optigpu.proxies import is_loopback
from optigpu.store.database import Part
from optigpu.tracing import Span, SpanKind, Tracing
from optigpu.vocabulary import StoreError, new_id

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


METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
QUIET_ROUTES = frozenset({"/healthz", "/readyz", "/metrics"})
STRICT = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""Headers of every answer that does not set its own.

The referrer's policy is `same-origin` and not `no-referrer`, with which browsers send no origin with a form."""
NO_PAGE = "default-src 'none'; frame-ancestors 'none'"
"""The content security policy of what is no page; a page has its own."""
logger = structlog.stdlib.get_logger("api.requests")


class RequestContext:
    """The outermost layer. An unhandled error is logged and answered with status 500, without a traceback.

    Every log line of a request has its id, and those of a request about a job the job's.
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, tracing: Tracing, prefix: str = "", hsts_s: int = 0
    ) -> None:
        self.app = app
        self.metrics = metrics
        self.tracing = tracing
        self.prefix = prefix
        self.hsts_s = hsts_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # With or without its prefix a path finds its route, as proxies either keep or remove it.
        scope["root_path"] = self.prefix
        scope.setdefault("state", {})["request_id"] = new_id()
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=scope["state"]["request_id"])
        parent = Headers(scope=scope).get("traceparent")
        with self.tracing.span("request", SpanKind.SERVER, parent) as span:
            scope["state"]["span"] = span.address
            await self._serve(scope, receive, send, span)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, span: Span) -> None:
        begun = time.perf_counter()
        status: int | None = None

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._add_headers(scope, MutableHeaders(scope=message))
                self._record(scope, message["status"], time.perf_counter() - begun, span)
            await send(message)

        try:
            await self.app(scope, receive, send_with_headers)
        except Exception:
            logger.exception("request_failed", method=scope["method"], path=_shown(scope))
            if status is not None:
                raise
            detail = "Internal error; the service's log has the details under the identifier in `instance`."
            await problem_response(scope, ProblemError(500, detail))(scope, receive, send_with_headers)

    def _add_headers(self, scope: Scope, headers: MutableHeaders) -> None:
        headers["X-Request-ID"] = scope["state"]["request_id"]
        for name, value in STRICT.items():
            headers.setdefault(name, value)
        headers.setdefault("Content-Security-Policy", NO_PAGE)
        if self.hsts_s:
            headers["Strict-Transport-Security"] = f"max-age={self.hsts_s}"
        if scope["path"].removeprefix(scope["root_path"]).startswith("/v1/"):
            headers.setdefault("Cache-Control", "no-store")

    def _record(self, scope: Scope, status: int, seconds: float, span: Span) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        method = scope["method"] if scope["method"] in METHODS else "other"
        self.metrics.served(method, route, status, seconds)
        _trace(span, scope, method, route, status)
        if job_id := scope["state"].get("job_id"):  # of a job that this request has made
            structlog.contextvars.bind_contextvars(job_id=job_id)
        log = logger.debug if route in QUIET_ROUTES or scope["state"].get(FROM_MEMORY) else logger.info
        log("request", method=method, path=_shown(scope), status=status, seconds=round(seconds, 4))


def _trace(span: Span, scope: Scope, method: str, route: str, status: int) -> None:
    """Names the span as OpenTelemetry's conventions for HTTP servers have it."""
    span.rename(f"{method} {route}")
    span.note(
        {
            "http.request.method": method,
            "http.route": route,
            "http.response.status_code": status,
            "url.path": _shown(scope),
            "request.id": scope["state"]["request_id"],
        }
    )
    if status >= 500:
        span.fail(f"status {status}")


def _shown(scope: Scope) -> str:
    """The path for a log line: of bounded length, without characters that would begin another line."""
    return ascii(scope["path"][:200])[1:-1]


class HostGuard:
    """Refuses requests from pages of other origins, which a browser on this machine sends to loopback.

    A name that resolves to 127.0.0.1 is refused by the header Host (DNS rebinding), a form on another page by Origin,
    unless it is one of `origins`.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str], origins: Collection[str] = ()) -> None:
        self.app = app
        self.allowed = frozenset(name.lower() for name in allowed)
        self.origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(scope) if scope["type"] == "http" else None
        if problem is None:
            await self.app(scope, receive, send)
        else:
            await problem_response(scope, problem)(scope, receive, send)

    def _problem(self, scope: Scope) -> ProblemError | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        name = _name(host)
        if not is_loopback(name) and name not in self.allowed:
            detail = "This service answers only to loopback names; add other names to OPTIGPU_ALLOWED_HOSTS."
            return ProblemError(400, detail, [{"field": "Host", "message": "This name is not allowed."}])
        welcome = headers.get("origin") in self.origins
        if scope["method"] not in SAFE_METHODS and not welcome and _from_elsewhere(headers, host):
            return ProblemError(403, "A page from another origin may not change anything here.")
        return None


def _from_elsewhere(headers: Headers, host: str) -> bool:
    origin = headers.get("origin")
    if origin is not None:
        return urlsplit(origin).netloc.lower() != host.lower()
    return headers.get("sec-fetch-site", "none") not in ("none", "same-origin")


def _name(host: str) -> str:
    """The host of "name:port" or "[v6]:port", in lower case; empty when it is neither."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""
