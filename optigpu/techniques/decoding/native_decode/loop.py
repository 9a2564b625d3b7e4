"""The loop, and the pass over a prompt, by the operator that runs a whole decode step."""

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from optigpu.ops.decode.cpu.decoder import CpuDecoder, best_instruction_set
from optigpu.ops.decode.cpu.speculation import GuessingDecoder
from optigpu.techniques.base import Loop, Notes
from optigpu.techniques.decoding.native_decode.slots import NativeSlots
from optigpu.techniques.decoding.native_decode.speculation import NativeSpeculation
from optigpu.vocabulary import UnsupportedError

if TYPE_CHECKING:
    from optigpu.techniques.decoding.native_decode.decoders import Decoder


class NativeLoop:
    """A Loop around a decoder, and has `score`; on a CPU also `slots`, for a load, and `speculated`, for guesses."""

    def __init__(
        self,
        decoder: "Decoder",
        tokens_at_once: int,
        facts: Mapping[str, Any],
        notes: Notes,
        drafted: Callable[[PreTrainedModel, CpuDecoder], CpuDecoder],
    ) -> None:
        """`drafted` packs a draft model and makes its decoder, which uses the threads of another one."""
        self._decoder = decoder
        self._tokens_at_once = tokens_at_once
        self._facts = facts
        self._notes = notes
        self._drafted = drafted

    def __call__(self, prompt: torch.Tensor, new_tokens: int, clock: Any) -> tuple[torch.Tensor, list[Any]]:
        """Greedy tokens int64 [batch, new_tokens] and new_tokens + 1 marks. `prompt`: int64 [batch, prompt_tokens].

        Tokens of one call share a mark. Raises UnsupportedError when the cache does not fit the memory.
        """
        self._notes.record(**self._facts)
        marks = [clock.mark()]
        self._decoder.begin(prompt.shape[0], prompt.shape[1] + new_tokens)
        first = self._decoder.extend(prompt).argmax(dim=1, keepdim=True)
        marks.append(clock.mark())
        others = first.new_empty(prompt.shape[0], new_tokens - 1)
        calls = self._decoder.decode_into(others, first, self._tokens_at_once) if new_tokens > 1 else ()
        for chosen in calls:
            marks += [clock.mark()] * chosen
        return torch.cat([first, others], dim=1), marks

    def score(self, tokens: torch.Tensor, prefill: int) -> Iterator[torch.Tensor]:
        """Logits after each of `tokens` ([batch, length]) from index `prefill` on, float32 [batch, vocabulary]."""
        self._notes.record(**self._facts)
        self._decoder.begin(*tokens.shape)
        if prefill:
            self._decoder.extend(tokens[:, :prefill])
        for token in tokens[:, prefill:].split(1, dim=1):
            yield self._decoder.extend(token).clone()

    def slots(self, count: int, length: int, block_tokens: int) -> NativeSlots:
        """Places for sequences that join and leave between steps.

        Raises UnsupportedError on a GPU, and as NativeSlots does.
        """
        decoder = self._on_cpu("a load")
        own = {"kv_cache": "native, paged", "decode_loop": "native operator, continuous batching"}
        self._notes.record(**{**self._facts, **own})
        return NativeSlots(decoder, count, length, block_tokens)

    def speculated(self, draft: PreTrainedModel | None, ngram: int, lookahead: int) -> Loop:
        """The loop with guesses from the text, or from a draft model, which is packed in place as this one was.

        Raises UnsupportedError on a GPU, and for a draft that the operator does not run.
        """
        decoder = self._on_cpu("speculative_decoding")
        drafting = None if draft is None else self._drafted(draft, decoder)
        guessing = GuessingDecoder(decoder, ngram, lookahead, drafting)
        return NativeSpeculation(
            self, decoder, guessing, lookahead, self._tokens_at_once, self._facts, self._notes
        )

    def _on_cpu(self, what: str) -> CpuDecoder:
        if not isinstance(self._decoder, CpuDecoder):
            raise UnsupportedError(
                f"native_decode runs {what} on a CPU alone; leave it out of the stack, or ask for device cpu."
            )
        return self._decoder


class NativePass:
    """A prompt through a decoder into an empty cache; the logits of its last token."""

    def __init__(self, decoder: "Decoder", facts: Mapping[str, Any], notes: Notes) -> None:
        self._decoder = decoder
        self._facts = facts
        self._notes = notes

    def __call__(self, prompt: torch.Tensor) -> torch.Tensor:
        """Logits float32 [batch, vocabulary]. `prompt`: int64 [batch, length] of ids."""
        self._notes.record(**self._facts)
        self._decoder.begin(*prompt.shape)
        return self._decoder.extend(prompt)


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
