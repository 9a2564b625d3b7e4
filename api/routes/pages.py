"""The page at `/`: a short description, the last results and jobs."""

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from api.auth import needs_key
from api.rendering import page
from api.service import Service, ServiceDep
from optigpu import __version__
from optigpu.store import jobs, leaderboard, unserved
from optigpu.store.filters import LeaderboardQuery

router = APIRouter(include_in_schema=False)

SHOWN_ROWS = 20


@router.get("/")
def index(service: ServiceDep) -> HTMLResponse:
    """If reading needs a key the page shows no data, because a browser sends no key."""
    settings = service.settings
    open_to_all = settings.public_read or not needs_key(settings, service.database)
    shown = _data(service) if open_to_all else {"boards": [], "jobs": (), "unserved": {}}
    return page("index.html", version=__version__, prefix=settings.prefix, open_to_all=open_to_all, **shown)


def _data(service: Service) -> dict[str, object]:
    from optigpu.report.leaderboard import counted, leaderboard_grid

    with service.database.read() as session:
        found = leaderboard.query(session, LeaderboardQuery())
        newest = jobs.list_(session, limit=SHOWN_ROWS).jobs
        waiting = unserved.reasons(session, [job.id for job in newest], service.settings.lease_s)
    boards = [(leaderboard_grid(board), board.workload_digest, counted(board)) for board in found.boards]
    return {"boards": boards, "jobs": newest, "unserved": waiting}
