"""A key-value cache in blocks: sequences of different lengths share one pool, and a table says whose a block is.

Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, SOSP 2023,
arXiv:2309.06180. Keys and values are gathered for each pass, so that any attention can read them.
"""

from collections.abc import Sequence

import torch
from transformers.cache_utils import CacheLayerMixin


class BlockTable:
    """Which blocks of the pool each place has, and how many tokens it holds.

    Before a pass `place` or `place_all` names where its tokens go: `written` are their indices in a layer's flat pool,
    and `read` [batch, tokens] those of what they attend to, None where a prompt attends to itself alone.
    """

    def __init__(self, count: int, length: int, block_tokens: int, device: torch.device) -> None:
        self.block_tokens, self.device = block_tokens, device
        most = -(-length // block_tokens)
        self.pool_tokens = count * most * block_tokens
        self.lengths = [0] * count
        self._free = list(range(count * most))
        self._blocks: list[list[int]] = [[] for _ in range(count)]
        self._offsets = torch.arange(block_tokens, device=device)
        self.written = torch.empty(0, dtype=torch.int64, device=device)
        self.read: torch.Tensor | None = None

    def place(self, slot: int, tokens: int) -> None:
        """A prompt of so many tokens goes to an empty place."""
        self._grow(slot, tokens)
        self.written = self._indices([slot])[0, :tokens]
        self.read = None

    def place_all(self, slots: Sequence[int]) -> torch.Tensor:
        """One more token goes to each of these places. The mask [batch, tokens] of what each attends to."""
        for slot in slots:
            self._grow(slot, 1)
        self.read = self._indices(slots)
        lengths = torch.tensor([self.lengths[slot] for slot in slots], device=self.device)
        self.written = self.read.gather(1, lengths[:, None] - 1)[:, 0]
        return torch.arange(self.read.shape[1], device=self.device) < lengths[:, None]

    def give_back(self, slot: int) -> None:
        """The place's blocks are free."""
        self._free += self._blocks[slot]
        self._blocks[slot], self.lengths[slot] = [], 0

    def _grow(self, slot: int, tokens: int) -> None:
        self.lengths[slot] += tokens
        while len(self._blocks[slot]) * self.block_tokens < self.lengths[slot]:
            self._blocks[slot].append(self._free.pop())

    def _indices(self, slots: Sequence[int]) -> torch.Tensor:
        """The flat indices of all tokens of these places' blocks, [batch, tokens]; shorter ones end in block 0's."""
        most = max(len(self._blocks[slot]) for slot in slots)
        padded = [self._blocks[slot] + [0] * (most - len(self._blocks[slot])) for slot in slots]
        blocks = torch.tensor(padded, device=self.device)
        return (blocks[:, :, None] * self.block_tokens + self._offsets).flatten(1)


class PagedLayer(CacheLayerMixin):
    """One layer's pool of keys and values, [tokens, heads, head_size] each, in transformers' interface."""

    is_sliding = False

    def __init__(self, table: BlockTable) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.table = table

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates for states like these, [batch, heads, tokens, head_size] each."""
        self.keys, self.values = (
            states.new_zeros(self.table.pool_tokens, states.shape[1], states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new states where the table says, and returns what they attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        _write(self.keys, self.table.written, key_states)
        _write(self.values, self.table.written, value_states)
        if self.table.read is None:
            return key_states, value_states
        return self.keys[self.table.read].transpose(1, 2), self.values[self.table.read].transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of a prompt, which attends to itself; a step brings its own mask."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """A prompt begins at 0; a step brings its own positions."""
        return 0

    def get_max_length(self) -> int:
        """The pool's."""
        return self.table.pool_tokens


def _write(pool: torch.Tensor, indices: torch.Tensor, states: torch.Tensor) -> None:
    """`states` [batch, heads, tokens, head_size] to the pool's rows `indices` [batch * tokens]."""
    pool.index_copy_(0, indices, states.transpose(1, 2).flatten(0, 1).to(pool.dtype))
