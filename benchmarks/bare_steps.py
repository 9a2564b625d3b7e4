"""`python -m benchmarks.bare_steps`: bare decode steps of native_decode, in a process that answers as peers do.

It packs a model with calibration "none", says what a step reads and computes, and then answers each line with the
tokens/s of some more steps of one sequence: the operator's own loop, without the engine's clock.
"""

import argparse
import sys
import time
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from benchmarks.peers.arguments import answer, refusing
from benchmarks.thread_costs import StepWork
from benchmarks.thread_nodes import shares_at_home
from optigpu.documents.shapes import ModelFacts
from optigpu.models.facts import facts_of
from optigpu.models.loading.footprint import footprint_of, weight_bytes
from optigpu.models.loading.load import load_model
from optigpu.models.reference import parse_reference
from optigpu.ops.decode.cpu.decoder import CpuDecoder
from optigpu.ops.decode.program import Program
from optigpu.roofline.work import decode_step
from optigpu.techniques.base import Notes
from optigpu.techniques.decoding.native_decode import NativeDecode
from optigpu.techniques.decoding.native_decode.decoders import new_decoder
from optigpu.techniques.decoding.native_decode.programs import attached
from optigpu.workloads.requests.shapes import DecodeShape

PROMPT = 16
WARM_UP = 2
"""Requests before the first that counts."""


def meets_of(program: Program) -> int:
    """How often the threads meet in a call of one step: engine.h's `meet`, and the end of a call in team.h.

    Six times in a block; after the embeddings, before and after the head, at the end of the pass, after the choice of
    the token, and when all have ended; and once more for finer rows of the head.
    """
    return 6 * len(program.blocks) + 6 + (program.head.finer is not None)


def made(reference: str, new_tokens: int) -> tuple[CpuDecoder, int, dict[str, Any]]:
    """The decoder, the bytes of the weights, and what a step does."""
    parsed = parse_reference(reference)
    facts = facts_of(parsed)
    assert isinstance(facts, ModelFacts)
    model = load_model(parsed, device="cpu", dtype="float32")
    notes = Notes()
    NativeDecode(calibration="none").modules(model, notes)
    program = attached(model)
    shape = DecodeShape(PROMPT, new_tokens, 1, 1.0)
    work = decode_step(shape, footprint_of(model, facts), "bfloat16", cached=True)
    step = StepWork(work.bytes, work.flops, meets_of(program))
    decoder = new_decoder(program, "bf16")
    assert isinstance(decoder, CpuDecoder)
    details = {
        "step": asdict(step),
        "operator": notes.facts["decode_operator"],
        "placement": None if decoder.placement is None else asdict(decoder.placement),
        "shares_at_home": shares_at_home(program),
    }
    return decoder, weight_bytes(model), details


def stepped(decoder: CpuDecoder, new_tokens: int) -> float:
    """tokens/s after the first token."""
    decoder.begin(1, PROMPT + new_tokens)
    first = decoder.extend(torch.ones(1, PROMPT, dtype=torch.int64)).argmax(1, keepdim=True)
    others = torch.empty(1, new_tokens - 1, dtype=torch.int64)
    began = time.perf_counter()
    for _ in decoder.decode_into(others, first, 1):
        pass
    return (new_tokens - 1) / (time.perf_counter() - began)


def main() -> None:
    """Loads, warms up, and measures as often as it is asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with refusing():
        with redirect_stdout(sys.stderr):
            decoder, weights, details = made(options.model, options.new_tokens)
        request = partial(stepped, decoder, options.new_tokens)
        for _ in range(WARM_UP):
            request()
        answer(request, weights, details)


if __name__ == "__main__":
    main()
