"""Runs one backend in the environment of its engine, for a test in another one.

It reads one JSON object: backend, model, prompts, new_tokens, and the tokens to score from index `prefill` on. It
prints one: the greedy tokens, the gaps, and the file of the logits.
"""

import json
import sys
from pathlib import Path
from typing import cast

import numpy as np

from optigpu.backends import BACKENDS
from optigpu.backends.base import Order
from optigpu.backends.runtime import DecodingRuntime
from optigpu.documents.facts import RunFacts
from optigpu.hardware import probe
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.generate import Generate


def main() -> None:
    asked = json.load(sys.stdin)
    prompts, scored = np.array(asked["prompts"]), np.array(asked["scored"])
    folder = Path(asked["folder"])
    rows, length = prompts.shape
    workload = Generate(prompt_tokens=length, new_tokens=asked["new_tokens"], batch_size=rows)
    backend = BACKENDS[asked["backend"]]
    backend.use_threads(1)
    order = Order(asked["model"], (), workload, DeviceKind.CPU, 0, 1, folder, probe())
    runtime = cast(DecodingRuntime, backend.prepare(order, lambda _: None))
    first = runtime.generate(prompts, asked["new_tokens"])
    again = runtime.generate(prompts, asked["new_tokens"])
    logits = np.stack(list(runtime.score(scored, asked["prefill"])), axis=1)
    from_nothing = np.stack(list(runtime.score(scored[:, :6], 0)), axis=1)
    np.savez(folder / "logits.npz", logits=logits, from_nothing=from_nothing, last=runtime.logits(scored))
    weights = runtime.weights()
    facts = RunFacts.gathered(runtime.notes.facts | {"weights": weights, "footprint": runtime.footprint()})
    answer = {
        "tokens": first.tokens.tolist(),
        "again": again.tokens.tolist(),
        "gaps_s": first.gaps_s,
        "facts": facts.model_dump(mode="json"),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
