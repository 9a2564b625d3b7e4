"""Sequences that join and leave between decode steps, by the model's own modules over a cache in blocks.

Sequences share one pool, and a table says whose a block is (Kwon et al., Efficient Memory Management for Large Language
Model Serving with PagedAttention, SOSP 2023, arXiv:2309.06180). Keys and values are gathered for each pass.
"""

from collections.abc import Sequence

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from optigpu.backends.torch.attention import Mode
from optigpu.backends.torch.kv_caches import layers_beside_whole_attention
from optigpu.vocabulary import UnsupportedError

ATTENTIONS = ("sdpa", "eager")
"""transformers' attentions that take any mask."""


class TorchSlots:
    def __init__(
        self, model: PreTrainedModel, mode: Mode, count: int, length: int, block_tokens: int
    ) -> None:
        """Raises UnsupportedError for layers that a cache in blocks cannot hold, or an attention that takes no mask."""
        if others := layers_beside_whole_attention(model):
            raise UnsupportedError(
                f"serve needs layers that attend to the whole sequence; this model also has {others}. Measure "
                "generate, or another model."
            )
        attention = model.config._attn_implementation
        if attention not in ATTENTIONS:
            raise UnsupportedError(
                f"serve needs an attention that takes a mask ({' or '.join(ATTENTIONS)}), and this stack has "
                f"{attention}; leave that technique out."
            )
        self.count, self.length, self.block_tokens = count, length, block_tokens
        self._model, self._mode = model, mode
        self._table = BlockTable(count, length, block_tokens, model.device)
        layers = len(DynamicCache(config=model.config).layers)
        self._cache: Cache = Cache(layers=[PagedLayer(self._table) for _ in range(layers)])
        self._last = [0] * count

    def join(self, slot: int, prompt: Sequence[int]) -> int:
        """One pass over the prompt by itself."""
        self._table.place(slot, len(prompt))
        with self._mode():
            logits = self._model(
                input_ids=torch.tensor([list(prompt)], device=self._model.device),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits
            self._last[slot] = int(logits[0, -1].argmax())
        return self._last[slot]

    def step(self, slots: Sequence[int]) -> Sequence[int]:
        """One pass over one token of each sequence, padded to the longest."""
        positions = [[self._table.lengths[slot]] for slot in slots]
        device = self._model.device
        with self._mode():
            mask = self._mask(self._table.place_all(slots))
            logits = self._model(
                input_ids=torch.tensor([[self._last[slot]] for slot in slots], device=device),
                position_ids=torch.tensor(positions, device=device),
                attention_mask=mask,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits
            tokens: list[int] = logits[:, -1].argmax(dim=-1).tolist()
        for slot, token in zip(slots, tokens, strict=True):
            self._last[slot] = token
        return tokens

    def leave(self, slot: int) -> None:
        self._table.give_back(slot)

    def emptied(self, count: int, length: int, block_tokens: int) -> bool:
        """Ends all sequences and keeps the memory, if these are such places; else False."""
        kept = (self.count, self.length, self.block_tokens) == (count, length, block_tokens)
        if not kept or not self._cache.layers:
            return False
        for slot in range(count):
            self._table.give_back(slot)
        return True

    def close(self) -> None:
        self._cache.layers = []

    def _mask(self, attended: torch.Tensor) -> torch.Tensor:
        """[batch, 1, 1, tokens], in the form that the model's attention takes: booleans, or what is added to scores."""
        wanted = attended[:, None, None, :]
        if self._model.config._attn_implementation == "sdpa":
            return wanted
        dtype = self._model.dtype
        added = torch.zeros(wanted.shape, dtype=dtype, device=wanted.device)
        return added.masked_fill(~wanted, torch.finfo(dtype).min)


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
        self.keys, self.values = (
            states.new_zeros(self.table.pool_tokens, states.shape[1], states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        for pool, states in ((self.keys, key_states), (self.values, value_states)):
            rows = states.transpose(1, 2).flatten(0, 1).to(pool.dtype)
            pool.index_copy_(0, self.table.written, rows)
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
        return self.table.pool_tokens
