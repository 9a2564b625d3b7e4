"""The page at `/claims`: published figures, what arithmetic says of them, and what was measured here."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from api.pages.view import Asked, ReaderView
from optigpu.claims.matching import Measured, from_leaderboard, from_results, says_too_little
from optigpu.claims.model import Book, Plausibility, baselines
from optigpu.documents.queries import LeaderboardQuery, Text
from optigpu.documents.views import LeaderboardRow
from optigpu.report.claims import claim_rows, figure, measured_text
from optigpu.store import leaderboard, results
from optigpu.store.database import Session
from optigpu.vocabulary import METRICS

router = APIRouter()
ROWS = 20
KINDS = {"plausible": "good", "doubtful": "warn", "implausible": "bad", "unchecked": "plain"}


class ClaimsAsked(Asked):
    """Which claims."""

    verdict: Annotated[Plausibility | None, Query(description="What arithmetic says of them.")] = None
    about: Annotated[Text | None, Query(description="Part of the text, the hardware or the model.")] = None
    measured: Annotated[bool, Query(description="Only those of what was measured here.")] = False


@router.get("/claims")
def read_claims(view: ReaderView, asked: Annotated[ClaimsAsked, Query()]) -> Response:
    """Beside the best rows of the newest boards on each class of hardware."""
    book = baselines()
    with view.service.database.read() as session:
        measured = _measured(session, book)
    rows = claim_rows(book, measured)
    part = (asked.about or "").lower()
    shown = [
        (row, figure(row.claim), measured_text(row))
        for row in rows
        if asked.verdict in (None, row.judgement.plausibility)
        and (row.measured is not None or not asked.measured)
        and part in f"{row.claim.text} {row.claim.what} {row.claim.hardware} {row.claim.model}".lower()
    ]
    counts = {each.value: sum(row.judgement.plausibility is each for row in rows) for each in Plausibility}
    return view.page("claims.html", asked=asked, claims=shown, counts=counts, kinds=KINDS, every=len(rows))


def _measured(session: Session, book: Book) -> list[Measured]:
    metrics = dict.fromkeys(claim.metric for claim in book.claims if claim.metric in METRICS)
    rows = [row for metric in metrics for row in _rows(session, metric)]
    whole = dict.fromkeys(row.result_id for row in rows if says_too_little(row))
    return from_leaderboard(rows) + from_results(results.get(session, each) for each in whole)


def _rows(session: Session, metric: str) -> list[LeaderboardRow]:
    page = leaderboard.query(session, LeaderboardQuery(metric=metric, best=True, limit=ROWS))
    return [row for board in page.boards for row in board.rows]
