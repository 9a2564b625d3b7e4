"""The common methods and checks of the decoders for all devices."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Protocol

import torch

from optigpu.ops.decode.program import Activation, Sampling
from optigpu.ops.operands import named

ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
        "gelu": torch.nn.functional.gelu,
        "relu": torch.relu,
        "silu": torch.nn.functional.silu,
        "relu2": lambda x: torch.relu(x).square(),
    }
)


class ProgramDecoder(Protocol):
    """Runs a Program and keeps the keys and values of its sequences: CpuDecoder and CudaDecoder."""

    @property
    def length(self) -> int:
        """Tokens of each sequence in the cache."""

    @property
    def logits(self) -> torch.Tensor:
        """The logits of the last step, float32 [sequences, vocabulary]. Raises ValueError before the first step."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys, values and their scales, of all sequences."""

    def begin(self, sequences: int, capacity: int) -> None:
        """An empty cache for so many sequences of at most so many tokens; one that is large enough is used again.

        Raises UnsupportedError when there is not enough memory for it.
        """

    def extend(self, tokens: torch.Tensor) -> torch.Tensor:
        """Appends tokens, int64 [sequences, count]; returns the last one's logits, float32 [sequences, vocabulary].

        Raises ValueError for ids that the model does not have, and ReplicateError for a position beyond the cache or
        when numbers are no longer finite.
        """

    def decode(self, tokens: torch.Tensor, steps: int, sampling: Sampling | None = None) -> torch.Tensor:
        """The next `steps` tokens, int64 [sequences, steps], in one call. tokens: the last ones, int64 [sequences, 1].

        They are not in the cache yet, and the last that is chosen is not afterwards. Raises what `extend` does.
        """
        chosen = tokens.new_empty(tokens.shape[0], max(0, steps))
        for _ in self.decode_into(chosen, tokens, steps, sampling):
            pass
        return chosen

    def decode_into(
        self, chosen: torch.Tensor, tokens: torch.Tensor, at_once: int, sampling: Sampling | None = None
    ) -> Iterator[int]:
        """As `decode`, `at_once` tokens of each sequence in a call; gives after each call how many it chose.

        `chosen`, contiguous int64 [sequences, steps], is filled when the last one has ended.
        """


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
