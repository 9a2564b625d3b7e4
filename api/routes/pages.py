"""The page at `/`: a short description, the last results and jobs. Rendered on the server, without scripts or remote
files."""

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from api.auth import needs_key
from api.service import Service, ServiceDep
from optigpu import __version__
from optigpu.store import jobs, leaderboard
from optigpu.store.filters import LeaderboardQuery

if TYPE_CHECKING:
    from jinja2 import Template

router = APIRouter(include_in_schema=False)

TEMPLATES = Path(__file__).resolve().parents[1] / "templates"
SHOWN_ROWS = 20
POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"


@router.get("/")
def index(service: ServiceDep) -> HTMLResponse:
    """If the service needs a key the page shows no data, because a browser sends no key."""
    open_to_all = not needs_key(service.settings, service.database)
    shown = _data(service) if open_to_all else {"boards": [], "jobs": ()}
    text = _template().render(version=__version__, open_to_all=open_to_all, **shown)
    return HTMLResponse(text, headers={"Content-Security-Policy": POLICY})


def _data(service: Service) -> dict[str, object]:
    from optigpu.report.leaderboard import leaderboard_grid

    with service.database.read() as session:
        page = leaderboard.query(session, LeaderboardQuery())
        newest = jobs.list_(session, limit=SHOWN_ROWS).jobs
    boards = [(leaderboard_grid(board), board.workload_digest, board.row_count) for board in page.boards]
    return {"boards": boards, "jobs": newest}


@lru_cache(maxsize=1)
def _template() -> "Template":
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True)
    return environment.get_template("index.html")
