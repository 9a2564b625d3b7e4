"""Pages of the leaderboard that are not kept: those that wait are read together."""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import cached_property
from typing import Annotated, NamedTuple
from urllib.parse import urlencode

from fastapi import Query, Response
from pydantic import Field

from api.filters import check_filters
from api.forms import Form, query_word, written
from api.parameters import Cursor, Limit, Text
from api.problems import ProblemError
from api.together import Together
from optigpu.documents.views import BoardFacts
from optigpu.store import leaderboard
from optigpu.store.database import Database, Session
from optigpu.store.filters import LeaderboardQuery
from optigpu.store.leaderboard import HEAD_ROWS, ROWS
from optigpu.store.page_text import PageText
from optigpu.vocabulary import METRICS, Frozen, OptiGPUError

AT_ONCE = 4
"""Pages that are sent together. One by one, or all of a turn at once, the slowest of a hundred came later
(decision 35)."""

MetricName = StrEnum("MetricName", {name: name for name in METRICS})  # type: ignore[misc]


class LeaderboardFilter(Frozen):
    """Which boards and rows to list; see LeaderboardQuery for what each filter means."""

    metric: Annotated[
        MetricName | None,
        Query(description="What boards are ranked by. Default: the primary metric of each board's workload."),
    ] = None
    workload: Annotated[
        Text | None, Query(description="A kind of workload, or the digest of one board's workload.")
    ] = None
    model: Text | None = None
    hardware: Annotated[Text | None, Query(description="Part of a hardware class.")] = None
    technique: Annotated[Text | None, Query(description="A technique that must be in the stack.")] = None
    backend: Text | None = None
    min_top1: Annotated[
        Annotated[float, Field(ge=0, le=1)] | None,
        Query(description="Minimum `top1_agreement` with fp32; rows without that figure are left out."),
    ] = None
    max_kld: Annotated[
        Annotated[float, Field(ge=0)] | None,
        Query(description="Maximum `kld_mean`, in nats; rows without that figure are left out."),
    ] = None
    clean: Annotated[bool, Query(description="Leave out rows with warnings.")] = False
    pareto: Annotated[
        bool,
        Query(
            description="Only rows that no other of the same hardware beats in speed, memory, quality and energy."
        ),
    ] = False
    best: Annotated[
        bool, Query(description="Only the first row of each class of hardware, with the baselines there.")
    ] = False
    include_invalid: Annotated[
        bool, Query(description="Add invalid results, without a rank and with their reasons.")
    ] = False
    include_history: Annotated[
        bool, Query(description="Add earlier results of the same variant and hardware, without a rank.")
    ] = False
    source: Text = "worker"
    limit: Annotated[
        Limit | None,
        Query(
            description=f"The largest number of rows of a board. Default: {ROWS}; {HEAD_ROWS} for several boards."
        ),
    ] = None
    cursor: Cursor | None = None
    format: Annotated[Form | None, Query(description="Takes precedence over the header Accept.")] = None

    def query(self) -> LeaderboardQuery:
        """The same, as the store asks for it."""
        given = self.model_dump(exclude={"format", "metric"})
        return LeaderboardQuery(**given, metric=self.metric.value if self.metric else None)

    @property
    def continues_list(self) -> bool:
        """Whether the cursor continues a list of boards. Raises CursorError."""
        return leaderboard.continues_list(self.cursor)

    def links(self, board: BoardFacts, prefix: str) -> dict[str, str]:
        """From a board to all of its rows, and to its next page; one of several shows only the first rows."""
        found = {"self": self.link(prefix, workload=board.workload_digest)}
        if board.next_cursor:
            found["next"] = self.link(prefix, workload=board.workload_digest, cursor=board.next_cursor)
        return found

    def link(self, prefix: str, **changes: str) -> str:
        """The address of another page with these filters."""
        given = self._words | {name: urlencode({name: value}) for name, value in changes.items()}
        return f"{prefix}/v1/leaderboard?{'&'.join(given.values())}"

    @cached_property
    def _words(self) -> dict[str, str]:
        """The filters as they are written in an address, by name: a page has a link or two for each of its boards."""
        given = self.model_dump(mode="json", exclude_unset=True, exclude={"cursor"})
        return {name: urlencode({name: query_word(value)}) for name, value in given.items()}


class WantedPage(NamedTuple):
    """What is asked for, in which form."""

    filter: LeaderboardFilter
    form: Form


class Pages:
    """Reads pages, for one process of the service."""

    def __init__(self, database: Database, prefix: str) -> None:
        self._database = database.planned_once()
        self._prefix = prefix
        self._together = Together[WantedPage, Response](self._responses, "pages", AT_ONCE)

    async def ask(self, wanted: WantedPage) -> Response:
        """The page. Raises ProblemError for a filter that fits nothing known, OptiGPUError for another."""
        return await self._together.ask(wanted)

    def close(self) -> None:
        """Ends the thread that reads, and closes its connection."""
        self._together.close()
        self._database.close()

    def _responses(self, pages: Sequence[WantedPage]) -> Iterator[Response | Exception]:
        # A page that is older in one part than in another is kept as of the revision before, and read again.
        with self._database.glance() as session:
            for page in pages:
                yield self._response(session, *page)

    def _response(self, session: Session, wanted: LeaderboardFilter, form: Form) -> Response | Exception:
        query = wanted.query()
        try:
            page = leaderboard.read(session, query)
            if not page.boards:  # a filter that has found something is known
                check_filters(session, query)
        except (ProblemError, OptiGPUError) as error:
            return error
        response = _written(page.linked(lambda board: wanted.links(board, self._prefix)), form)
        response.headers["Vary"] = "Accept"
        if cursor := _next_cursor(page, wanted):
            response.headers["Link"] = f'<{wanted.link(self._prefix, cursor=cursor)}>; rel="next"'
        return response


def _next_cursor(page: PageText, wanted: LeaderboardFilter) -> str | None:
    """Of the boards that follow, or of the rows that follow where one board is read and not the end of a list."""
    if len(page.boards) == 1 and not wanted.continues_list:
        return page.boards[0].facts.next_cursor
    return page.next_cursor


def _written(page: PageText, form: Form) -> Response:
    if form is Form.JSON:
        return Response(page.json(), media_type="application/json")
    from optigpu.report.leaderboard import leaderboard_csv, leaderboard_grids

    return written(page.page(), form, leaderboard_csv, leaderboard_grids)
