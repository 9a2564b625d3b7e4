"""The times between the tokens of a batch, from the streams of its sequences."""

from collections.abc import Sequence
from itertools import pairwise

from optigpu.backends.endpoint.client import Streamed
from optigpu.vocabulary import OptiGPUError


def gaps_of(batch: Sequence[Streamed]) -> list[float]:
    """Seconds from the request's start to the first token of all sequences, then between successive ones.

    A token counts when the last sequence has it. Where chunks held several tokens, each gap is that of a chunk of the
    sequence that ended last, and tokens that came with another one have a gap of 0. Raises OptiGPUError where all
    tokens came at once.
    """
    started_s = min(each.sent_s for each in batch)
    marks_s = _marks_s(batch)
    if len(marks_s) < 2:
        raise OptiGPUError(
            "The server sent all tokens at once, so prefill and decode cannot be told apart; turn on its streaming."
        )
    gaps_s = [after - before for before, after in pairwise([started_s, *marks_s])]
    return gaps_s + [0.0] * (batch[0].tokens - len(gaps_s))


def _marks_s(batch: Sequence[Streamed]) -> list[float]:
    timed = [each.token_times_s for each in batch if each.token_times_s is not None]
    if len(timed) == len(batch):
        return [max(times_s) for times_s in zip(*timed, strict=True)]
    first_s = max(each.chunk_times_s[0] for each in batch)
    slowest = max(batch, key=lambda each: each.chunk_times_s[-1])
    return [first_s, *(time_s for time_s in slowest.chunk_times_s if time_s > first_s)]
