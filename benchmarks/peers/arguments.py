"""The command line and the answers of every peer's process."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from optigpu.vocabulary import OptiGPUError

MEASURES = ("decode", "prefill", "logits")
"""What a request is: tokens/s after the first token, tokens/s of the prompt, or a file of logits."""


class Loop(Protocol):
    """One way to run a model, ready to be asked."""

    vocabulary: int
    weight_bytes: int
    details: dict[str, Any]

    def decode_rate(self, prompt: Sequence[int], new_tokens: int) -> float:
        """tokens/s of greedy decoding, after the first of `new_tokens`."""

    def prefill_rate(self, prompt: Sequence[int]) -> float:
        """Tokens of the prompt by the seconds until the first new token is chosen."""

    def score(self, tokens: Sequence[int], prefill: int) -> Iterator[NDArray[np.float32]]:
        """Logits [vocabulary] after each of `tokens` from index `prefill` on, forced through single decode steps.

        The first `prefill` (1 and more) are a prompt.
        """


def parse(description: str | None, weights: Sequence[str]) -> argparse.Namespace:
    """The command line of a peer that knows these kinds of weights."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default="preset:gpt2", help="a preset's weights are drawn from the seed")
    parser.add_argument("--weights", default=weights[0], choices=weights)
    parser.add_argument("--measure", default="decode", choices=MEASURES)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=Path, help="of --measure logits: a .npy of ids [sequences, length]")
    parser.add_argument("--prefill", type=int, default=1, help="of --measure logits: leading tokens at once")
    parser.add_argument("--logits", type=Path, help="of --measure logits: the .npy to write")
    options = parser.parse_args()
    if options.measure == "logits" and not (options.tokens and options.logits):
        parser.error("--measure logits needs --tokens and --logits")
    scored = np.load(options.tokens).shape[1] if options.measure == "logits" else 0
    options.length = max(options.prompt_tokens + options.new_tokens, scored)
    return options


def serve(make: Callable[[argparse.Namespace], Loop], options: argparse.Namespace) -> None:
    """Makes the loop, warms it up and answers, or answers with the reason why it cannot be made."""
    with refusing():
        with redirect_stdout(sys.stderr):
            loop = make(options)
        request = _request(loop, options)
        for _ in range(0 if options.measure == "logits" else options.warm_up):
            request()
        answer(request, loop.weight_bytes, loop.details)


@contextmanager
def refusing() -> Iterator[None]:
    """An OptiGPUError within becomes the reason that is answered."""
    try:
        yield
    except OptiGPUError as error:
        print(json.dumps({"reason": str(error)}), flush=True)


def answer(request: Callable[[], float], weight_bytes: int, details: dict[str, Any]) -> None:
    """Says that it is ready, and answers each line with the tokens/s of one more request."""
    print(json.dumps({"weight_bytes": weight_bytes, "details": details}), flush=True)
    for _ in sys.stdin:
        print(request(), flush=True)


def write_logits(
    score: Callable[[Sequence[int]], Iterator[NDArray[np.float32]]], tokens: Path, logits: Path
) -> float:
    """What `score` gives for each sequence of the file `tokens`, as float32 [sequences, positions, vocabulary].

    Returns tokens/s.
    """
    sequences = np.load(tokens)
    started = time.perf_counter()
    found = np.stack([np.stack(list(score(sequence.tolist()))) for sequence in sequences])
    seconds = time.perf_counter() - started
    np.save(logits, found)
    return float(sequences.size / seconds)


def _request(loop: Loop, options: argparse.Namespace) -> Callable[[], float]:
    prompt = (
        np.random.default_rng(options.seed).integers(loop.vocabulary, size=options.prompt_tokens).tolist()
    )
    requests: dict[str, Callable[[], float]] = {
        "decode": lambda: loop.decode_rate(prompt, options.new_tokens),
        "prefill": lambda: loop.prefill_rate(prompt),
        "logits": lambda: write_logits(
            lambda tokens: loop.score(tokens, options.prefill), options.tokens, options.logits
        ),
    }
    return requests[options.measure]
