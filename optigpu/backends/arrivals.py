"""The tokens of a batch whose sequences an engine answers one by one, and when each came."""

from collections.abc import Sequence

import numpy as np

from optigpu.backends.runtime import Generation
from optigpu.vocabulary import OptiGPUError


class Arrivals:
    """What came of each of so many sequences since `started_ns`, by `time.perf_counter_ns`."""

    def __init__(self, rows: int, started_ns: int) -> None:
        self._started_ns = started_ns
        self._tokens: list[list[int]] = [[] for _ in range(rows)]
        self._marks_ns: list[list[int]] = [[] for _ in range(rows)]

    def take(self, row: int, tokens: Sequence[int], now_ns: int) -> None:
        """The next tokens of a sequence."""
        self._tokens[row] += tokens
        self._marks_ns[row] += [now_ns] * len(tokens)

    def generation(self, new_tokens: int, engine: str) -> Generation:
        """A token of the batch counts when the last sequence has it.

        Raises OptiGPUError where a sequence has another number of tokens than was asked of the engine.
        """
        wrong = next((len(each) for each in self._tokens if len(each) != new_tokens), None)
        if wrong is not None:
            raise OptiGPUError(f"{engine} decoded {wrong} tokens instead of the {new_tokens} asked for.")
        last_ns = np.array(self._marks_ns, np.int64).max(axis=0)
        gaps_ns = np.diff(np.concatenate([[self._started_ns], last_ns]))
        return Generation(np.array(self._tokens, np.int64), [gap / 1e9 for gap in gaps_ns.tolist()])
