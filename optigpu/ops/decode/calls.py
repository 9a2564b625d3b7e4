"""The common methods and checks of the decoders for all devices."""

from collections.abc import Iterator
from typing import Protocol

import torch

from optigpu.ops.decode.program import Sampling
from optigpu.ops.naming import named


class ProgramDecoder(Protocol):
    """CpuDecoder and CudaDecoder: each runs a Program and keeps the keys and values of its sequences."""

    @property
    def length(self) -> int:
        """Tokens of each sequence in the cache."""

    @property
    def logits(self) -> torch.Tensor:
        """The logits of the last step, float32 [sequences, vocabulary]."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys, values and their scales, of all sequences."""

    def begin(self, sequences: int, capacity: int) -> None:
        """An empty cache for so many sequences of at most so many tokens."""

    def extend(self, tokens: torch.Tensor) -> torch.Tensor:
        """Appends tokens, int64 [sequences, count]; returns the last one's logits, float32 [sequences, vocabulary]."""

    def decode(self, tokens: torch.Tensor, steps: int, sampling: Sampling | None = None) -> torch.Tensor:
        """The next `steps` tokens, int64 [sequences, steps], after the last ones, int64 [sequences, 1]."""

    def decode_into(
        self, chosen: torch.Tensor, tokens: torch.Tensor, at_once: int, sampling: Sampling | None = None
    ) -> Iterator[int]:
        """Fills `chosen`, and gives after each call how many tokens it chose."""


def decoded(
    decoder: ProgramDecoder, tokens: torch.Tensor, steps: int, sampling: Sampling | None
) -> torch.Tensor:
    """The result of `decode_into` in one call, int64 [sequences, steps]. tokens: int64 [sequences, 1]."""
    chosen = tokens.new_empty(tokens.shape[0], max(0, steps))
    for _ in decoder.decode_into(chosen, tokens, steps, sampling):
        pass
    return chosen


def check_cache_size(sequences: int, capacity: int) -> None:
    """Raises ValueError if a cache would hold no token."""
    if sequences < 1 or capacity < 1:
        raise ValueError(
            f"A cache needs at least one sequence and one token, not {sequences} sequences of {capacity} tokens."
        )


def check_steps(tokens: torch.Tensor, steps: int, at_once: int) -> None:
    """Raises ValueError if there is no step to take, or `tokens` are not the last one of each sequence."""
    if min(steps, at_once) < 1:
        raise ValueError(f"decode needs at least one step, not {min(steps, at_once)}.")
    if tokens.dim() == 2 and tokens.shape[1] != 1:
        raise ValueError(
            f"decode needs the last token of each sequence, int64 [sequences, 1], not {named(tokens)}."
        )


def no_cache() -> ValueError:
    return ValueError("The decoder has no cache yet: call begin first.")


def no_logits() -> ValueError:
    return ValueError("There are no logits before the first step: call extend or decode first.")


def wrong_tokens(tokens: torch.Tensor, sequences: int) -> ValueError:
    return ValueError(f"The decoder needs int64 [{sequences}, count] tokens, not {named(tokens)}.")
