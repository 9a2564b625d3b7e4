"""What a GGUF file holds: the types and bytes of its tensors. Loads neither torch nor llama.cpp."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

NOT_WEIGHTS = ("rope_freqs.weight",)
"""Tensors that follow from the configuration and that transformers does not count as parameters."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file; `rows` is the length of its outermost dimension, `bytes` its size as it is stored."""

    name: str
    type: str
    elements: int
    rows: int
    bytes: int


@dataclass(frozen=True)
class Contents:
    """The tensors of a GGUF file and the file's own size in bytes."""

    tensors: tuple[Tensor, ...]
    file_bytes: int

    @property
    def parameters(self) -> int:
        """How many weights there are; a tied head is stored once."""
        return sum(tensor.elements for tensor in self.tensors if tensor.name not in NOT_WEIGHTS)

    @property
    def types(self) -> dict[str, int]:
        """How many tensors there are of each type."""
        return dict(Counter(tensor.type for tensor in self.tensors))

    @property
    def row_bytes(self) -> int:
        """What one token reads of the tables that are only looked up."""
        return sum(tensor.bytes // tensor.rows for tensor in self.tensors if self._is_looked_up(tensor))

    @property
    def streamed_bytes(self) -> int:
        """What every decode step reads wholly: all but the tables that are only looked up."""
        return sum(tensor.bytes for tensor in self.tensors if not self._is_looked_up(tensor))

    def _is_looked_up(self, tensor: Tensor) -> bool:
        """A tied embedding is the head too, and so is read wholly."""
        untied = any(other.name == "output.weight" for other in self.tensors)
        return tensor.name == "position_embd.weight" or (tensor.name == "token_embd.weight" and untied)


def contents_of(path: Path) -> Contents:
    """Reads a GGUF file's table of tensors. Raises ValueError for a file that is none."""
    from gguf import GGUFReader

    tensors = tuple(
        Tensor(
            name=tensor.name,
            type=tensor.tensor_type.name,
            elements=int(tensor.n_elements),
            rows=int(tensor.shape[-1]),  # GGUF lists the innermost dimension first
            bytes=int(tensor.n_bytes),
        )
        for tensor in GGUFReader(str(path)).tensors
    )
    return Contents(tensors, path.stat().st_size)
