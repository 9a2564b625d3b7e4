"""A decoder on a CPU: one call of the C++ operator (decode.cpp) runs whole steps of decoding, with its own threads.

decoder = CpuDecoder(program, kv="bf16", threads=2)
decoder.begin(sequences=1, capacity=160)
logits = decoder.extend(prompt)                       # the prompt, int64 [1, 32]
tokens = decoder.decode(logits.argmax(-1, keepdim=True), steps=127)

As little as possible is done between two tokens: a step evicts everything else from the caches, so that an operation of
torch that usually takes a microsecond takes twenty.
"""

import ctypes
import weakref
from array import array
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch

from optigpu.hardware.cpu import node_of_each_cpu
from optigpu.ops.decode import calls
from optigpu.ops.decode.cpu import interface
from optigpu.ops.decode.cpu.cache import CpuCache
from optigpu.ops.decode.cpu.placement import chosen_cpus, place
from optigpu.ops.decode.program import CacheKind, Program, Sampling
from optigpu.ops.operands import named

CpuInstructions = Literal["best", "portable", "avx2", "avx512_vnni", "arm_dot", "arm_i8mm"]
INSTRUCTION_SETS: dict[CpuInstructions, int] = {
    "best": 0,
    "portable": 1,
    "avx2": 2,
    "avx512_vnni": 3,
    "arm_dot": 4,
    "arm_i8mm": 5,
}
"""The operator's numbers; the enumeration InstructionSet in interface.h. One that this CPU lacks is refused."""


class Part(NamedTuple):
    """Some tokens of a sequence, the first of them at `position`.

    `wanted` says after how many of the last ones the next token is asked for.
    """

    sequence: int
    position: int
    tokens: Sequence[int]
    wanted: int


