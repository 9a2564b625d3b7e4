"""The requests that several workloads share; the workloads do not import each other. Decoding of prompts, prefill and
decode timed apart; and operators by themselves: equal calls, as many to a sample as the clock needs, of arrays that fit
the memory."""

import hashlib
import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from optigpu.backends.operators import OperatorRuntime, TimedOperator, Wide
from optigpu.backends.runtime import (
    DecodingRuntime,
    Generation,
    Ids,
    Images,
    Logits,
    Pass,
    PassRuntime,
    ReferenceRuntime,
    RemoteRuntime,
    TextRuntime,
    UnlikeWholeError,
)
from optigpu.documents.facts import ModelFacts
from optigpu.vocabulary import Task, UnsupportedError
from optigpu.workloads.base import Check, Request, Workload


class Untouched:
    """An array as it was when this was made. It may share its memory with what the engine computes on."""

    def __init__(self, array: NDArray[np.generic], earlier: "Untouched | None" = None) -> None:
        """`earlier` is that of the request with the timed inputs, where this one's are fresh: both are looked at."""
        self._array, self._before, self._earlier = array, _digest(array), earlier

    @property
    def problem(self) -> str | None:
        """A sentence where its numbers are others by now."""
        if _digest(self._array) == self._before:
            return self._earlier.problem if self._earlier else None
        return "The request changed its own inputs, so that what was timed is not what was asked for."


def _digest(array: NDArray[np.generic]) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(array).data, digest_size=16).digest()


METRICS = ("ttft_s", "tpot_s", "tokens_per_s", "latency_s", "requests_per_s")
"""The metrics of a decoding request."""
PER_TOKEN = ("tpot_s", "tokens_per_s")
LOOK_TOKENS = 8
"""A rough look decodes so many tokens; PER_TOKEN are the metrics that it shows."""


Decode = Callable[[Ids, int], Generation]
"""What decodes so many tokens after a prompt [batch, prompt_tokens], timed."""


