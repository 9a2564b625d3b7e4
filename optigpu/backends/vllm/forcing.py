"""Forces given tokens through vLLM's own steps and keeps the logits that each step computed.

vLLM makes the processor itself and hands it each request's parameters: a request names its row in `extra_args`, and
finds what to force in `SCORED`. Engine and measuring process are one, so that both see the same object.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

ROW = "optigpu_row"


@dataclass
class Row:
    """One sequence: the tokens to force one after the other, and the logits before each, [vocabulary]."""

    forced: Sequence[int]
    logits: list[NDArray[np.float32]] = field(default_factory=list)

    def step(self, output_ids: Sequence[int], logits: Tensor) -> Tensor:
        """Keeps the logits; those that it returns allow the forced token alone. After the last one all are allowed."""
        position = len(self.logits)
        self.logits.append(logits.detach().float().cpu().numpy().copy())
        if position >= len(self.forced):
            return logits
        allowed = torch.full_like(logits, float("-inf"))
        allowed[self.forced[position]] = 0
        return allowed


SCORED: dict[int, Row] = {}
"""The rows that are being scored, by their number."""


class Forcing(AdapterLogitsProcessor):  # type: ignore[misc]  # of a library without types
    """Applies to the requests that name a row, and to no other."""

    def is_argmax_invariant(self) -> bool:
        """It decides which token is chosen."""
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[Sequence[int], Tensor], Tensor] | None:
        """What a request's logits go through; None leaves them alone."""
        named: Mapping[str, object] = params.extra_args or {}
        row = named.get(ROW)
        return SCORED[row].step if isinstance(row, int) else None