class CpuDecoder(calls.ProgramDecoder):
    """Runs a program whose matrices cpu/packing.py packed. Results do not depend on the number of threads.

    Raises UnsupportedError where the operator cannot be built or memory does not suffice, and ValueError for a program
    whose parts do not fit together, fewer than one thread, or an instruction set that this CPU lacks.
    """

    def __init__(
        self,
        program: Program,
        kv: CacheKind = "bf16",
        threads: int = 1,
        instruction_set: CpuInstructions = "best",
        cpus: Sequence[int] = (),
        beside: "CpuDecoder | None" = None,
    ) -> None:
        """`cpus` are what the threads are pinned to, the first of them during calls alone; too few pin none.

        `beside` is a decoder whose threads do this one's work as well, however many were asked for. On a machine with
        several memory nodes the weights' pages are moved to those of pinned threads; `placement` says how many were.
        """
        nodes = node_of_each_cpu()
        self._cpus: list[int] = beside._cpus if beside else chosen_cpus(threads, cpus, nodes)
        self._library = interface.decoder_library()
        self._call = interface.DecoderCalls()
        self._program = program
        self._kv: CacheKind = kv
        self._cache: CpuCache | None = None
        self._row_logits = torch.empty(0, program.vocabulary)
        self._logits: torch.Tensor | None = None
        self._decoded: torch.Tensor | None = None
        described, handle = interface.DescribedProgram(program), ctypes.c_void_p()
        self._call(
            self._library.optigpu_decoder_create,
            *(ctypes.byref(described.c), threads, interface.pinning(threads, self._cpus)),
            *(INSTRUCTION_SETS[instruction_set], beside.handle if beside else None, ctypes.byref(handle)),
        )
        self.handle: ctypes.c_void_p = handle
        weakref.finalize(self, _destroy, self._library, handle, described)
        self.placement = place(program, self._cpus, nodes)

    def begin(self, sequences: int, capacity: int, page: int | None = None) -> None:
        """With `page`, sequences take pages of so many tokens as they grow. Raises what CpuCache does."""
        calls.check_cache_size(sequences, capacity)
        cache = self._cache
        if cache is None or cache.sequences != sequences or cache.stored < capacity or page or cache.is_paged:
            self._cache = None  # before there is another
            cache = CpuCache(self._program, self._kv, sequences, capacity, page)
        described = interface.described_cache(cache, capacity)
        self._call(self._library.optigpu_decoder_begin, self.handle, ctypes.byref(described))
        self._cache = cache
        self._logits = self._decoded = None

    @property
    def length(self) -> int:
        return int(self._library.optigpu_decoder_length(self.handle))

    @property
    def logits(self) -> torch.Tensor:
        """Those that `decode` left here are overwritten by the next `decode`."""
        if self._logits is None:
            raise calls.no_logits()
        return self._logits

    @property
    def vocabulary(self) -> int:
        return self._program.vocabulary

    @property
    def cache_bytes(self) -> int:
        return self._cache.stored_bytes if self._cache else 0

    def extend(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = self._checked(tokens)
        request, logits = _request(tokens, Sampling()), torch.empty(tokens.shape[0], self._program.vocabulary)
        request.logits = logits.data_ptr()
        self._run(request)
        self._logits = logits
        return logits

    def decode_into(
        self, chosen: torch.Tensor, tokens: torch.Tensor, at_once: int, sampling: Sampling | None = None
    ) -> Iterator[int]:
        tokens, steps = self._checked(tokens), chosen.shape[1]
        calls.check_steps(tokens, steps, at_once)
        if chosen.dtype != torch.int64 or chosen.shape[0] != tokens.shape[0] or not chosen.is_contiguous():
            raise ValueError(
                f"decode_into fills a contiguous int64 [{tokens.shape[0]}, steps] tensor, not {named(chosen)}."
            )
        if self._decoded is None:
            self._decoded = torch.empty(tokens.shape[0], self._program.vocabulary)
        request = _request(tokens, sampling or Sampling())
        request.logits, request.stride, request.chosen = self._decoded.data_ptr(), steps, chosen.data_ptr()
        for left in range(steps, 0, -at_once):
            request.steps = min(at_once, left)
            self._run(request)
            self._logits = self._decoded
            yield request.steps
            request.tokens = None  # goes on from those that it chose
            request.chosen += request.steps * 8

    def advance(self, parts: Sequence[Part]) -> list[int]:
        """One pass over tokens of several sequences: the most likely next tokens where they are wanted, in that order.

        A sequence goes on from its part's position, whatever it had behind it: its tokens before are those that it was
        given last. `logits` are then those of the wanted tokens, [wanted, vocabulary], until the next call. Each is
        what it would be without the other sequences. `length` does not follow. Raises what `extend` does.
        """
        if self._cache is None:
            raise calls.no_cache()
        tokens, sequence, position, wanted = array("q"), array("q"), array("q"), array("b")
        for part in parts:
            count, end = len(part.tokens), part.position + len(part.tokens)
            if self._cache.is_paged:
                self._cache.grow(part.sequence, min(end, self._cache.stored))
            tokens.extend(part.tokens)
            sequence.extend([part.sequence] * count)
            position.extend(range(part.position, end))
            wanted.extend([0] * (count - part.wanted) + [1] * part.wanted)
        asked = sum(wanted)
        chosen = array("q", bytes(8 * asked))
        if self._row_logits.shape[0] < asked:
            self._row_logits = torch.empty(asked, self._program.vocabulary)
        lists = (each.buffer_info()[0] for each in (tokens, sequence, position, wanted, chosen))
        request = interface.RowsC(len(tokens), *lists, self._row_logits.data_ptr())
        self._call(self._library.optigpu_decoder_advance, self.handle, ctypes.byref(request))
        self._logits = self._row_logits[:asked]
        return chosen.tolist()

    def leave(self, sequence: int) -> None:
        """Gives the pages of a sequence of a paged cache back."""
        if self._cache is None:
            raise calls.no_cache()
        self._cache.release(sequence)

    def _checked(self, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens, contiguous, once they fit the cache. The caller keeps them until its request has run."""
        if self._cache is None:
            raise calls.no_cache()
        if tokens.dtype != torch.int64 or tokens.dim() != 2 or tokens.shape[0] != self._cache.sequences:
            raise calls.wrong_tokens(tokens, self._cache.sequences)
        return tokens.contiguous()

    def _run(self, request: interface.RequestC) -> None:
        self._call(self._library.optigpu_decoder_run, self.handle, ctypes.byref(request))


def best_instruction_set() -> CpuInstructions:
    """The fastest that this CPU has. Raises UnsupportedError where the operator cannot be built."""
    best = interface.decoder_library().optigpu_decoder_best_instruction_set()
    return next(name for name, number in INSTRUCTION_SETS.items() if number == best)


def _request(tokens: torch.Tensor, sampling: Sampling) -> interface.RequestC:
    """For contiguous tokens [sequences, count]; has no room yet for what comes out."""
    return interface.RequestC(
        tokens=tokens.data_ptr(),
        count=tokens.shape[1],
        temperature=sampling.temperature,
        seed=sampling.seed % 2**64,
    )


def _destroy(library: ctypes.CDLL, handle: ctypes.c_void_p, described: interface.DescribedProgram) -> None:
    """Ends the threads; `described` is kept until then, because they read it."""
    library.optigpu_decoder_destroy(handle)
    del described
