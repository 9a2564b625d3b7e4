"""A small HTTP/1.1 client: one request a connection, no redirects, every answer bounded.

It speaks over a wire, which a port opens.
"""

from esp32_agent.port.base import Http, HttpError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

ANSWER_BYTES = 16 * 1024
HEADER_BYTES = 8 * 1024
JSON_TYPES = ("application/json", "application/problem+json")
HEX_DIGITS = b"0123456789abcdefABCDEF"


class Wire:
    """A connection. It raises HttpError for all that goes wrong on it."""

    def limit(self, timeout_s: int) -> None:
        """What follows must end within `timeout_s`."""
        raise NotImplementedError

    def send(self, data: bytes) -> None:
        """All of it."""
        raise NotImplementedError

    def receive(self, count: int) -> bytes:
        """At least one byte, at most `count`; b"" at the end."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class HttpClient(Http):
    """Requests to the server of a URL. `open_wire(host, port, context, timeout_s)` gives a connected wire."""

    def __init__(
        self, url: str, open_wire: "Callable[[str, int, Any, int], Wire]", context: object = None
    ) -> None:
        """`context` is the port's TLS context. Raises ValueError if the URL and it do not belong together."""
        self.secure, self.host, self.port, self.prefix = split_url(url)
        if self.secure != (context is not None):
            raise ValueError("https needs a TLS context, and http takes none.")
        self._open_wire = open_wire
        self._context = context

    def request(
        self, method: str, path: str, headers: dict[str, str], body: bytes, timeout_s: int
    ) -> tuple[int, dict[str, str], bytes]:
        """As in base; an answer with a body that is not JSON is not the API's, and so an HttpError."""
        wire = self._open_wire(self.host, self.port, self._context, timeout_s)
        try:
            unsent = self._send(wire, method, path, headers, body, timeout_s)
            wire.limit(timeout_s)
            try:
                answer = read_answer(wire)
            except HttpError:
                if unsent is not None:
                    raise unsent from None
                raise
            except MemoryError:
                raise HttpError("The heap has no room for the answer.") from None
        finally:
            wire.close()
        check_type(answer, self.host)
        return answer

    def _send(
        self, wire: Wire, method: str, path: str, headers: dict[str, str], body: bytes, timeout_s: int
    ) -> HttpError | None:
        """Returns the error by which the upload broke off: a server that refuses a body may answer before its end."""
        default = 443 if self.secure else 80
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.prefix}{path} HTTP/1.1"]
        lines.append(f"Host: {host}" if self.port == default else f"Host: {host}:{self.port}")
        lines.append("Connection: close")
        lines.append(f"Content-Length: {len(body)}")
        lines.extend([f"{name}: {value}" for name, value in headers.items()])
        wire.limit(timeout_s)
        try:
            wire.send(("\r\n".join(lines) + "\r\n\r\n").encode())
            if body:
                wire.send(body)
        except HttpError as error:
            return error
        return None


def split_url(url: str) -> tuple[bool, str, int, str]:
    """Whether it is https, host, port, and the path under which the API lies ("" or "/path").

    Raises ValueError with what is wrong.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in ("http", "https"):
        raise ValueError(f"begins with neither http:// nor https://: {url}")
    authority, slash, path = rest.partition("/")
    if "@" in authority or "?" in url or "#" in url or " " in url:
        raise ValueError(f"holds a user, a query, a fragment or a space: {url}")
    host, port = _split_authority(authority)
    if not host:
        raise ValueError(f"names no host: {url}")
    number = port if port else ("443" if scheme == "https" else "80")
    if not number.isdigit() or not 0 < int(number) < 65536:
        raise ValueError(f"has a port that is not 1 to 65535: {url}")
    prefix = (slash + path).rstrip("/")
    return scheme == "https", host, int(number), prefix


def _split_authority(authority: str) -> tuple[str, str]:
    """`host:port`, `host`, or `[address]:port` with an IPv6 address."""
    if authority.startswith("["):
        host, _, port = authority[1:].partition("]")
        return host, port.lstrip(":")
    host, _, port = authority.partition(":")
    return host, port


def check_type(answer: tuple[int, dict[str, str], bytes], host: str) -> None:
    """Raises HttpError for a page in place of JSON, but for a redirect: a captive portal, a proxy, another server."""
    status, headers, body = answer
    kind = headers.get("content-type", "").split(";")[0].strip().lower()
    if not body or 300 <= status < 400 or kind in JSON_TYPES:
        return
    given = kind if kind else "no content type"
    raise HttpError(
        f"{host} answered {status} with {given} and not JSON: a captive portal, or not the OptiGPU API."
    )


def read_answer(wire: Wire) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body. Raises HttpError if they are not HTTP, break off, or are too long."""
    reader = _Reader(wire)
    status = _read_status(reader)
    headers = _read_headers(reader)
    while 100 <= status < 200:  # "100 Continue" comes before the answer
        status = _read_status(reader)
        headers = _read_headers(reader)
    return status, headers, _read_body(reader, status, headers)


