"""What workloads and meters ask of a model in llama.cpp."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import llama_cpp
import numpy as np

from optigpu.backends.base import Order
from optigpu.backends.llama_cpp.file_types import FileType, file_type_of, product_dtypes_of
from optigpu.backends.llama_cpp.gguf_cache import gguf_of
from optigpu.backends.llama_cpp.gguf_contents import contents_of
from optigpu.backends.llama_cpp.gguf_families import written_family
from optigpu.backends.llama_cpp.model import Context, LlamaCppModel
from optigpu.backends.runtime import Generation, Ids, Logits, MemoryPeaks, Profile
from optigpu.documents.facts import WeightFacts
from optigpu.documents.shapes import Footprint, ModelFacts
from optigpu.models.bundled import BUNDLED
from optigpu.models.facts import facts_of
from optigpu.models.loading.weights import origin_of
from optigpu.models.reference import ModelReference, parse_reference
from optigpu.techniques.base import Notes
from optigpu.vocabulary import OptiGPUError, UnsupportedError

NOT_SAID = "llama.cpp does not say which kernels of attention run."
ON_CPU = "llama.cpp runs on the CPU here, which has no memory of an accelerator."


class LlamaCppRuntime:
    """A GGUF file, and one context for the sequences that are decoded together.

    The context is made by the first request, for its batch and its length, and made anew for a larger one.
    """

    def __init__(self, order: Order, progress: Callable[[str], None]) -> None:
        """Raises UnsupportedError for a model that cannot be written as GGUF, OptiGPUError when writing fails."""
        self.device, self.seed = order.device, order.seed
        self.notes = Notes()
        self.decoded: tuple[int, int] | None = None
        self._order = order
        self._reference = parse_reference(str(order.model))
        self.facts = _facts(self._reference)
        self._type = file_type_of(order.stack)
        path = gguf_of(self._reference, self._type, order.seed, order.threads, order.folder, progress)
        progress("loading")
        self._model = _loaded(path)
        self._contents = contents_of(path)
        self._context: Context | None = None
        self._record()

    def generate(self, prompt: Ids, new_tokens: int) -> Generation:
        """Greedy decoding; the first of the gaps is that of the prompt's pass."""
        rows, length = prompt.shape[0], prompt.shape[1] + new_tokens
        context = self._context_for(rows, length)
        self._remember(rows, length)
        tokens = np.empty((rows, new_tokens), np.int64)
        marks = [time.perf_counter_ns()]
        context.begin()
        inputs = prompt
        for step in range(new_tokens):
            inputs = tokens[:, step : step + 1] = context.forward(inputs).argmax(axis=1, keepdims=True)
            marks.append(time.perf_counter_ns())
        return Generation(tokens, [gap / 1e9 for gap in np.diff(marks).tolist()])

    def logits(self, tokens: Ids) -> Logits:
        """The last token goes through the step that is timed."""
        return next(self.score(tokens, tokens.shape[1] - 1))

    def score(self, tokens: Ids, prefill: int) -> Iterator[Logits]:
        """Token by token after a prompt of `prefill` tokens."""
        for logits in self._scored(tokens, prefill):
            yield logits.copy()

    def scoring_s(self, tokens: Ids, prefill: int) -> float:
        """Without the copies of the logits."""
        self._context_for(tokens.shape[0], tokens.shape[1])
        started = time.perf_counter_ns()
        for _ in self._scored(tokens, prefill):
            pass
        return (time.perf_counter_ns() - started) / 1e9

    def weights(self) -> WeightFacts:
        """The file's bytes; the hash is that of the weights that the file was written from, as for every backend."""
        source = BUNDLED.get(self._reference.name)
        name = str(source) if source else None
        origin = origin_of(self._reference, name, self.seed, self._order.folder)
        own = {"bytes": self._contents.file_bytes, "parameters": self._contents.parameters}
        return origin.model_copy(update=own)

    def footprint(self) -> Footprint:
        """A step reads every tensor in the type that it is stored in, and a row of the tables."""
        contents = self._contents
        return Footprint(
            self.facts, contents.streamed_bytes, contents.row_bytes, product_dtypes_of(self._type)
        )

    def peak_memory(self, run: Callable[[], object]) -> MemoryPeaks:
        """There is no accelerator; the host's memory is the meter's own affair."""
        return MemoryPeaks(reasons=dict.fromkeys(("peak_bytes", "peak_reserved_bytes"), ON_CPU))

    def profile(self, run: Callable[[], object], steps: int, trace: Path) -> Profile:
        """llama.cpp has no profiler that names its kernels."""
        raise UnsupportedError("llama.cpp has no profiler; leave the meter profile out.")

    def annotate(self, name: str) -> AbstractContextManager[None]:
        """Nobody watches a CPU from outside."""
        return nullcontext()

    def observe(self, prompt: Ids) -> None:
        """llama.cpp does not name the kernels that it runs."""

    def _scored(self, tokens: Ids, prefill: int) -> Iterator[Logits]:
        rows, length = tokens.shape
        context = self._context_for(rows, length)
        self._remember(rows, length + 1)  # the last token predicts one more
        context.begin()
        if prefill:
            context.forward(tokens[:, :prefill])
        for position in range(prefill, tokens.shape[1]):
            yield context.forward(tokens[:, position : position + 1])

    def _context_for(self, rows: int, length: int) -> Context:
        if length > self.facts.context:
            raise OptiGPUError(
                f"The model's context has {self.facts.context} tokens, and {length} tokens do not fit."
            )
        known = self._context
        if known is None or known.rows != rows or known.length < length:
            if known is not None:
                known.close()
                self._context = None
            exact = self._type is FileType.F32
            known = self._context = Context(self._model, rows, length, self._order.threads, exact)
        return known

    def _remember(self, rows: int, length: int) -> None:
        if self.decoded is None or self.decoded[0] != rows or self.decoded[1] < length:
            self.decoded = (rows, length)

    def _record(self) -> None:
        exact = self._type is FileType.F32
        facts = self.facts
        width = 4 if exact else 2
        self.notes.record(
            dtype="float16" if self._type is FileType.F16 else "float32",
            kv_cache="llama.cpp",
            kv_cache_dtype="float32" if exact else "float16",
            kv_cache_bytes_per_token=2 * facts.layers * facts.kv_heads * facts.head_size * width,
            decode_loop="llama.cpp",
            decode_operator="llama_decode",
            threads=self._order.threads,
            versions={"llama-cpp-python": llama_cpp.__version__},
            gguf_type=self._type.value,
            gguf_tensor_types=self._contents.types,
            reasons=dict.fromkeys(("attn_implementation", "attention_kernels"), NOT_SAID),
            llama_cpp_flags=llama_cpp.llama_print_system_info().decode().strip(" |"),
        )


def _facts(reference: ModelReference) -> ModelFacts:
    """Raises UnsupportedError for what is not written as GGUF here."""
    facts = facts_of(reference) if reference.kind in ("preset", "bundled") else None
    if facts is None:
        raise UnsupportedError(
            f"llama_cpp cannot run {reference}: only presets and bundled models are written as GGUF."
        )
    try:
        written_family(facts.family)
    except UnsupportedError as error:
        raise UnsupportedError(f"llama_cpp cannot run {reference}: {error}") from error
    return facts


def _loaded(path: Path) -> LlamaCppModel:
    """A file that cannot be loaded is damaged, and so is removed: the next process writes it anew."""
    try:
        return LlamaCppModel(path)
    except UnsupportedError as error:
        path.unlink(missing_ok=True)
        raise OptiGPUError(
            f"{error} The file was damaged and has been removed; run the job again."
        ) from error
