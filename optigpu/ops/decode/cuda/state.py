"""Where the sequences of the CUDA decoder are.

Imported only where a GPU is used, because it loads Triton.
"""

from dataclasses import dataclass

import torch

from optigpu.ops.kernel import without_memory


@dataclass(frozen=True)
class State:
    """The state of the sequences, [sequences] each except the last.

    tokens: int64, what is appended next; position: int32, where; not_finite: int32, 1 once a logit was not finite;
    chosen: int64 [sequences, capacity], the token that was chosen after each position.
    """

    tokens: torch.Tensor
    position: torch.Tensor
    not_finite: torch.Tensor
    chosen: torch.Tensor

    @staticmethod
    def without_memory(rows: int) -> "State":
        """That of an example."""
        return State(
            without_memory(rows, dtype=torch.int64),
            without_memory(rows, dtype=torch.int32),
            without_memory(rows, dtype=torch.int32),
            without_memory(rows, 1024, dtype=torch.int64),
        )
