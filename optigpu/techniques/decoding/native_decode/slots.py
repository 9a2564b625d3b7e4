"""Sequences that join and leave between steps, each at a place of the operator's paged cache."""

from collections.abc import Sequence

from optigpu.ops.decode.cpu.decoder import CpuDecoder, Part
from optigpu.vocabulary import OptiGPUError


class NativeSlots:
    """Places for `count` sequences of at most `length` tokens each; every call is one pass of the operator.

    A sequence takes pages of `block_tokens` tokens as it grows. Its tokens are, bit by bit, those that it has alone.
    Raises UnsupportedError for pages that the operator cannot have, and where memory does not suffice.
    """

    def __init__(self, decoder: CpuDecoder, count: int, length: int, block_tokens: int) -> None:
        self.count, self.length, self.block_tokens = count, length, block_tokens
        self._decoder = decoder
        self._last: dict[int, int] = {}
        self._lengths: dict[int, int] = {}
        decoder.begin(count, length, block_tokens)

    def join(self, slot: int, prompt: Sequence[int]) -> int:
        """The prefill of a sequence at a free place: its first token."""
        if slot in self._last or not 0 <= slot < self.count:
            raise OptiGPUError(f"Place {slot} is not a free one of {self.count}; let a sequence leave first.")
        (self._last[slot],) = self._decoder.advance([Part(slot, 0, prompt, 1)])
        self._lengths[slot] = len(prompt)
        return self._last[slot]

    def step(self, slots: Sequence[int]) -> Sequence[int]:
        """The next token of each sequence at these places; the others wait."""
        chosen = self._decoder.advance(
            [Part(slot, self._lengths[slot], (self._last[slot],), 1) for slot in slots]
        )
        for slot, token in zip(slots, chosen, strict=True):
            self._last[slot] = token
            self._lengths[slot] += 1
        return chosen

    def leave(self, slot: int) -> None:
        """The sequence ends and gives its pages back."""
        del self._last[slot], self._lengths[slot]
        self._decoder.leave(slot)

    def close(self) -> None:
        """All sequences end; the memory goes with the next cache."""
        self._decoder.begin(1, 1)
        self._last.clear()
        self._lengths.clear()
