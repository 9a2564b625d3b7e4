"""Runs the INT8 model on LiteRT's reference kernels and on TFLite Micro: golden vectors, agreement, arena."""

import os
import re
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from numpy.typing import NDArray
from tflite_micro.python.tflite_micro import runtime

from .answers import Answers, RefusalError, Request

FIRST_ARENA = 2**18
PACKAGES = {"ai-edge-litert": "ai-edge-litert", "tflite-micro": "tflite_micro"}
_ALLOCATED = re.compile(r"Arena allocation total (\d+)")
_TOO_SMALL = re.compile(r"missing: \d+|[Rr]equested: \d+|[Ff]ailed to allocate|too small|[Ll]ow on memory")

Numbers = NDArray[np.int8]
Model = Callable[[Numbers], Numbers]
Pair = tuple[Numbers, Numbers]


def evaluate(request: Request, answers: Answers) -> Request:
    """Writes golden.bin and int8.npy (what the model answers to held-out inputs) into the request's folder. Raises
    RefusalError if the two interpreters do not agree, or the model needs more than `arena_limit` bytes."""
    folder, limit = Path(str(request["folder"])), int(str(request["arena_limit"]))
    model = (folder / "model.tflite").read_bytes()
    with np.load(folder / "held_out.npz", allow_pickle=False) as file:
        scaled = np.round(file["inputs"] / float(str(request["scale"]))) + int(str(request["zero_point"]))
    held_out: Numbers = np.clip(scaled, -128, 127).astype(np.int8)
    answers.doing("running TFLite Micro")
    arena, micro = _micro(model, limit)
    reference = _reference(model)
    answers.doing("comparing it with LiteRT's reference kernels")
    candidates = _candidates(held_out, int(str(request["golden"])), int(str(request["seed"])))
    pairs, left_out = _agreeing(micro, reference, candidates, int(str(request["golden"])))
    if len({output.tobytes() for _, output in pairs}) < 2:
        raise RefusalError(
            f"The model answers the same to {len(pairs)} different inputs, so golden vectors would prove nothing; "
            "check its weights, and that the data is scaled as in training."
        )
    # the form that optigpu.edge.gate reads
    head = struct.pack("<4sIII", b"OGLD", len(pairs), pairs[0][0].nbytes, pairs[0][1].nbytes)
    content = b"".join(each.tobytes() + output.tobytes() for each, output in pairs)
    (folder / "golden.bin").write_bytes(head + content)
    compared = held_out[: int(str(request["compared"]))]
    np.save(folder / "int8.npy", np.concatenate([reference(each[None]) for each in compared]))
    return {
        "arena_bytes": arena,
        "left_out": left_out,
        "tools": {name: version(each) for name, each in PACKAGES.items()},
    }


def _candidates(held_out: Numbers, count: int, seed: int) -> Numbers:
    """(3 * count, 1, *shape): noise over the whole range of int8, and held-out inputs in every other place."""
    random = np.random.default_rng(seed)
    candidates = random.integers(-128, 128, (3 * count, *held_out.shape[1:]), dtype=np.int8)
    real = held_out[: count - 1]
    candidates[: 2 * len(real) : 2] = real
    return candidates[:, None]


def _micro(model: bytes, limit: int) -> tuple[int, Model]:
    """The bytes of the arena that the model takes, and the model as a function."""
    size = min(FIRST_ARENA, limit)
    while (interpreter := _interpreter(model, size, last=size >= limit)) is None:
        size = min(2 * size, limit)

    def run(sample: Numbers) -> Numbers:
        interpreter.set_input(sample, 0)
        interpreter.invoke()
        return np.array(interpreter.get_output(0))

    # What the interpreter allocated, which it only prints.
    with _printed() as text:
        interpreter.print_allocations()
    found = _ALLOCATED.search(text())
    if not found:
        raise RefusalError(
            "TFLite Micro does not say how large its arena is; install the version of constraints.txt."
        )
    return int(found[1]), run


def _interpreter(model: bytes, size: int, *, last: bool) -> Any | None:
    """The interpreter with an arena of that size; None if the arena is too small and there are larger ones to try."""
    why = ""
    with _printed() as text:
        try:
            return runtime.Interpreter.from_bytes(model, arena_size=size)
        except RuntimeError as error:
            why = str(error)
    if lacking := re.search(r"Didn't find op for builtin opcode '(\w+)'", text()):
        raise RefusalError(f"TFLite Micro lacks the operator {lacking[1]}; replace it in the network.")
    if not _TOO_SMALL.search(text()):
        raise RefusalError(f"TFLite Micro cannot run the model: {_last_line(text(), why)}.")
    if last:
        raise RefusalError(
            f"The model's tensors do not fit into an arena of {size:,} bytes ({_last_line(text(), why)}); "
            "use a smaller input or width, or a larger --arena."
        )
    return None


def _reference(model: bytes) -> Model:
    """The model on kernels that compute as TFLite Micro's; LiteRT's default ones round differently."""
    interpreter = Interpreter(model_content=model, experimental_op_resolver_type=OpResolverType.BUILTIN_REF)
    interpreter.allocate_tensors()
    place, found = (
        each[0]["index"] for each in (interpreter.get_input_details(), interpreter.get_output_details())
    )

    def call(sample: Numbers) -> Numbers:
        interpreter.set_tensor(place, sample)
        interpreter.invoke()
        return np.array(interpreter.get_tensor(found))

    return call


def _agreeing(micro: Model, reference: Model, candidates: Numbers, count: int) -> tuple[list[Pair], int]:
    """The first `count` candidates on which both agree bit for bit, with their outputs, and how many were left out. The
    roundings of a fully connected layer may differ in the last bit, on one of some thousand sums. Raises RefusalError
    where the candidates are used up: then one of both computes another network."""
    pairs: list[Pair] = []
    steps: list[int] = []
    for candidate in candidates:
        one, other = micro(candidate), reference(candidate)
        if np.array_equal(one, other):
            pairs.append((candidate, one))
        else:
            steps.append(int(np.max(np.abs(one.astype(int) - other))))
        if len(pairs) == count:
            return pairs, len(steps)
    raise RefusalError(
        f"TFLite Micro and LiteRT's reference kernels differ on {len(steps)} of {len(candidates)} inputs, by up to "
        f"{max(steps)} steps; use the versions of constraints.txt, or replace the operators that are not exact."
    )


@contextmanager
def _printed() -> Iterator[Callable[[], str]]:
    """Yields what returns the text that C code prints on stderr meanwhile."""
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        text: list[str] = []
        try:
            yield lambda: text[0]
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            text.append(file.read().decode(errors="replace"))


def _last_line(text: str, otherwise: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[-1] if lines else otherwise).rstrip(".")[:200]
