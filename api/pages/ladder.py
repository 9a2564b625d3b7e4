"""The page at `/ladder/{id}` of a job: what each technique bought, alone, added and left out."""

from fastapi import APIRouter, Response

from api.charts import Figure, figure
from api.inputs import JobId
from api.pages.view import Plain, ReaderView
from optigpu.documents.result import Attribution
from optigpu.report.catalog import job_title
from optigpu.report.charts import CHARTS, Report
from optigpu.report.ladder import ladder_grid
from optigpu.store import jobs, results
from optigpu.vocabulary import SpecError

router = APIRouter()


@router.get("/ladder/{id}")
def read_ladder(view: ReaderView, job_id: JobId, _: Plain) -> Response:
    """A job that is no ladder has its table alone."""
    with view.service.database.read() as session:
        job = jobs.get(session, job_id)
        found = results.of_job(session, job_id)
    attribution = Attribution.model_validate(job.attribution) if job.attribution and found else None
    title = job_title(job.spec, found)
    chart, why_none = None, "The job has no attribution yet: it has not ended, or nothing of it was measured."
    if attribution is not None:
        chart, why_none = _chart(Report(title, found, attribution), view.look.root)
    return view.page(
        "ladder.html",
        job=job,
        title=title,
        chart=chart,
        why_none=why_none,
        grid=ladder_grid(title, attribution, found) if attribution else None,
        results=found,
    )


def _chart(report: Report, root: str) -> tuple[Figure | None, str]:
    """The waterfall; or why there is none."""
    try:
        (panel,) = CHARTS["waterfall"](report).panels
    except SpecError:
        return (
            None,
            "No rung of a ladder has a speedup, so there is no waterfall; the table has what was measured.",
        )
    return figure(panel, id_prefix="ladder", link=lambda source: f"{root}/results/{source}"), ""
