"""Pages for people: rendered on the server, without scripts and without files from elsewhere."""

import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi.responses import HTMLResponse

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

TEMPLATES = Path(__file__).resolve().parent / "templates"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"


def page(template: str, **shown: object) -> HTMLResponse:
    """A template of TEMPLATES, with what it shows, escaped."""
    text = _environment().get_template(template).render(**shown)
    return HTMLResponse(text, headers={"Content-Security-Policy": POLICY})


@lru_cache(maxsize=1)
def _environment() -> "Environment":
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["with_code"] = _with_code
    return environment


def _with_code(text: str) -> "Markup":
    """The text escaped, with what stands between backticks as code."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
