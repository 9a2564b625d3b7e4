"""The feed at `/feed.atom`: the best of each workload on each class of hardware, the newest first (RFC 4287)."""

from collections.abc import Iterator
from xml.etree.ElementTree import Element, SubElement, tostring

from fastapi import APIRouter, Response

from api.pages.view import Plain, ReaderView
from optigpu.documents.queries import LeaderboardQuery
from optigpu.documents.views import Board, LeaderboardRow
from optigpu.report.leaderboard import workload_text
from optigpu.report.numbers import with_interval
from optigpu.report.rows import heading
from optigpu.store import leaderboard

router = APIRouter()
ATOM = "http://www.w3.org/2005/Atom"
ENTRIES = 50
ROWS = 50


@router.get("/feed.atom")
def read_feed(view: ReaderView, _: Plain) -> Response:
    """Of the newest boards."""
    with view.service.database.read() as session:
        page = leaderboard.query(session, LeaderboardQuery(best=True, limit=ROWS))
    bests = [(board, row) for board in page.boards for row in board.rows if row.rank is not None]
    newest = sorted(bests, key=lambda each: each[1].measured_at, reverse=True)[:ENTRIES]
    text = tostring(_feed(view.origin, newest), encoding="utf-8", xml_declaration=True)
    return Response(text, media_type="application/atom+xml", headers={"Cache-Control": "private, no-cache"})


def _feed(origin: str, bests: list[tuple[Board, LeaderboardRow]]) -> Element:
    feed = Element("feed", xmlns=ATOM)
    _text(feed, "id", f"{origin}/feed.atom")
    _text(feed, "title", "OptiGPU: new bests")
    _text(feed, "updated", bests[0][1].measured_at.isoformat() if bests else "1970-01-01T00:00:00+00:00")
    SubElement(SubElement(feed, "author"), "name").text = "OptiGPU"
    SubElement(feed, "link", rel="self", href=f"{origin}/feed.atom")
    SubElement(feed, "link", href=f"{origin}/")
    for board, row in bests:
        entry = SubElement(feed, "entry")
        for name, text in _entry(board, row):
            _text(entry, name, text)
        SubElement(entry, "link", href=f"{origin}/results/{row.result_id}")
    return feed


def _entry(board: Board, row: LeaderboardRow) -> Iterator[tuple[str, str]]:
    figure = f"{with_interval(row.value.model_dump())} {heading(row.metric)}"
    yield "id", f"urn:uuid:{row.result_id}"
    yield "title", f"{figure} by {row.label} on {row.hardware}"
    yield "updated", row.measured_at.isoformat()
    yield "summary", f"{workload_text(board.workload, board.model)}: {figure}, rank {row.rank} of its board."


def _text(parent: Element, name: str, text: str) -> None:
    """Without what XML cannot hold."""
    kept = (
        letter for letter in text if letter in "\t\n\r" or (letter >= " " and letter not in "\ufffe\uffff")
    )
    SubElement(parent, name).text = "".join(kept)
