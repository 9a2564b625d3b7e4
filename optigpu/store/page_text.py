"""A page of the leaderboard as JSON text: its rows were written when their results were stored."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from optigpu.documents.views import Board, BoardFacts, LeaderboardPage, LeaderboardRow

ROWS = TypeAdapter(tuple[LeaderboardRow, ...])


@dataclass(frozen=True)
class BoardText:
    """A board whose rows are JSON texts."""

    facts: BoardFacts
    rows: tuple[str, ...]

    def board(self) -> Board:
        """The board with typed rows."""
        rows = ROWS.validate_json(f"[{','.join(self.rows)}]")
        return Board(**dict(self.facts), rows=rows)

    def json(self) -> str:
        """A `Board` as JSON."""
        return f'{self.facts.model_dump_json()[:-1]},"rows":[{",".join(self.rows)}]}}'


@dataclass(frozen=True)
class PageText:
    """A `LeaderboardPage` whose rows are JSON texts."""

    boards: tuple[BoardText, ...]
    note: str | None
    next_cursor: str | None

    def linked(self, links: Callable[[BoardFacts], Mapping[str, str]]) -> "PageText":
        """The same with the links of each board."""
        boards = tuple(
            replace(board, facts=board.facts.model_copy(update={"links": links(board.facts)}))
            for board in self.boards
        )
        return replace(self, boards=boards)

    def json(self) -> str:
        """The page as JSON."""
        boards = ",".join(board.json() for board in self.boards)
        end = json.dumps({"note": self.note, "next_cursor": self.next_cursor})
        return f'{{"boards":[{boards}],{end[1:]}'

    def page(self) -> LeaderboardPage:
        """The page with typed rows."""
        boards = tuple(board.board() for board in self.boards)
        return LeaderboardPage(boards=boards, note=self.note, next_cursor=self.next_cursor)
