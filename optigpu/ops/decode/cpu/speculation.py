"""Greedy decoding on a CPU in which a pass also verifies guesses (speculation.h): the same tokens in fewer passes."""

import ctypes
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from optigpu.ops.decode.calls import check_steps
from optigpu.ops.decode.cpu.decoder import CpuDecoder
from optigpu.ops.decode.cpu.interface import DecoderCalls, GuessingC, decoder_library


@dataclass
class Tally:
    """Counts over all texts so far; the first token of each comes with its prompt."""

    passes: int = 0
    tokens: int = 0
    guessed: int = 0
    accepted: int = 0

    def facts(self) -> dict[str, float | None]:
        return {
            "acceptance_rate": self.accepted / self.guessed if self.guessed else None,
            "tokens_per_pass": self.tokens / self.passes if self.passes else None,
        }


class GuessingDecoder:
    """Decodes one sequence with a CpuDecoder, and guesses what follows.

    Guesses are what followed the last `ngram` tokens (or fewer) when they were last seen, or those of `draft`, a
    decoder of the same vocabulary that was made beside this one. At most `lookahead` are verified in a pass, and fewer,
    down to none, where wrong ones cost more time than right ones save. Raises ValueError for fewer than one of either
    and for a draft of another vocabulary.
    """

    def __init__(
        self, decoder: CpuDecoder, ngram: int, lookahead: int, draft: CpuDecoder | None = None
    ) -> None:
        self._library = decoder_library()
        self._call = DecoderCalls()
        self._decoder, self._draft = decoder, draft
        self._logits = torch.empty(lookahead + 1, decoder.vocabulary)
        self.tally = Tally()
        handle = ctypes.c_void_p()
        self._call(
            self._library.optigpu_speculation_create,
            *(decoder.handle, draft.handle if draft else None, ngram, lookahead, ctypes.byref(handle)),
        )
        self._handle = handle
        weakref.finalize(self, self._library.optigpu_speculation_destroy, handle)

    def begin(self, prompt: torch.Tensor, new_tokens: int) -> torch.Tensor:
        """The prompt, int64 [1, count], into empty caches; its logits, float32 [1, vocabulary].

        A draft's cache has as many tokens as its context; after those it guesses nothing more. Raises what
        `CpuDecoder.extend` does.
        """
        length = prompt.shape[1] + new_tokens
        self._decoder.begin(1, length)
        if self._draft is not None:
            self._draft.begin(1, length)
        logits = self._decoder.extend(prompt)
        self._text = torch.cat([prompt[0], logits.argmax(dim=1), prompt.new_zeros(new_tokens)])
        self._known = prompt.shape[1] + 1
        self._call(self._library.optigpu_speculation_begin, self._handle, self._text.data_ptr(), self._known)
        return logits

    def decode_into(self, chosen: torch.Tensor, at_once: int) -> Iterator[int]:
        """The tokens after the first of `begin`, int64 [1, steps], at least `at_once` in a call where so many are left.

        Gives after each call how many it chose; `chosen` is filled when the last one has ended.
        """
        steps = chosen.shape[1]
        check_steps(chosen[:, :1], steps, at_once)
        start, tally = self._known, self.tally
        request = GuessingC(
            text=self._text.data_ptr(), logits=self._logits.data_ptr(), known=start, most=steps
        )
        while request.most:
            request.least = min(at_once, request.most)
            self._call(self._library.optigpu_speculation_run, self._handle, ctypes.byref(request))
            tally.passes += request.passes
            tally.tokens += request.chosen
            tally.guessed += request.guessed
            tally.accepted += request.right
            yield request.chosen
            request.known += request.chosen
            request.most -= request.chosen
        self._known = start + steps
        chosen.copy_(self._text[start : start + steps].unsqueeze(0))
