"""Middleware: request identifiers, headers for browsers, log lines, metrics, unhandled errors, the check of Host."""

import time
from collections.abc import Collection
from urllib.parse import urlsplit

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.kept_pages import FROM_MEMORY
from api.metrics import Metrics
from api.problems import ProblemError, problem_response
from api.sign_in import SAFE_METHODS
from optigpu.proxies import is_loopback
from optigpu.tracing import Span, SpanKind, Tracing
from optigpu.vocabulary import new_id

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
