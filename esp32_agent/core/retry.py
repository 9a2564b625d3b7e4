"""Pauses between attempts: twice as long after each failure, and never the same for two devices."""

from esp32_agent.port.base import Board


class Backoff:
    def __init__(self, board: Board, first_ms: int, most_ms: int) -> None:
        self._board = board
        self._first_ms = first_ms
        self._most_ms = most_ms
        self._failures = 0

    def next_ms(self) -> int:
        """The pause after one more failure, drawn from the upper half of what is due."""
        due_ms = min(self._first_ms << min(self._failures, 20), self._most_ms)
        self._failures += 1
        half = due_ms // 2
        return due_ms - half + int.from_bytes(self._board.random_bytes(4), "big") % (half + 1)

    def reset(self) -> None:
        self._failures = 0
