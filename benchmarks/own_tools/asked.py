"""The command line and the answers of an engine's own tool."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.peers.arguments import answer, refusing
from optigpu.backends import BACKENDS
from optigpu.backends.base import Order
from optigpu.cli.options import validated
from optigpu.hardware import probe
from optigpu.job.plan import variants_of
from optigpu.models.facts import facts_of
from optigpu.models.reference import parse_reference
from optigpu.vocabulary import UnsupportedError

WARM_UP = 2
Rate = Callable[[Sequence[int], int], float]
"""tokens/s of greedy decoding, after the first of so many tokens that follow a prompt."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that every tool has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--model", default="preset:gpt2")
    made.add_argument("--backend", choices=tuple(BACKENDS), required=True)
    made.add_argument("--stack", type=json.loads, default=[], help="techniques as a job names them, as JSON")
    made.add_argument("--prompt-tokens", type=int, default=32)
    made.add_argument("--new-tokens", type=int, default=64)
    made.add_argument("--threads", type=int, required=True)
    return made


def serve(load: Callable[[Order], Rate], options: argparse.Namespace) -> None:
    """Loads the model, warms up and answers each line with the tokens/s of one more request, or says why it cannot."""
    with refusing():
        with redirect_stdout(sys.stderr), TemporaryDirectory() as folder:
            order = order_of(options, Path(folder))
            rate = load(order)
            prompt = prompt_of(order, options.prompt_tokens)
            for _ in range(WARM_UP):
                rate(prompt, options.new_tokens)
        answer(lambda: rate(prompt, options.new_tokens), 0, {})


def order_of(options: argparse.Namespace, folder: Path) -> Order:
    """What the variant's process is ordered to prepare. Raises UnsupportedError where the engine is missing."""
    lengths = {"prompt_tokens": options.prompt_tokens, "new_tokens": options.new_tokens}
    spec = validated(
        {
            "workload": {"kind": "generate", **lengths},
            "model": options.model,
            "backend": options.backend,
            "stack": options.stack,
            "device": "cpu",
        }
    )
    (variant,) = variants_of(spec)
    environment = probe()
    missing = BACKENDS[variant.backend].missing(environment)
    if missing:
        raise UnsupportedError(missing)
    return Order(
        model=variant.model,
        stack=variant.stack,
        workload=variant.workload,
        device=variant.device,
        seed=spec.seed,
        threads=options.threads,
        folder=folder,
        environment=environment,
    )


def prompt_of(order: Order, count: int) -> list[int]:
    """Random ids, always the same."""
    facts = facts_of(parse_reference(str(order.model)))
    assert facts is not None, "presets and bundled models have known shapes"
    ids: list[int] = np.random.default_rng(order.seed).integers(facts.vocabulary, size=count).tolist()
    return ids


def found(path: Path | None) -> Path:
    """A converted model that is kept. Raises UnsupportedError where there is none: a tool times what a job has run."""
    if path is None:
        raise UnsupportedError(
            "There is no converted model to measure; run python -m benchmarks.engines --convert."
        )
    return path


def silent(_: str) -> None:
    """Tells nobody what is being done."""
