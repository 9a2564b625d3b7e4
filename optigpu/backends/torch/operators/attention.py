"""Attention: torch's fused kernel, and its definition in separate operators."""

from collections.abc import Iterator, Sequence

import torch
from torch.nn.attention import SDPBackend

from optigpu.backends.operators import AttentionPlace, AttentionRow, AttentionShape
from optigpu.backends.torch.attention import attention_kernels, one_of_kernels
from optigpu.backends.torch.device import TorchDevice
from optigpu.backends.torch.operators.base import TorchOperator, dtype_of, wide

_FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


def standard_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    hidden: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention by its definition, which keeps every score in memory: [..., length, head_size] each.

    `hidden` marks the pairs that do not count.
    """
    scores = torch.matmul(query, key.transpose(-2, -1)) * scale
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    return torch.matmul(scores.softmax(dim=-1), value)


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = False,
    grouped: bool = False,
) -> torch.Tensor:
    """torch's scaled_dot_product_attention, which is one kernel where there is one for these tensors."""
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=causal, enable_gqa=grouped
    )


class TorchAttention(TorchOperator):
    """Attention over random queries, keys and values."""

    def __init__(self, place: TorchDevice, shape: AttentionShape) -> None:
        """Raises UnsupportedError where no fused kernel takes these shapes on this device."""
        super().__init__(place)
        self._shape = shape
        dtype = dtype_of(shape.dtype)
        self._query, self._key, self._value = (
            self.normal(shape.batch_size, heads, shape.length, shape.head_size, dtype=dtype)
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        self._hidden = None
        if shape.causal and not shape.fused:
            full = torch.ones(shape.length, shape.length, dtype=torch.bool, device=place.name)
            self._hidden = full.triu(1)
        if shape.fused:
            self._require_kernel()

    def call(self) -> torch.Tensor:
        """[batch, heads, length, head_size]."""
        return self._fused() if self._shape.fused else self._standard()

    def held(self) -> Sequence[torch.Tensor]:
        """Queries, keys, values, and the mask where there is one."""
        return self.drawn() if self._hidden is None else (*self.drawn(), self._hidden)

    def drawn(self) -> Sequence[torch.Tensor]:
        """Queries, keys and values."""
        return self._query, self._key, self._value

    def kernels(self) -> list[str]:
        """The names of the attention operators and kernels that a call runs."""
        return attention_kernels(self.call, self.place.device)

    def rows(self, places: Sequence[AttentionPlace]) -> Iterator[AttentionRow]:
        """Results of one call, with the queries, keys and values that they are of."""
        result = self.call()
        for batch, head, index in places:
            seen = index + 1 if self._shape.causal else self._shape.length
            shared = head // self._shape.group
            yield AttentionRow(
                query=wide(self._query[batch, head, index]),
                keys=wide(self._key[batch, shared, :seen]),
                values=wide(self._value[batch, shared, :seen]),
                result=wide(result[batch, head, index]),
            )

    def _standard(self) -> torch.Tensor:
        key, value = self._key, self._value
        if self._shape.group > 1:
            key, value = (tensor.repeat_interleave(self._shape.group, dim=1) for tensor in (key, value))
        return standard_attention(self._query, key, value, self._shape.scale, self._hidden)

    def _fused(self) -> torch.Tensor:
        shape = self._shape
        return fused_attention(
            self._query, self._key, self._value, causal=shape.causal, grouped=shape.group > 1
        )

    def _require_kernel(self) -> None:
        """torch falls back to its definition in silence, so it is asked once for a kernel alone."""
        shape = self._shape
        refusal = (
            f"PyTorch has no fused attention kernel for {shape.dtype} with heads of {shape.head_size}"
            f"{' in groups' if shape.group > 1 else ''} on this {self.place.device}; ask for float16 or bfloat16, or "
            "for other heads."
        )
        with one_of_kernels(_FUSED, refusal):
            self._fused()
