"""The loop, and the pass over a prompt, by the operator that runs a whole decode step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from optigpu.ops.decode.cpu.decoder import CpuDecoder, Part, best_instruction_set
from optigpu.ops.decode.cpu.speculation import GuessingDecoder
from optigpu.techniques.base import Loop, Notes
from optigpu.vocabulary import OptiGPUError, ReplicateError, UnsupportedError

if TYPE_CHECKING:
    from optigpu.techniques.decoding.native_decode.programs import Decoder


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


@dataclass(eq=False)
class NativeLoop:
    """A Loop around a decoder, and has `score`; on a CPU also `slots`, for a load, and `speculated`, for guesses.

    `drafted` packs a draft model and makes its decoder, which uses the threads of another one.
    """

    decoder: "Decoder"
    tokens_at_once: int
    facts: Mapping[str, Any]
    notes: Notes
    drafted: Callable[[PreTrainedModel, CpuDecoder], CpuDecoder]

    def __call__(self, prompt: torch.Tensor, new_tokens: int, clock: Any) -> tuple[torch.Tensor, list[Any]]:
        """Greedy tokens int64 [batch, new_tokens] and new_tokens + 1 marks. `prompt`: int64 [batch, prompt_tokens].

        Tokens of one call share a mark. Raises UnsupportedError when the cache does not fit the memory.
        """
        self.notes.record(**self.facts)
        marks = [clock.mark()]
        self.decoder.begin(prompt.shape[0], prompt.shape[1] + new_tokens)
        first = self.decoder.extend(prompt).argmax(dim=1, keepdim=True)
        marks.append(clock.mark())
        others = first.new_empty(prompt.shape[0], new_tokens - 1)
        calls = self.decoder.decode_into(others, first, self.tokens_at_once) if new_tokens > 1 else ()
        for chosen in calls:
            marks += [clock.mark()] * chosen
        return torch.cat([first, others], dim=1), marks

    def prefill(self, prompt: torch.Tensor) -> torch.Tensor:
        """Logits float32 [batch, vocabulary] of the last token of a prompt, int64 [batch, length]."""
        self.notes.record(**self.facts)
        self.decoder.begin(*prompt.shape)
        return self.decoder.extend(prompt)

    def score(self, tokens: torch.Tensor, prefill: int) -> Iterator[torch.Tensor]:
        """Logits after each of `tokens` ([batch, length]) from index `prefill` on, float32 [batch, vocabulary]."""
        self.notes.record(**self.facts)
        self.decoder.begin(*tokens.shape)
        if prefill:
            self.decoder.extend(tokens[:, :prefill])
        for token in tokens[:, prefill:].split(1, dim=1):
            yield self.decoder.extend(token).clone()

    def slots(self, count: int, length: int, block_tokens: int) -> NativeSlots:
        """Places for sequences that join and leave between steps.

        Raises UnsupportedError on a GPU, and as NativeSlots does.
        """
        decoder = self._on_cpu("a load")
        own = {"kv_cache": "native, paged", "decode_loop": "native operator, continuous batching"}
        self.notes.record(**{**self.facts, **own})
        return NativeSlots(decoder, count, length, block_tokens)

    def speculated(self, draft: PreTrainedModel | None, ngram: int, lookahead: int) -> Loop:
        """The loop with guesses from the text, or from a draft model, which is packed in place as this one was.

        Raises UnsupportedError on a GPU, and for a draft that the operator does not run.
        """
        decoder = self._on_cpu("speculative_decoding")
        drafting = None if draft is None else self.drafted(draft, decoder)
        guessing = GuessingDecoder(decoder, ngram, lookahead, drafting)
        return NativeSpeculation(self, decoder, guessing, lookahead)

    def _on_cpu(self, what: str) -> CpuDecoder:
        if not isinstance(self.decoder, CpuDecoder):
            raise UnsupportedError(
                f"native_decode runs {what} on a CPU alone; leave it out of the stack, or ask for device cpu."
            )
        return self.decoder


def require_operator(device: torch.device) -> str:
    """The operator's kind on a device: Triton, or on a CPU the instruction set of its C++ code.

    Raises UnsupportedError where it cannot be built or is not installed.
    """
    if device.type == "cpu":
        return f"native-{best_instruction_set()}"
    if find_spec("triton") is None:
        raise UnsupportedError(
            "native_decode needs Triton on CUDA, and it is not installed; install it with: pip install triton."
        )
    return "triton"


@dataclass(eq=False)
class NativeSpeculation:
    """A Loop that decodes one sequence, and has `score`. Tokens that were verified together share a mark."""

    plain: NativeLoop
    decoder: CpuDecoder
    guessing: GuessingDecoder
    lookahead: int
    _compared: bool = False

    def __call__(self, prompt: torch.Tensor, new_tokens: int, clock: Any) -> tuple[torch.Tensor, list[Any]]:
        """Greedy tokens int64 [1, new_tokens] and new_tokens + 1 marks. `prompt`: int64 [1, prompt_tokens].

        Raises UnsupportedError for a batch, and ReplicateError when the first request's tokens are not those of plain
        decoding, which they are bit by bit.
        """
        if prompt.shape[0] != 1:
            raise UnsupportedError(
                f"speculative_decoding needs a batch size of 1, not {prompt.shape[0]}; set batch_size to 1."
            )
        marks = [clock.mark()]
        first = self.guessing.begin(prompt, new_tokens).argmax(dim=1, keepdim=True)
        marks.append(clock.mark())
        others = first.new_empty(1, new_tokens - 1)
        calls = self.guessing.decode_into(others, self.plain.tokens_at_once) if new_tokens > 1 else ()
        for chosen in calls:
            marks += [clock.mark()] * chosen
        tokens = torch.cat([first, others], dim=1)
        self.plain.notes.record(**self.plain.facts, **self.guessing.tally.facts())
        if not self._compared:
            self._compare(tokens, self.plain(prompt, new_tokens, clock)[0])
        return tokens, marks

    def score(self, tokens: torch.Tensor, prefill: int) -> Iterator[torch.Tensor]:
        """Logits after each of `tokens` ([batch, length]) from index `prefill` on, float32 [batch, vocabulary].

        By passes that are as long as those that verify can be: what is scored is what would have been guessed.
        """
        self.plain.notes.record(**self.plain.facts)
        batch, length = tokens.shape
        self.decoder.begin(batch, length)
        if prefill:
            self.decoder.extend(tokens[:, :prefill])
        for start in range(prefill, length, self.lookahead + 1):
            given = tokens[:, start : start + self.lookahead + 1].tolist()
            count = len(given[0])
            self.decoder.advance([Part(row, start, part, count) for row, part in enumerate(given)])
            yield from self.decoder.logits.clone().view(batch, count, -1).unbind(1)

    def _compare(self, tokens: torch.Tensor, expected: torch.Tensor) -> None:
        differing = (tokens != expected)[0].nonzero()
        if len(differing):
            raise ReplicateError(
                f"native_decode with guesses chose another token than without at {int(differing[0])}; leave "
                "speculative_decoding out, and report this with the model."
            )
        self.plain.notes.record(speculation_agreement=1.0)
        self._compared = True