def _read_status(reader: "_Reader") -> int:
    parts = reader.line().split(b" ", 2)
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or len(parts[1]) != 3 or not parts[1].isdigit():
        raise HttpError("The answer is not HTTP.")
    return int(parts[1])


def _read_headers(reader: "_Reader") -> dict[str, str]:
    headers: dict[str, str] = {}
    while True:
        line = reader.line()
        if not line:
            return headers
        name, colon, value = line.partition(b":")
        if not colon or not name or name != name.strip():
            raise HttpError("The answer has a header line that is not HTTP.")
        key, text = _text(name).lower(), _text(value).strip()
        if key == "content-length" and headers.get(key, text) != text:
            raise HttpError("The answer has two different lengths.")
        headers[key] = text


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeError:
        raise HttpError("The answer has a header that is not UTF-8.") from None


def _read_body(reader: "_Reader", status: int, headers: dict[str, str]) -> bytes:
    if status in (204, 304):
        return b""
    coding = headers.get("transfer-encoding", "").lower()
    if coding:
        if coding != "chunked":
            raise HttpError(f"The answer has the transfer encoding {coding}; chunked alone is read.")
        return _read_chunks(reader)
    length = headers.get("content-length")
    if length is None:
        return reader.rest()
    if not length.isdigit() or len(length) > 12:
        raise HttpError(f"The answer has the length {length[:20]}.")
    return reader.exactly(_bounded(int(length)))


def _read_chunks(reader: "_Reader") -> bytes:
    chunks: list[bytes] = []
    total = 0
    while True:
        size = reader.line().split(b";")[0].strip()
        if not 0 < len(size) <= 8 or any(digit not in HEX_DIGITS for digit in size):
            raise HttpError("The answer has a chunk without a length.")
        count = int(size, 16)
        if count == 0:
            while reader.line():  # trailers
                pass
            return b"".join(chunks)
        total = _bounded(total + count)
        chunks.append(reader.exactly(count))
        if reader.line():
            raise HttpError("The answer has a chunk that is longer than its length.")


def _bounded(count: int) -> int:
    if count > ANSWER_BYTES:
        raise HttpError(f"The answer has more than {ANSWER_BYTES} bytes.")
    return count


class _Reader:
    """Lines and counted bytes of a wire. It never asks for more than it needs.

    Some servers end a TLS connection without saying so, and a MicroPython read that meets that end loses what it had.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._left = HEADER_BYTES

    def line(self) -> bytes:
        """A line without its CR LF; all lines together have at most HEADER_BYTES."""
        line = bytearray()
        while True:
            byte = self._wire.receive(1)
            if not byte:
                raise HttpError("The connection ended before the answer did.")
            self._left -= 1
            if self._left < 0:
                raise HttpError(f"The answer has more than {HEADER_BYTES} bytes of headers.")
            if byte == b"\n":
                return bytes(line[:-1] if line.endswith(b"\r") else line)
            line.extend(byte)

    def exactly(self, count: int) -> bytes:
        """`count` bytes."""
        pieces = []
        missing = count
        while missing:
            piece = self._wire.receive(missing)
            if not piece:
                raise HttpError(f"The connection ended after {count - missing} of {count} bytes.")
            pieces.append(piece)
            missing -= len(piece)
        return b"".join(pieces)

    def rest(self) -> bytes:
        """All that comes until the server closes the connection."""
        pieces: list[bytes] = []
        total = 0
        while True:
            piece = self._wire.receive(1024)
            if not piece:
                return b"".join(pieces)
            total = _bounded(total + len(piece))
            pieces.append(piece)
