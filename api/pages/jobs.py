"""The page at `/jobs`: the newest jobs, how each ended, and why one waits that no worker can take."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from api.inputs import Cursor
from api.pages.view import Asked, ReaderView
from optigpu.job.spec import Tag
from optigpu.store import jobs, prospects
from optigpu.vocabulary import JobState

router = APIRouter()
SHOWN = 50


class JobsAsked(Asked):
    """Which jobs, and which page of their list."""

    state: JobState | None = None
    tag: Tag | None = None
    cursor: Cursor | None = None


@router.get("/jobs")
def read_jobs(view: ReaderView, asked: Annotated[JobsAsked, Query()]) -> Response:
    """The newest ones first."""
    with view.service.database.read() as session:
        page = jobs.list_(session, state=asked.state, tag=asked.tag, limit=SHOWN, cursor=asked.cursor)
        lease_s = view.service.settings.lease_s
        waiting = prospects.reasons(session, [job.id for job in page.jobs], lease_s)
    return view.page(
        "jobs.html", page=page, unserved=waiting, asked=asked, states=[state.value for state in JobState]
    )
