"""Sequences that a graph around GroupQueryAttention decodes together, in buffers that every pass reuses."""

import numpy as np
from numpy.typing import NDArray
from onnxruntime import InferenceSession, IOBinding

from optigpu.backends.runtime import Ids, Logits
from optigpu.documents.shapes import ModelFacts
from optigpu.vocabulary import OptiGPUError

_CPU = ("cpu", 0)


class DecodingSteps:
    """`rows` sequences of at most `length` tokens.

    Keys and values lie in one buffer for each block, which is given as the past as well as the present: a step writes
    its own place alone.
    """

    def __init__(self, session: InferenceSession, facts: ModelFacts, rows: int, length: int) -> None:
        self.rows, self.length = rows, length
        self._session = session
        shape = (rows, facts.kv_heads, length, facts.head_size)
        self._kept = {
            f"{kind}_{number}": np.zeros(shape, np.float32)
            for number in range(facts.layers)
            for kind in ("key", "value")
        }
        self._logits: Logits = np.empty((rows, facts.vocabulary), np.float32)
        self._places = any(each.name == "positions" for each in session.get_inputs())
        self._passes: dict[int, _Pass] = {}
        self._used = 0

    def begin(self) -> None:
        """Forgets the sequences."""
        self._used = 0

    def forward(self, tokens: Ids) -> Logits:
        """Appends `tokens` [rows, count]. The logits are valid until the next call.

        Raises OptiGPUError when the sequences would not fit the buffers, or a token is none of the vocabulary.
        """
        rows, count = tokens.shape
        if rows != self.rows or self._used + count > self.length:
            raise OptiGPUError(
                f"These buffers hold {self.rows} sequences of {self.length} tokens; {rows} sequences of "
                f"{self._used + count} tokens do not fit."
            )
        known = self._passes.get(count)
        if known is None:
            known = self._passes[count] = _Pass(rows, count, self._bound(), self._places)
        known.fill(tokens, self._used)
        try:
            self._session.run_with_iobinding(known.binding)
        except RuntimeError as error:
            raise OptiGPUError(f"ONNX Runtime could not decode {count} tokens: {error}") from error
        self._used += count
        return self._logits

    def close(self) -> None:
        """Gives the buffers back."""
        self._passes.clear()
        self._kept.clear()

    def _bound(self) -> IOBinding:
        binding = self._session.io_binding()
        for name, array in self._kept.items():
            place = (np.float32, array.shape, array.ctypes.data)
            binding.bind_input(f"past_{name}", *_CPU, *place)
            binding.bind_output(f"present_{name}", *_CPU, *place)
        binding.bind_output("logits", *_CPU, np.float32, self._logits.shape, self._logits.ctypes.data)
        return binding


class _Pass:
    """What a pass over `count` tokens of each row reads, besides keys and values."""

    def __init__(self, rows: int, count: int, binding: IOBinding, places: bool) -> None:
        self.binding = binding
        self._tokens = self._input("input_ids", np.zeros((rows, count), np.int64))
        self._ends = self._input("seqlens_k", np.zeros(rows, np.int32))
        self._total = self._input("total_length", np.zeros(1, np.int32))
        self._positions = self._input("positions", np.zeros(count, np.int64)) if places else None
        self._steps = np.arange(count)

    def fill(self, tokens: Ids, used: int) -> None:
        """The next pass appends `tokens` to sequences of `used` tokens."""
        total = used + tokens.shape[1]
        self._tokens[:] = tokens
        self._ends[:] = total - 1
        self._total[0] = total
        if self._positions is not None:
            np.add(self._steps, used, out=self._positions)

    def _input(self, name: str, array: NDArray[np.generic]) -> NDArray[np.generic]:
        self.binding.bind_input(name, *_CPU, array.dtype.type, array.shape, array.ctypes.data)
        return array
