"""What calling a decoder has in common on every device."""

from collections.abc import Iterator
from typing import Protocol

import torch

from optigpu.ops.decode.program import Sampling
from optigpu.ops.naming import named


class Decoder(Protocol):
    """CpuDecoder and CudaDecoder, as far as they are called here."""

    def decode_into(
        self, chosen: torch.Tensor, tokens: torch.Tensor, at_once: int, sampling: Sampling | None = None
    ) -> Iterator[int]:
        """Fills `chosen`, and gives after each call how many tokens it chose."""


def decoded(decoder: Decoder, tokens: torch.Tensor, steps: int, sampling: Sampling | None) -> torch.Tensor:
    """What `decode_into` fills in one call, int64 [sequences, steps]. tokens: int64 [sequences, 1]."""
    chosen = tokens.new_empty(tokens.shape[0], max(0, steps))
    for _ in decoder.decode_into(chosen, tokens, steps, sampling):
        pass
    return chosen


def check_steps(tokens: torch.Tensor, steps: int, at_once: int) -> None:
    """Raises ValueError where nothing is to be chosen, or what it is to follow is not one token of each sequence."""
    if min(steps, at_once) < 1:
        raise ValueError(f"decode takes at least one step, not {min(steps, at_once)}.")
    if tokens.dim() == 2 and tokens.shape[1] != 1:
        raise ValueError(f"decode takes the last token of each sequence, not {named(tokens)}.")
