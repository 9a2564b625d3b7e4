"""The address of a server that speaks OpenAI's completions, as a job names it: URL#MODEL.

http://127.0.0.1:8000#tiny    the model that the server calls "tiny"
http://127.0.0.1:8000         the only model that it serves
http://127.0.0.1:8000/v1/chat#tiny    the same, asked in chats
"""

from dataclasses import dataclass
from urllib.parse import urlsplit

from optigpu.proxies import is_loopback
from optigpu.vocabulary import SpecError

ENDPOINT = "endpoint"
"""The name of the backend."""
CHAT = "/chat"
"""At the end of a path: requests are chats of one turn."""
PATH = "/v1"
"""Where such an interface is, if the address names no path."""
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Endpoint:
    """An address in its parts. `path` begins with a slash and has none at its end; `model` None is the only one."""

    scheme: str
    host: str
    port: int
    path: str
    model: str | None

    @property
    def place(self) -> str:
        """HOST:PORT, as the worker's settings name it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def origin(self) -> str:
        """What the server's other pages are under."""
        return f"{self.scheme}://{self.place}"

    @property
    def url(self) -> str:
        """What `/completions` is under."""
        return self.origin + self.path

    @property
    def api(self) -> str:
        """What `/models` and all of the interface is under."""
        return self.url.removesuffix(CHAT)

    @property
    def is_chat(self) -> bool:
        """Whether requests are chats."""
        return self.path.endswith(CHAT)

    @property
    def is_loopback(self) -> bool:
        """Whether the server runs on the machine that asks it."""
        return is_loopback(self.host)

    def __str__(self) -> str:
        return f"{self.url}#{self.model}" if self.model else self.url


def parse_endpoint(text: str) -> Endpoint:
    """Raises SpecError for what is no such address, with what is wrong in it."""
    try:
        parts = urlsplit(text if text.isprintable() and " " not in text else "")
        port = parts.port  # read from the text only now
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in _PORTS or not parts.hostname:
        raise SpecError(f"{text!r} is not the address of a server; write http://HOST:PORT#MODEL.")
    if "@" in parts.netloc:
        raise SpecError(
            "An address holds no name and no key, since jobs are stored; the worker's variable "
            "OPTIGPU_ENDPOINT_KEYS holds the key."
        )
    if parts.query:
        raise SpecError(f"{text!r} has a query, which is not sent; leave ?{parts.query} out.")
    return Endpoint(
        scheme=parts.scheme,
        host=parts.hostname,
        port=port or _PORTS[parts.scheme],
        path=parts.path.rstrip("/") or PATH,
        model=parts.fragment or None,
    )


def engine_name(backend: str, endpoint: str | None) -> str:
    """What a variant's engine is called: the backend, and for a server what it serves and where."""
    if endpoint is None:
        return backend
    parsed = parse_endpoint(endpoint)
    return f"{backend} {parsed.model or 'model'} at {parsed.place}{parsed.path.removesuffix(PATH)}"
