"""A model in CTranslate2, as what workloads and meters ask of."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from pathlib import Path

from optigpu.backends.base import Order
from optigpu.backends.converted import Converter, weights_of, whole
from optigpu.backends.converter_program import model_arguments
from optigpu.backends.ctranslate2 import PACKAGE, convert
from optigpu.backends.ctranslate2.contents import Contents, contents_of
from optigpu.backends.ctranslate2.generator import Generator, Rows, logits_at
from optigpu.backends.runtime import Generation, Ids, Logits, MemoryPeaks, Profile
from optigpu.documents.facts import WeightFacts
from optigpu.documents.shapes import Footprint
from optigpu.models.described import decoder_facts
from optigpu.models.reference import parse_reference
from optigpu.techniques.base import Notes, engine_options
from optigpu.vocabulary import OptiGPUError, UnsupportedError

ENGINE = "CTranslate2"
NOT_SAID = "CTranslate2 does not say which kernels of attention run."
ON_CPU = "CTranslate2 runs on the CPU here, which has no memory of an accelerator."
CONVERTER = Converter(
    engine="ctranslate2",
    program=convert.__name__,
    suffix=".ctranslate2",
    sources=tuple(Path(__file__).with_name(f"{name}.py") for name in ("convert", "families", "written")),
    libraries=("torch", "transformers", PACKAGE),
)


class Ctranslate2Runtime:
    """A DecodingRuntime. Logits come from the step that is timed, with given tokens in the place of chosen ones."""

    def __init__(self, order: Order, progress: Callable[[str], None]) -> None:
        """Raises UnsupportedError for a model without a converter, OptiGPUError when writing fails."""
        self.device, self.seed = order.device, order.seed
        self.facts = decoder_facts(parse_reference(str(order.model)))
        self.decoded: tuple[int, int] | None = None
        kind = engine_options(order.stack).weights
        path = CONVERTER.made(order, kind, (*model_arguments(order), "--type", kind), progress)
        progress("loading")
        with whole(path, ENGINE):
            self._contents = contents_of(path)
            self._generator = Generator(path, kind, order.threads)
            parameters = int((path / convert.PARAMETERS).read_text("ascii"))
        packed = self._contents.packed
        own = {
            "bytes": self._contents.bytes,
            "parameters": parameters,
            "quantized": packed / parameters if packed else None,
        }
        self._weights = weights_of(order).model_copy(update=own)
        self._names = [str(number) for number in range(self.facts.vocabulary)]
        self.notes = _notes(order, self._generator, self._contents)

    def generate(self, prompt: Ids, new_tokens: int) -> Generation:
        """Greedy decoding; the first of the gaps is that of the prompt's pass."""
        rows, length = prompt.shape[0], prompt.shape[1] + new_tokens
        self._admit(rows, length, length)
        found = self._generator.decode(self._named(prompt), new_tokens)
        return Generation(found.tokens, found.gaps_s)

    def logits(self, tokens: Ids) -> Logits:
        """The last token goes through the step that is timed."""
        return next(self.score(tokens, tokens.shape[1] - 1))

    def score(self, tokens: Ids, prefill: int) -> Iterator[Logits]:
        """All tokens go through the step that is timed, those of the prompt as well; all logits are made first."""
        rows, length = tokens.shape
        self._admit(rows, length, length + 1)  # the last token predicts one more
        views = self._generator.forced(self._named(tokens))
        for position in range(prefill, tokens.shape[1]):
            yield logits_at(views, position)

    def scoring_s(self, tokens: Ids, prefill: int) -> float:
        """Without the copies of the logits."""
        rows, length = tokens.shape
        self._admit(rows, length, length + 1)
        named = self._named(tokens)
        started = time.perf_counter_ns()
        self._generator.forced(named)
        return (time.perf_counter_ns() - started) / 1e9

    def weights(self) -> WeightFacts:
        """The bytes of the variables; the hash is that of the weights that they were converted from."""
        return self._weights

    def footprint(self) -> Footprint:
        """What a step reads."""
        contents = self._contents
        products = _products(self._generator.kind)
        return Footprint(self.facts, contents.streamed_bytes, contents.row_bytes, products)

    def peak_memory(self, run: Callable[[], object]) -> MemoryPeaks:
        """There is no accelerator; the host's memory is the meter's own affair."""
        return MemoryPeaks(reasons=dict.fromkeys(("peak_bytes", "peak_reserved_bytes"), ON_CPU))

    def profile(self, run: Callable[[], object], steps: int, trace: Path) -> Profile:
        """CTranslate2 prints a profile in builds that are made for it alone."""
        raise UnsupportedError("CTranslate2 has no profiler here; leave the meter profile out.")

    def annotate(self, name: str) -> AbstractContextManager[None]:
        """Nobody watches a CPU from outside."""
        return nullcontext()

    def observe(self, prompt: Ids) -> None:
        """CTranslate2 does not name the kernels that it runs."""

    def _named(self, tokens: Ids) -> Rows:
        return [[self._names[number] for number in row] for row in tokens.tolist()]

    def _admit(self, rows: int, length: int, decoded: int) -> None:
        """Remembers what is `decoded`. Raises OptiGPUError for sequences that are longer than the model's context."""
        if length > self.facts.longest:
            raise OptiGPUError(
                f"The model's context is {self.facts.longest} tokens, and {length} do not fit; ask for fewer tokens."
            )
        if self.decoded is None or self.decoded[0] != rows or self.decoded[1] < decoded:
            self.decoded = (rows, decoded)


def _products(kind: str) -> tuple[str, ...]:
    """What is multiplied besides float32, by CTranslate2's name of a type: "int8_float32"."""
    return ("int8",) if kind.startswith("int8") else ()


def _notes(order: Order, generator: Generator, contents: Contents) -> Notes:
    notes = Notes()
    notes.record(
        dtype="float32",
        kv_cache=ENGINE,
        kv_cache_dtype="float32",
        decode_loop=ENGINE,
        decode_operator="Generator.generate_batch",
        threads=order.threads,
        versions={PACKAGE: version(PACKAGE)},
        reasons=dict.fromkeys(("attn_implementation", "attention_kernels"), NOT_SAID),
        ctranslate2_type=generator.kind,
        ctranslate2_tensor_types=contents.types,
        ctranslate2_flags=generator.flags,
    )
    return notes
