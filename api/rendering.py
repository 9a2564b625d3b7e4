"""Pages for people: rendered on the server from templates, with a style sheet and scripts of our own."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import Scope

from api.static_files import static_files, static_path
from api.tags import is_known, tag_of
from optigpu import __version__
from optigpu.vocabulary import harmless

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

TEMPLATES = Path(__file__).resolve().parent / "templates"
POLICY = "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
"""Nothing from another origin, and nothing inline: neither scripts nor styles."""
EXPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Of a page that is kept as one file: its style is inside, and nothing runs."""
HTML = "text/html"
STYLES = ("optigpu.css", "charts.css")


@dataclass(frozen=True)
class Look:
    """What every template knows of the request. `root` begins every link: an address of its own where the page is kept
    as a file."""

    root: str
    path: str
    query: tuple[tuple[str, str], ...] = ()
    export: bool = False
    version: str = __version__

    def asset(self, name: str) -> str:
        """The address of a static file."""
        return self.root + static_path(name)

    def style(self) -> "Markup":
        """The style sheets, for a page that is kept as one file."""
        from markupsafe import Markup

        return Markup("".join(static_files()[name].content.decode() for name in STYLES))

    def here(self) -> str:
        """The path of this page and its parameters, without what the service's prefix adds."""
        words = urlencode(self.query)
        return f"{self.path}?{words}" if words else self.path

    def link(self, path: str | None = None, **changes: object) -> str:
        """This page with other parameters; None removes one. `path` is another page, which gets those that are
        given."""
        kept = [each for each in self.query if each[0] not in changes] if path is None else []
        words = urlencode(
            [*kept, *((name, value) for name, value in changes.items() if value is not None)], doseq=True
        )
        place = self.root + (self.path if path is None else path)
        return f"{place}?{words}" if words else place


def look(request: Request, prefix: str, *, export: bool = False) -> Look:
    """Of a request to the service behind this prefix."""
    root = str(request.base_url).rstrip("/") if export else prefix
    path = request.scope["path"].removeprefix(prefix) or "/"
    query = tuple((name, value) for name, value in request.query_params.multi_items() if name != "export")
    return Look(root, path, query, export)


def page(
    request: Request,
    template: str,
    look: Look,
    status: int = 200,
    more_headers: Mapping[str, str] | None = None,
    **shown: object,
) -> Response:
    """A template of TEMPLATES with what it shows, escaped; 304 where the client has this very page."""
    body = render(template, look, **shown).encode()
    headers = {
        "Content-Security-Policy": EXPORT_POLICY if look.export else POLICY,
        "Cache-Control": "private, no-cache",
        "Vary": "Accept, Authorization, Cookie",
        "ETag": f"W/{tag_of(body)}",
        **(more_headers or {}),
    }
    if look.export:
        headers["Content-Disposition"] = f'attachment; filename="{_file_name(look.path)}"'
    if status == 200 and is_known(headers["ETag"], request.headers.get("if-none-match")):
        return Response(status_code=304, headers=headers)
    return HTMLResponse(body, status, headers)


def render(template: str, look: Look, **shown: object) -> str:
    """The text of a template."""
    return _environment().get_template(template).render(look=look, **shown)


def wants_page(scope: Scope) -> bool:
    """Whether a browser asks for something outside the JSON API."""
    path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
    accept = Request(scope).headers.get("accept", "")
    return HTML in accept and not path.startswith("/v1/")


def _file_name(path: str) -> str:
    words = re.findall(r"[A-Za-z0-9-]+", path)
    return "-".join(["optigpu", *words]) + ".html"


@lru_cache(maxsize=1)
def _environment() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from api import words

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        auto_reload=False,
        finalize=_shown,
    )
    environment.filters |= words.FILTERS
    return environment


def _shown(value: object) -> object:
    """Text without a change of direction, by which a name could reorder what stands beside it; markup is ours."""
    if not isinstance(value, str) or value.isprintable() or hasattr(value, "__html__"):
        return value
    return harmless(value)
