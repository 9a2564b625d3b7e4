"""What a GGUF file holds: the types and bytes of its tensors. Loads neither torch nor llama.cpp."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from optigpu.backends.llama_cpp.gguf_header import Header, Placed, read_header

NOT_WEIGHTS = ("rope_freqs.weight",)
"""Tensors that follow from the configuration and that transformers does not count as parameters."""

_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Contents:
    """The tensors of a GGUF file, the names of their types by number, and the file's own size in bytes."""

    tensors: tuple[Placed, ...]
    names: dict[int, str]
    file_bytes: int

    @property
    def parameters(self) -> int:
        """How many weights there are; a tied head is stored once."""
        return sum(tensor.elements for tensor in self.tensors if tensor.name not in NOT_WEIGHTS)

    @property
    def quantized(self) -> float | None:
        """The share of the weights that have fewer than 16 bits; None if none has."""
        packed = sum(each.elements for each in self.tensors if self.names[each.type] not in _FLOATS)
        return packed / self.parameters if packed else None

    @property
    def types(self) -> dict[str, int]:
        """How many tensors there are of each type."""
        return dict(Counter(self.names[tensor.type] for tensor in self.tensors))

    @property
    def main_type(self) -> str:
        """The type that most of the weights have."""
        weights: Counter[str] = Counter()
        for tensor in self.tensors:
            weights[self.names[tensor.type]] += tensor.elements
        return weights.most_common(1)[0][0]

    @property
    def row_bytes(self) -> int:
        """What one token reads of the tables that are only looked up."""
        return sum(tensor.bytes // tensor.shape[-1] for tensor in self.tensors if self._is_looked_up(tensor))

    @property
    def streamed_bytes(self) -> int:
        """What every decode step reads wholly: all but the tables that are only looked up."""
        return sum(tensor.bytes for tensor in self.tensors if not self._is_looked_up(tensor))

    def _is_looked_up(self, tensor: Placed) -> bool:
        """A tied embedding is the head too, and so is read wholly."""
        untied = any(other.name == "output.weight" for other in self.tensors)
        return tensor.name == "position_embd.weight" or (tensor.name == "token_embd.weight" and untied)


def contents_of(path: Path, type_name: Callable[[int], str]) -> Contents:
    """Reads a GGUF file's table of tensors; `type_name` is the engine's name of a type's number.

    Raises ValueError for a file that is none.
    """
    return described(read_header(path), path, type_name)


def described(header: Header, path: Path, type_name: Callable[[int], str]) -> Contents:
    """The contents of a file whose header was read."""
    numbers = {tensor.type for tensor in header.tensors}
    names = {number: type_name(number).upper() for number in numbers}
    return Contents(header.tensors, names, path.stat().st_size)