class DecodingRequest(Request):
    """The same prompts, decoded repeatedly."""

    def __init__(
        self,
        runtime: DecodingRuntime,
        shape: tuple[int, int],
        new_tokens: int,
        metrics: Sequence[str] = METRICS,
        seed: int | None = None,
        prompt: Ids | None = None,
        decode: Decode | None = None,
        earlier: Untouched | None = None,
    ) -> None:
        """Prompts of `shape` [batch, prompt_tokens] are drawn from `seed`, or from the runtime's own without one.
        `prompt`, of that shape, takes their place. `metrics` names those of METRICS that a request yields. `decode`
        None is the runtime's `generate`, which takes the most likely tokens. `earlier` are inputs that no request may
        have changed either."""
        self._runtime = runtime
        source = np.random.default_rng(runtime.seed if seed is None else seed)
        self._prompt = drawn_ids(source, runtime.facts, shape) if prompt is None else prompt
        self._untouched = Untouched(self._prompt, earlier)
        self._new_tokens = new_tokens
        self._metrics = tuple(metrics)
        self._decode = decode
        self._last: Generation | None = None

    def run(self) -> Mapping[str, float]:
        self._last = self._generated()
        gaps_s = self._last.gaps_s
        batch = self._prompt.shape[0]
        decode_s = sum(gaps_s[1:])
        latency_s = gaps_s[0] + decode_s
        found = {
            "ttft_s": gaps_s[0],
            "tpot_s": decode_s / (self._new_tokens - 1),
            "tokens_per_s": (self._new_tokens - 1) * batch / decode_s,
            "latency_s": latency_s,
            "requests_per_s": batch / latency_s,
        }
        return {name: found[name] for name in self._metrics}

    def look(self) -> Mapping[str, Sequence[float]]:
        """LOOK_TOKENS in the middle of the text, where a step takes as long as the mean step of a request."""
        shown = [name for name in PER_TOKEN if name in self._metrics]
        if self._new_tokens <= 2 * LOOK_TOKENS or not shown:
            return super().look()
        more = (len(self._prompt), (self._new_tokens - LOOK_TOKENS) // 2)
        drawn = drawn_ids(np.random.default_rng(self._runtime.seed), self._runtime.facts, more)
        prompt = np.concatenate([self._prompt, drawn], axis=1)
        short = DecodingRequest(
            self._runtime, prompt.shape, LOOK_TOKENS, shown, prompt=prompt, decode=self._decode
        )
        whole, steps_s = short.run(), short.described().get("token_s", ())
        rates = {"tpot_s": tuple(steps_s), "tokens_per_s": tuple(len(prompt) / step for step in steps_s)}
        return {name: rates[name] or (whole[name],) for name in shown}

    def check(self) -> Check:
        return self.checked(self._last or self._generated())

    def checked(self, generation: Generation) -> Check:
        request_s = sum(generation.gaps_s)
        expected, shape = (self._prompt.shape[0], self._new_tokens), generation.tokens.shape
        if shape != expected:
            return Check(request_s, f"Decoding gave tokens of shape {shape} instead of {expected}.")
        if self._untouched.problem:
            return Check(request_s, self._untouched.problem)
        problem, how = self._predicted(generation.tokens, request_s)
        return Check(request_s, problem, how)

    def _generated(self) -> Generation:
        return (self._decode or self._runtime.generate)(self._prompt, self._new_tokens)

    def _predicted(self, tokens: Ids, request_s: float) -> tuple[str | None, dict[str, object]]:
        """What is wrong with the tokens by the engine's own logits, where somebody chose no other ones by chance."""
        prompt_tokens, count = self._prompt.shape[1], tokens.shape[1]
        begin, end = checked_places(prompt_tokens, prompt_tokens + count - 1, request_s, secrets.randbits(32))
        given = np.concatenate([self._prompt, tokens], axis=1)
        logits, how = self._logits(given[:, :end], begin)
        agreed, wrong = count_near(logits, given[:, begin + 1 : end + 1])
        compared = (end - begin) * len(tokens)
        if wrong:
            return f"{wrong} logits of {end - begin} steps are NaN or infinite.", how
        if _INCOMPARABLE & how.keys() or self._decode or is_agreement(agreed, compared):
            return None, how
        return (
            f"Of {compared} tokens that were decoded, {compared - agreed} are not what the engine predicts after the "
            "same tokens.",
            how,
        )

    def _logits(self, tokens: Ids, first: int) -> tuple[Iterator[Logits], dict[str, object]]:
        """Logits after each of `tokens` from `first` on, through the timed step. If the timed loop gives none, the
        model's own, and a note that says so; none of a server that gives none."""
        try:
            predicted = self._runtime.score(tokens, first)
            # Some engines refuse with the first of them.
            return chain([next(predicted)], predicted), {}
        except UnsupportedError as error:
            if isinstance(self._runtime, RemoteRuntime):
                return iter(()), {"logits_not_given": str(error)}
            if not isinstance(self._runtime, ReferenceRuntime):
                raise
            unlike = isinstance(error, UnlikeWholeError)
            note = "logits_not_compared" if unlike else "logits_not_of_the_timed_loop"
            return self._runtime.whole(tokens, first), {note: str(error)}

    def observe(self) -> None:
        self._runtime.observe(self._prompt)

    def described(self) -> Mapping[str, Sequence[float]]:
        gaps_s = self._last.gaps_s[1:] if self._last else []
        passes_s = [gap for gap in gaps_s if gap > 0]
        return {"token_s": gaps_s} if len(passes_s) == len(gaps_s) else {"pass_s": passes_s}

    def fresh(self, seed: int) -> "DecodingRequest":
        batch, length = self._prompt.shape
        shape, decode, earlier = (batch, length), self._decode, self._untouched
        return DecodingRequest(
            self._runtime, shape, self._new_tokens, self._metrics, seed, decode=decode, earlier=earlier
        )


def drawn_ids(source: np.random.Generator, model: ModelFacts, shape: tuple[int, int]) -> Ids:
    """Random token ids of the model, of `shape` [batch, length]."""
    return source.integers(model.vocabulary, size=shape, dtype=np.int64)


def exceeds_context(model: ModelFacts, tokens: int, fields: str) -> str | None:
    """Why so many tokens do not fit the model's context, or None; `fields` names what they are the sum of."""
    if tokens <= model.longest:
        return None
    return f"{fields} = {tokens} exceeds the model's context of {model.longest} tokens; ask for fewer."


_INCOMPARABLE = {"logits_not_given", "logits_not_compared"}
"""Notes of a check that has no logits to compare tokens with."""
TOLERANCE = 0.1
"""A token may be less likely than the best one by this share of the standard deviation of the logits: a batch rounds
other than a single sequence does."""
AGREEMENT = 0.95
"""Of the tokens, so many must be the most likely ones within that."""
CHECKED_S, FEWEST_CHECKED = 2.0, 8
"""A check predicts all tokens of a request again, or as many as take so long, from a place that nobody knows before."""


def is_agreement(agreed: int, compared: int) -> bool:
    return agreed >= AGREEMENT * compared


def checked_places(first: int, last: int, request_s: float, seed: int) -> tuple[int, int]:
    """The range of places [begin, end) of which a check predicts the tokens again: all from `first` to `last`, or some
    where a request takes long."""
    count = last - first
    affordable = max(FEWEST_CHECKED, math.floor(count * CHECKED_S / max(request_s, 1e-9)))
    if affordable >= count:
        return first, last
    begin = first + int(np.random.default_rng(seed).integers(count - affordable + 1))
    return begin, begin + affordable


def count_near(predicted: Iterator[Logits], tokens: NDArray[np.int64]) -> tuple[int, int]:
    """How many of `tokens` [batch, places] are the most likely ones, within TOLERANCE, by the logits [batch,
    vocabulary] that are predicted for each place, and how many are NaN or infinite of all logits."""
    agreed, wrong = 0, 0
    for place, logits in zip(tokens.T, predicted, strict=False):
        wrong += int((~np.isfinite(logits)).sum())
        if not wrong:
            behind = logits.max(axis=-1) - logits[np.arange(len(place)), place]
            agreed += int((behind <= TOLERANCE * logits.std(axis=-1)).sum())
    return agreed, wrong


MOST_TEXT = 10_000
"""The most characters of an output that a result keeps."""


class TextRequest(DecodingRequest):
    """The same text, continued repeatedly, as each sequence of a batch."""

    def __init__(
        self, runtime: TextRuntime, text: str, batch: int, new_tokens: int, decode: Decode | None
    ) -> None:
        """Raises UnsupportedError for a text that the tokenizer cannot read or that does not fit the context."""
        ids = runtime.prompt_ids(text)
        problem = exceeds_context(runtime.facts, len(ids) + new_tokens, "the prompt's tokens + new_tokens")
        if problem:
            raise UnsupportedError(problem)
        prompt = np.tile(np.array(ids, np.int64), (batch, 1))
        super().__init__(runtime, prompt.shape, new_tokens, prompt=prompt, decode=decode)
        self._texts = runtime
        runtime.notes.record(prompt_tokens=len(ids))

    def checked(self, generation: Generation) -> Check:
        found = super().checked(generation)
        (text,) = self._texts.text_of(generation.tokens[:1])
        return Check(found.request_s, found.problem, found.details | {"output_text": text[:MOST_TEXT]})


def text_runtime(runtime: DecodingRuntime) -> TextRuntime:
    """The runtime as one that reads text and draws tokens. Raises UnsupportedError for an engine that does not."""
    if not isinstance(runtime, TextRuntime):
        raise UnsupportedError(
            "This engine reads no text and draws no tokens; leave prompt, temperature and top_p out, or ask for the "
            "backend torch."
        )
    return runtime


class PassRequest(Request):
    """Repeated passes over the same inputs."""

    def __init__(
        self,
        runtime: PassRuntime,
        draw: Callable[[np.random.Generator], Ids | Images],
        expected: tuple[int, int],
        metrics: Callable[[float], Mapping[str, float]],
        seed: int | None = None,
        inputs: Ids | Images | None = None,
        earlier: Untouched | None = None,
    ) -> None:
        """`draw` makes inputs from `seed`, or from the runtime's own; `inputs` take their place. `expected` is the
        logits' shape, `metrics` follow from the seconds."""
        self._runtime, self._draw, self._expected, self._metrics = runtime, draw, expected, metrics
        source = np.random.default_rng(runtime.seed if seed is None else seed)
        self._inputs = draw(source) if inputs is None else inputs
        self._last: Pass | None = None
        self._untouched = Untouched(self._inputs, earlier)

    def run(self) -> Mapping[str, float]:
        self._last = None  # two outputs would count as the peak of one request
        self._last = self._runtime.forward(self._inputs)
        return self._metrics(self._last.seconds)

    def check(self) -> Check:
        done = self._last or self._runtime.forward(self._inputs)
        if self._untouched.problem:
            return Check(done.seconds, self._untouched.problem)
        if done.logits.shape != self._expected:
            why = f"The pass gave logits of shape {done.logits.shape} instead of {self._expected}."
            return Check(done.seconds, why)
        wrong = int((~np.isfinite(done.logits)).sum())
        if wrong:
            return Check(done.seconds, f"{wrong} of {done.logits.size} logits are NaN or infinite.")
        if not np.array_equal(done.chosen, done.logits.argmax(axis=-1)):
            why = "The pass chose another token or class than the one with the largest logit."
            return Check(done.seconds, why)
        return Check(done.seconds)

    def observe(self) -> None:
        self._runtime.observe(self._inputs)

    def fresh(self, seed: int) -> "PassRequest":
        earlier = self._untouched
        return PassRequest(self._runtime, self._draw, self._expected, self._metrics, seed, earlier=earlier)


Dtype = Literal["float32", "float16", "bfloat16"]
Implementation = Literal["standard", "fused"]

SAMPLE_S = 0.005
"""A sample is a batch of calls of at least this duration, so that reading the clock (under 1 us) is nothing."""
_LONG_CALL_SAMPLES = 20
"""If the first call takes this many times SAMPLE_S, one call is a sample, however much of it was start-up."""
CHECKED_ROWS = 16
"""The number of rows of a result that are compared with a float64 reference."""
FLOAT32_ROUNDOFF = 2.0**-24
"""Unit roundoff of float32, in which all operators sum."""
ROUNDING: dict[str, float] = {"float32": 2.0**-24, "tf32": 2.0**-11, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff of each dtype."""
DTYPE_UNDERFLOW: dict[str, float] = {"float32": 2.0**-150, "float16": 2.0**-25, "bfloat16": 2.0**-134}
"""The largest error of a subnormal number: half of the dtype's smallest number."""
WIDTHS: dict[str, int] = {"float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of an element."""


class Implemented(Workload):
    """A workload with the implementations "standard" (separate operators) and "fused" (one operator)."""

    task: ClassVar[Task] = Task.OPERATOR
    reference: ClassVar[str | None] = "standard"

    implementations: tuple[Implementation, ...] = Field(
        ("standard", "fused"), min_length=1, max_length=2, description="Which implementations to measure."
    )

    @property
    def implementation(self) -> Implementation:
        (implementation,) = self.implementations
        return implementation

    def identity(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude={"implementations"})


class Calls(Request):
    """One batch of equal calls."""

    def __init__(self, runtime: OperatorRuntime, operator: TimedOperator) -> None:
        """Calls the operator a few times to find out how many calls make a sample, and records it."""
        self._operator, self._count = operator, 1
        if self._sample_s() <= _LONG_CALL_SAMPLES * SAMPLE_S:
            self._count = max(1, math.ceil(SAMPLE_S / min(self._sample_s() for _ in range(3))))
        runtime.notes.record(calls_per_sample=self._count)

    def _sample_s(self) -> float:
        return self._operator.seconds(self._count)

    def run(self) -> Mapping[str, float]:
        return {"latency_s": self._sample_s() / self._count}

    def check(self) -> Check:
        return Check(self._sample_s())

    def observe(self) -> None:
        """Nothing is recorded beyond what was noted before."""

    def fresh(self, seed: int) -> Self:
        self._operator.redraw(seed)
        return self


class OperatorRequest(Calls, ABC):
    """Calls whose result is checked by itself."""

    noun: ClassVar[str]
    """The operator's name in an error."""
    rate: ClassVar[tuple[str, float]] = ("tflops", 1e12)
    """The metric of how much is done in a second, and how much is one of its unit."""

    def __init__(self, runtime: OperatorRuntime, operator: TimedOperator, amount: float) -> None:
        """`amount` is what a call does: operations, or bytes."""
        self._amount = amount
        super().__init__(runtime, operator)

    @abstractmethod
    def error_over_bound(self) -> float:
        """The largest error of a result over the worst that the dtype's rounding explains; NaN for a result of NaN."""

    def run(self) -> Mapping[str, float]:
        latency_s, (name, unit) = self._sample_s() / self._count, self.rate
        return {"latency_s": latency_s, name: self._amount / latency_s / unit}

    def check(self) -> Check:
        request_s = self._sample_s()
        with np.errstate(divide="ignore", invalid="ignore"):  # a wrong result may hold any number
            worst = self.error_over_bound()
        if not worst <= 1:
            off = f"an element is off by {worst:.3g} times the dtype's worst rounding"
            return Check(request_s, f"The {self.noun} is wrong: {off}.")
        return Check(request_s, details={"error_over_bound": worst})


def checked_rows(count: int) -> list[int]:
    """CHECKED_ROWS indices below `count`, evenly spread from the first to the last, without repetitions."""
    return sorted({int(place) for place in np.linspace(0, count - 1, CHECKED_ROWS)})


def largest(*errors: Wide) -> float:
    """The largest number of all arrays; NaN where there is one."""
    return float(np.max([np.max(each) for each in errors]))


def require_memory(runtime: OperatorRuntime, needed: int, what: str) -> None:
    """Raises UnsupportedError when `needed` bytes for `what` are more than the device has free."""
    free = runtime.free_bytes()
    if needed > free:
        raise UnsupportedError(
            f"{what} need {needed / 1e9:.1f} GB and this {runtime.device} has {free / 1e9:.1f} GB free; ask for a "
            "smaller size."
        )
