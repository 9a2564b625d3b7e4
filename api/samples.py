"""Streams raw samples as JSON text: a long run has millions of them."""

import json
import zlib
from collections.abc import Iterator, Sequence

from optigpu.store import results
from optigpu.store.database import Database

PIECE_NUMBERS = 4096
"""How many numbers are text at once."""


def samples_text(database: Database, result_id: str, names: Sequence[str]) -> Iterator[str]:
    """The JSON of a SamplesView. Each metric is read in its own session: a slow reader holds none."""
    yield f'{{"result_id": {json.dumps(result_id)}, "samples": {{'
    for number, name in enumerate(names):
        with database.read() as session:
            lengths, data = results.packed_samples(session, result_id, name)
        yield f"{', ' if number else ''}{json.dumps(name)}: ["
        yield from _lists(lengths, data)
        yield "]"
    yield "}}"


def _lists(lengths: Sequence[int], data: bytes) -> Iterator[str]:
    """One list for each replicate, with commas between."""
    import numpy as np  # here, because samples are seldom asked for

    flat = np.frombuffer(zlib.decompress(data), dtype="<f8")
    start = 0
    for number, length in enumerate(lengths):
        yield ", [" if number else "["
        for at in range(start, start + length, PIECE_NUMBERS):
            piece = flat[at : min(at + PIECE_NUMBERS, start + length)].tolist()
            yield (", " if at > start else "") + json.dumps(piece)[1:-1]
        yield "]"
        start += length
