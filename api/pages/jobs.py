"""The page at `/jobs`: the newest jobs, how each ended, and why one waits that no worker can take."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from api.pages.view import Asked, ReaderView
from api.parameters import Cursor
from optigpu.store import jobs, unserved

router = APIRouter()
SHOWN = 50


class JobsAsked(Asked):
    """Which page of the list."""

    cursor: Cursor | None = None


@router.get("/jobs")
def read_jobs(view: ReaderView, asked: Annotated[JobsAsked, Query()]) -> Response:
    """The newest ones first."""
    with view.service.database.read() as session:
        page = jobs.list_(session, limit=SHOWN, cursor=asked.cursor)
        lease_s = view.service.settings.lease_s
        waiting = unserved.reasons(session, [job.id for job in page.jobs], lease_s)
    return view.page("jobs.html", page=page, unserved=waiting)
