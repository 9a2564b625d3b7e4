"""Decoding of prompts, prefill and decode timed apart: the request of each workload that generates text."""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

import numpy as np

from optigpu.backends.runtime import (
    DecodingRuntime,
    Generation,
    Ids,
    Logits,
    ReferenceRuntime,
    RemoteRuntime,
)
from optigpu.documents.shapes import ModelFacts
from optigpu.vocabulary import UnsupportedError
from optigpu.workloads.base import Check
from optigpu.workloads.requests.agreement import checked_places, count_near, is_agreement
from optigpu.workloads.requests.untouched import Untouched

METRICS = ("ttft_s", "tpot_s", "tokens_per_s", "latency_s", "requests_per_s")
"""The metrics of a decoding request."""


Decode = Callable[[Ids, int], Generation]
"""What decodes so many tokens after a prompt [batch, prompt_tokens], timed."""


class DecodingRequest:
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
        have changed either.
        """
        self._runtime = runtime
        source = np.random.default_rng(runtime.seed if seed is None else seed)
        self._prompt = drawn_ids(source, runtime.facts, shape) if prompt is None else prompt
        self._untouched = Untouched(self._prompt, earlier)
        self._new_tokens = new_tokens
        self._metrics = tuple(metrics)
        self._decode = decode
        self._gaps_s: list[float] = []

    def run(self) -> Mapping[str, float]:
        """One timed request; the first token counts as prefill, the others as decode."""
        gaps_s = self._generated().gaps_s
        self._gaps_s = gaps_s
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

    def check(self) -> Check:
        """Counts the tokens, looks at logits for NaN and infinity, and has the tokens predicted again."""
        return self.checked(self._generated())

    def checked(self, generation: Generation) -> Check:
        """The check of one request's output."""
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
        if "logits_not_given" in how or self._decode or is_agreement(agreed, compared):
            return None, how
        return (
            f"Of {compared} tokens that were decoded, {compared - agreed} are not what the engine predicts after the "
            "same tokens.",
            how,
        )

    def _logits(self, tokens: Ids, first: int) -> tuple[Iterator[Logits], dict[str, object]]:
        """Logits after each of `tokens` from `first` on, through the timed step. If the timed loop gives none, the
        model's own, and a note that says so.

        Of a server that gives none there are none.
        """
        try:
            predicted = self._runtime.score(tokens, first)
            # Some engines refuse with the first of them.
            return chain([next(predicted)], predicted), {}
        except UnsupportedError as error:
            if isinstance(self._runtime, RemoteRuntime):
                return iter(()), {"logits_not_given": str(error)}
            if not isinstance(self._runtime, ReferenceRuntime):
                raise
            return self._runtime.whole(tokens, first), {"logits_not_of_the_timed_loop": str(error)}

    def observe(self) -> None:
        """Records which kernels run."""
        self._runtime.observe(self._prompt)

    def described(self) -> Mapping[str, Sequence[float]]:
        """The time of each token after the first; where tokens come together, that of each pass that gave some."""
        gaps_s = self._gaps_s[1:]
        passes_s = [gap for gap in gaps_s if gap > 0]
        return {"token_s": gaps_s} if len(passes_s) == len(gaps_s) else {"pass_s": passes_s}

    def fresh(self, seed: int) -> "DecodingRequest":
        """Prompts of the same length."""
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
