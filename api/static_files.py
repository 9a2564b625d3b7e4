"""The style sheets and the scripts of the pages. An address has the hash of the content in it."""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from optigpu.report.charts.svg.picture import STYLE_SHEET

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
