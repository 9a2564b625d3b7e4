"""Pages for people: rendered on the server from templates, with a style sheet and scripts of our own. The address of a
static file has the hash of its content in it."""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import Scope

from optigpu import __version__
from optigpu.documents.views import BoardName, History
from optigpu.report.charts.svg import STYLE_SHEET
from optigpu.report.formats import short
from optigpu.report.leaderboard import why_no_quality, workload_text
from optigpu.report.rows import heading
from optigpu.vocabulary import METRICS, Document, harmless

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


def tag_of(body: bytes) -> str:
    """The strong tag of this body."""
    return f'"{hashlib.sha256(body).hexdigest()[:32]}"'


def is_known(tag: str | None, if_none_match: str | None) -> bool:
    """Whether the client has the answer with this tag, weak or strong."""
    if tag is None or if_none_match is None:
        return False
    known = {each.strip().removeprefix("W/") for each in if_none_match.split(",")}
    return tag.removeprefix("W/") in known or "*" in known


FOLDER = Path(__file__).resolve().parent / "static"
MEDIA_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@dataclass(frozen=True)
class StaticFile:
    """A file of FOLDER, or the style sheet of the charts."""

    name: str
    media_type: str
    content: bytes

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.content).hexdigest()[:16]


@lru_cache(maxsize=1)
def static_files() -> dict[str, StaticFile]:
    """Every file by its name, read once."""
    return {
        path.name: StaticFile(path.name, MEDIA_TYPES[path.suffix], path.read_bytes())
        for path in (*sorted(FOLDER.iterdir()), STYLE_SHEET)
        if path.suffix in MEDIA_TYPES
    }


@lru_cache(maxsize=64)
def static_path(name: str) -> str:
    """The address of a file, without the service's prefix."""
    return f"/static/{static_files()[name].digest}/{name}"


LONGEST = 120
"""Characters of a name that are shown."""


def with_code(text: str) -> "Markup":
    """The text escaped, with what stands between backticks as code."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def day(at: datetime) -> str:
    return at.strftime("%Y-%m-%d")


def moment(at: datetime) -> str:
    return at.strftime("%Y-%m-%d %H:%M UTC")


def cut(text: object, longest: int = LONGEST) -> str:
    """At most so many characters; a cut text ends with an ellipsis."""
    whole = str(text)
    return whole if len(whole) <= longest else whole[: longest - 1] + "…"


def spaced(name: str) -> str:
    """A name of the vocabulary as words: `few_samples` as `few samples`."""
    return name.replace("_", " ")


def quantity(value: float | None) -> str:
    """Bytes as MB or GB."""
    if value is None:
        return short(None)
    return f"{short(value * 1e-9)} GB" if value >= 1e9 else f"{short(value * 1e-6)} MB"


def scaled(value: float | None, scale: float) -> str:
    """A figure in another unit."""
    return short(None if value is None else value * scale)


def percent(share: float | None) -> str:
    """Two decimals: losses are tenths of a percent."""
    return short(None) if share is None else f"{100 * share:.2f}%"


def workload_line(board: BoardName) -> str:
    """The workload and the model of a board on one line."""
    return cut(workload_text(board.workload, board.model))


def variant_line(variant: Document) -> str:
    """The same of a stored result's variant."""
    return cut(workload_text(variant["workload"], variant["model"]))


def history_line(history: History) -> str:
    """The same of a history."""
    return cut(workload_text(history.workload, history.model))


def metric_heading(name: str) -> str:
    """A metric's heading; the name itself if this version does not know it."""
    return heading(name) if name in METRICS else name


FILTERS: dict[str, Callable[..., object]] = {
    "with_code": with_code,
    "day": day,
    "moment": moment,
    "cut": cut,
    "spaced": spaced,
    "short": short,
    "quantity": quantity,
    "percent": percent,
    "scaled": scaled,
    "heading": metric_heading,
    "variant_line": variant_line,
    "history_line": history_line,
    "workload_line": workload_line,
    "why_no_quality": why_no_quality,
}


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
    """The text of a template; of one with several pages `jobs.html#job` is the page in its block `job`."""
    file, _, part = template.partition("#")
    return _environment().get_template(file).render(look=look, part=part, **shown)


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

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        auto_reload=False,
        finalize=_shown,
    )
    environment.filters |= FILTERS
    return environment


def _shown(value: object) -> object:
    """Text without a change of direction, by which a name could reorder what stands beside it; markup is ours."""
    if not isinstance(value, str) or value.isprintable() or hasattr(value, "__html__"):
        return value
    return harmless(value)
