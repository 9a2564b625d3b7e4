"""One decode step of one sequence as one kernel, whose programs stay for all of the step.

    step = PersistentDecodeStep(program, "bf16", capacity=160)
    step.state.tokens.copy_(token)
    step.run()
    logits, next_token = step.logits, step.state.tokens

Imported only where a GPU is used, because it loads Triton.
"""

import torch

from optigpu.ops.decode.cuda.recorded_step import RecordedStep
from optigpu.ops.decode.cuda.step_plan import Division
from optigpu.ops.decode.cuda.triton_persistent import step_call
from optigpu.ops.decode.program import CacheKind, Program
from optigpu.vocabulary import UnsupportedError


class PersistentDecodeStep(RecordedStep):
    """As CudaDecodeStep, for one sequence and a program whose blocks are all alike.

    Raises UnsupportedError for other programs, and for a division with more programs than run at once.
    """

    def __init__(
        self, program: Program, kv: CacheKind, capacity: int, division: Division | None = None
    ) -> None:
        super().__init__(program, kv, 1, capacity)
        division = division or Division.of(self._target)
        _check_room(division.programs, program.device)
        self._call = step_call(program, self._memory, division)

    def _launch(self) -> None:
        self._call.run()


def _check_room(programs: int, device: torch.device) -> None:
    """A multiprocessor has room for one program of any that compiles; the interpreter runs one after the other."""
    room = 1
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).multi_processor_count
    if programs > room:
        raise UnsupportedError(
            f"A persistent kernel of {programs} programs would wait for ever: {room} of them run at once on {device}."
        )
