"""`python -m benchmarks.stack_logits`: a stack's predictions of given tokens, in the format of the peers.

Each token is forced through the decode step that a job would time. With --sample the tokens are first drawn from the
model itself, and predicted by passes over whole sequences: what all others are compared with.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.arguments import answer, refusing, write_logits
from optigpu.backends import BACKENDS
from optigpu.backends.runtime import ReferenceRuntime
from optigpu.child.messages import Assignment
from optigpu.child.replicate import order_of, refusal
from optigpu.cli.options import validated
from optigpu.documents.facts import RunFacts
from optigpu.hardware import probe
from optigpu.job.plan import variants_of
from optigpu.vocabulary import UnsupportedError


def main() -> None:
    """Loads the model with the stack, then answers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stack_logits", description=__doc__)
    parser.add_argument("--model", default="bundled:tiny")
    parser.add_argument("--backend", default="torch", choices=tuple(BACKENDS))
    parser.add_argument(
        "--stack", type=json.loads, default=[], help="techniques as a job names them, as JSON"
    )
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--tokens", type=Path, required=True, help="a .npy of ids [sequences, length]")
    parser.add_argument("--prefill", type=int, default=1, help="leading tokens that go at once")
    parser.add_argument("--logits", type=Path, required=True, help="the .npy to write")
    parser.add_argument(
        "--whole",
        action="store_true",
        help="predict by passes of transformers' own layers over whole sequences",
    )
    parser.add_argument("--sample", type=int, nargs=2, metavar=("SEQUENCES", "LENGTH"))
    options = parser.parse_args()
    with refusing():
        runtime = _runtime(options)
        if options.sample:
            np.save(options.tokens, runtime.sample(*options.sample))
        predict = runtime.whole if options.sample or options.whole else runtime.score

        def score(tokens: Sequence[int]) -> Iterator[NDArray[np.float32]]:
            for logits in predict(np.array([tokens], np.int64), options.prefill):
                yield logits[0]

        weights = runtime.weights()
        assert weights is not None
        answer(
            lambda: write_logits(score, options.tokens, options.logits),
            int(weights.bytes or 0),
            RunFacts.gathered(runtime.notes.facts).model_dump(mode="json"),
        )


def _runtime(options: argparse.Namespace) -> ReferenceRuntime:
    """As a job's process makes it. Raises OptiGPUError for a stack that this machine or the model cannot have."""
    spec = validated(
        {
            "workload": {"kind": "generate"},
            "model": options.model,
            "backend": options.backend,
            "stack": options.stack,
            "device": "cpu",
        }
    )
    (variant,) = variants_of(spec)
    assignment = Assignment(
        variant=variant,
        environment=probe(),
        measure=spec.measure,
        seed=spec.seed,
        replicate=0,
        folder=str(options.tokens.parent),
        threads=options.threads,
    )
    reason = refusal(assignment)
    if reason:
        raise UnsupportedError(reason)
    backend = BACKENDS[variant.backend]
    backend.use_threads(options.threads)
    return cast(ReferenceRuntime, backend.prepare(order_of(assignment), lambda _: None))


if __name__ == "__main__":
    main()
