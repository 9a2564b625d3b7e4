"""What torch.compile makes of a forward pass with its loss."""

from typing import cast

import torch
from torch._dynamo.exc import InternalTorchDynamoError, Unsupported

from optigpu.backends.training import LossOf, MicroBatch
from optigpu.surgery.compile_times import compile_facts
from optigpu.techniques.base import Notes
from optigpu.techniques.training.compile_training import CompileTraining
from optigpu.vocabulary import UnsupportedError, first_line


class CompiledLoss:
    """Compiles at its first call and checks that it did.

    The graph of the backward pass may be compiled when that runs, so the times are recorded again at the second call.
    """

    def __init__(self, technique: CompileTraining, loss: LossOf, notes: Notes) -> None:
        self._fullgraph, self._notes = technique.fullgraph, notes
        self._before = compile_facts()
        self._calls = 0
        is_inductor = technique.backend == "inductor"
        self._compiled = cast(
            LossOf,
            torch.compile(
                loss,
                fullgraph=technique.fullgraph,
                backend=technique.backend,
                options=torch._inductor.list_mode_options(technique.mode) if is_inductor else None,
            ),
        )

    def __call__(self, micro: MicroBatch) -> torch.Tensor:
        self._calls += 1
        if self._calls == 1:
            return self._first_call(micro)
        if self._calls == 2:
            self._record()
        return self._compiled(micro)

    def _first_call(self, micro: MicroBatch) -> torch.Tensor:
        self._before = compile_facts()
        try:
            loss = self._compiled(micro)
        except Unsupported as error:
            raise UnsupportedError(
                f"compile_training cannot make one graph of this step ({first_line(error)}); set fullgraph to false."
            ) from error
        except InternalTorchDynamoError as error:
            raise UnsupportedError(
                f"torch.compile does not know what another technique does in this step ({first_line(error)}); leave "
                "one of the two out of the stack."
            ) from error
        if not self._record():
            raise UnsupportedError(
                "torch.compile made no graph of this step; check whether the environment disables it."
            )
        return loss

    def _record(self) -> float:
        """Notes what was compiled since the first call; returns the number of graphs."""
        facts = compile_facts(self._before)
        self._notes.record(**facts)
        return facts["compiled_graphs"]
