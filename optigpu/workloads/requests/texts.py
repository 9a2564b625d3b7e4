"""Decoding of a text: the request of a workload whose prompt is one."""

import numpy as np

from optigpu.backends.runtime import DecodingRuntime, Generation, TextRuntime
from optigpu.vocabulary import UnsupportedError
from optigpu.workloads.base import Check
from optigpu.workloads.requests.decoding import Decode, DecodingRequest, exceeds_context

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
        """Keeps the text of the first sequence for a reader; `fresh` goes on from random tokens of the same length."""
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
