"""Whether the inputs of a request are still those that were drawn."""

import hashlib

import numpy as np
from numpy.typing import NDArray


class Untouched:
    """An array as it was when this was made. It may share its memory with what the engine computes on."""

    def __init__(self, array: NDArray[np.generic], earlier: "Untouched | None" = None) -> None:
        """`earlier` is that of the request with the timed inputs, where this one's are fresh: both are looked at."""
        self._array, self._before, self._earlier = array, _digest(array), earlier

    @property
    def problem(self) -> str | None:
        """A sentence where its numbers are others by now."""
        if _digest(self._array) == self._before:
            return self._earlier.problem if self._earlier else None
        return "The request changed its own inputs, so that what was timed is not what was asked for."


def _digest(array: NDArray[np.generic]) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(array).data, digest_size=16).digest()
