"""The reference decoder, and texts on which no last bit decides what it rounds to int8 or bfloat16."""

import torch

from optigpu.ops.decode.program import CacheKind, Matrix, Program
from optigpu.ops.decode.selftest import ReferenceDecoder as ReferenceDecoder
from optigpu.ops.decode.selftest import eight_bits as eight_bits
from optigpu.ops.decode.selftest import norm_of as norm_of
from optigpu.ops.operands import INT4_LEAST, INT8_LARGEST

TIE = 8e-5
"""A float32 is off by some 3e-7 of itself after a norm, and 127 steps are the most; of bfloat16 some 256."""
TRIES = 100
"""For each token of a text: where a token has 4,400 rounded numbers, every second one comes near to a tie."""


class TellingReference(ReferenceDecoder):
    """Remembers how near to a tie, in units of a step, was what it rounded: a last bit may turn the nearest."""

    nearest = 0.5

    def _look(self, x: torch.Tensor, largest: int = INT8_LARGEST) -> None:
        most = x.abs().amax(dim=-1, keepdim=True)
        scaled = x * torch.where(most == 0, 0, largest / most)
        self.nearest = min(self.nearest, float((scaled - scaled.floor() - 0.5).abs().min()))

    def _linear(self, x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        if matrix.kind != "bf16":
            self._look(x.unflatten(1, (-1, matrix.group)))
        return super()._linear(x, matrix)

    def _kept(self, heads: torch.Tensor) -> torch.Tensor:
        if self._kv == "int8":
            self._look(heads)
        elif self._kv == "bf16":
            left = heads.contiguous().view(torch.int32) & 0xFFFF  # the bits that bfloat16 does not have
            self.nearest = min(self.nearest, float((left / 0x10000 - 0.5).abs().min()))
        return super()._kept(heads)

    def _eight_bits(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._look(x)
        return super()._eight_bits(x)

    def _four_bits(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._look(x, -INT4_LEAST)
        return super()._four_bits(x)


def untied(
    program: Program, kv: CacheKind, sequences: int, count: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Tokens [sequences, count], and the reference's logits after each of them, none of which hangs by a last bit."""
    reference, generator = TellingReference(program, kv), torch.Generator().manual_seed(0)
    reference.begin(sequences, count)
    tokens, logits = [], []
    for _ in range(TRIES * count):
        token = torch.randint(program.vocabulary, (sequences, 1), generator=generator)
        reference.nearest = 0.5
        found = reference.extend(token)
        if reference.nearest <= TIE:
            reference.length -= 1  # the next token's keys and values are written over this one's
            continue
        tokens.append(token)
        logits.append(found)
        if len(tokens) == count:
            return torch.cat(tokens, dim=1), logits
    raise AssertionError("too many tokens came near to a tie")
