"""A program in ExecuTorch, as what workloads and meters ask of."""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from executorch.extension.pybindings.portable_lib import _unsafe_reset_threadpool
from executorch.runtime import Runtime

from optigpu.backends.base import Order
from optigpu.backends.converted import weights_of, whole
from optigpu.backends.executorch.program import PROGRAMS
from optigpu.backends.runtime import Ids, Logits
from optigpu.backends.stepped import Loaded, SteppedRuntime
from optigpu.models.described import decoder_facts
from optigpu.models.reference import parse_reference
from optigpu.techniques.base import Notes

ENGINE = "ExecuTorch"
NOT_SAID = "ExecuTorch does not say which kernels of attention run."


def prepared(order: Order, progress: Callable[[str], None]) -> SteppedRuntime:
    """Exports the program for the workload if it is not kept already.

    Raises UnsupportedError for a model that cannot be exported, OptiGPUError when exporting fails.
    """
    facts = decoder_facts(parse_reference(str(order.model)))

    def steps(rows: int, length: int) -> "ProgramSteps":
        path = PROGRAMS.made(order, rows, length, progress)
        with whole(path, ENGINE):
            return ProgramSteps(path, rows, length, order.threads)

    PROGRAMS.admit(order)  # a stack that it cannot apply is refused before anything is exported
    notes = Notes()
    notes.record(
        dtype="float32",
        kv_cache="static",
        decode_loop=ENGINE,
        decode_operator="Method.execute",
        threads=order.threads,
        versions={"executorch": version("executorch")},
        reasons=dict.fromkeys(("attn_implementation", "attention_kernels"), NOT_SAID),
    )
    loaded = Loaded(ENGINE, facts, steps, weights_of(order), None)
    return SteppedRuntime(order, loaded, notes)


class ProgramSteps:
    """A program's sequences, which are all decoded in each of its passes."""

    def __init__(self, path: Path, rows: int, length: int, threads: int) -> None:
        """Raises RuntimeError for a file that ExecuTorch cannot load."""
        self.rows, self.length = rows, length
        _unsafe_reset_threadpool(threads)  # before anything runs in it
        self._program = Runtime.get().load_program(path)
        method = self._program.load_method("forward")
        if method is None:
            raise RuntimeError("it has no method forward")
        self._method, self._used = method, 0

    def begin(self) -> None:
        """The next pass writes the cache from its beginning."""
        self._used = 0

    def forward(self, tokens: Ids) -> Logits:
        """Logits after the last of `tokens` [rows, count], [rows, vocabulary]."""
        count = tokens.shape[1]
        places = torch.arange(self._used, self._used + count)
        (logits,) = self._method.execute((torch.from_numpy(np.ascontiguousarray(tokens)), places))
        self._used += count
        found: Logits = logits[:, -1].numpy()
        return found

    def close(self) -> None:
        """The program is freed with its last reference."""
        del self._method, self._program
