"""The common methods and checks of the decoders for all devices."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Protocol

import torch

from optigpu.ops.decode.program import Activation, Expert, Matrix, Mixture, Program, Sampling
from optigpu.ops.operands import named

ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
        "gelu": torch.nn.functional.gelu,
        "relu": torch.relu,
        "silu": torch.nn.functional.silu,
        "relu2": lambda x: torch.relu(x).square(),
    }
)


def split_heads(heads: torch.Tensor, program: Program) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of the outputs of Block.qkv, [rows, all heads, head_size]."""
    counts = [program.heads, program.kv_heads, program.kv_heads]
    if program.by_groups:
        counts = [count // program.kv_heads for count in counts]
    groups = heads.unflatten(1, (-1, sum(counts)))
    query, key, value = (each.flatten(1, 2) for each in groups.split(counts, dim=2))
    return query, key, value


def turned(
    cosines: torch.Tensor, sines: torch.Tensor, heads: torch.Tensor, *, neighbours: bool
) -> torch.Tensor:
    """Rotary embeddings of the first numbers of heads, [..., head_size]; cosines and sines: [..., their pairs]."""
    size, along = 2 * cosines.shape[-1], -1 if neighbours else -2
    first, second = heads[..., :size].unflatten(-1, (-1, 2) if neighbours else (2, -1)).unbind(along)
    both = torch.stack([first * cosines - second * sines, second * cosines + first * sines], dim=along)
    return torch.cat([both.flatten(-2), heads[..., size:]], dim=-1)


def mixed(
    h: torch.Tensor,
    routed: torch.Tensor,
    mixture: Mixture,
    linear: Callable[[torch.Tensor, Matrix], torch.Tensor],
    activation: Activation,
) -> torch.Tensor:
    """What the experts make of h, [rows, width]. routed: the router's outputs, [rows, experts]."""
    scores = routed.sigmoid() if mixture.score == "sigmoid" else routed.softmax(dim=1)
    wishes = scores if mixture.choice_bias is None else scores + mixture.choice_bias
    chosen = wishes.topk(mixture.chosen, dim=1).indices
    counted = scores.gather(1, chosen)
    shares = mixture.scale * counted / (counted.sum(dim=1, keepdim=True) if mixture.normalized else 1)

    def made(x: torch.Tensor, expert: Expert) -> torch.Tensor:
        both = torch.cat([linear(x, matrix) for matrix in expert.up], dim=1)
        gate, up = both.unflatten(1, (-1, 2)).unbind(2) if mixture.pairs else both.chunk(2, dim=1)
        if mixture.clamp is None:
            return linear(ACTIVATIONS[activation](gate) * up, expert.down)
        alpha, limit = mixture.clamp
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return linear(gate * (alpha * gate).sigmoid() * (up + 1), expert.down)

    found = torch.zeros_like(h)
    for number in chosen.unique().tolist():
        row, place = (chosen == number).nonzero(as_tuple=True)
        found[row] += shares[row, place, None].to(h.dtype) * made(h[row], mixture.experts[number])
    if mixture.shared is not None:
        gate = None if mixture.shared_gate is None else linear(h, mixture.shared_gate).sigmoid()
        found += made(h, mixture.shared) * (1 if gate is None else gate)
    return found


class ProgramDecoder(Protocol):
    """Runs a Program and keeps the keys and values of its sequences: CpuDecoder and CudaDecoder."""

    @property
    def length(self) -> int:
        """Tokens of each sequence in the cache."""

    @property
    def logits(self) -> torch.Tensor:
        """The logits of the last step, float32 [sequences, vocabulary]. Raises ValueError before the first step."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys, values and their scales, of all sequences."""

    def begin(self, sequences: int, capacity: int) -> None:
        """An empty cache for so many sequences of at most so many tokens; one that is large enough is used again.

        Raises UnsupportedError when there is not enough memory for it.
        """

    def extend(self, tokens: torch.Tensor) -> torch.Tensor:
        """Appends tokens, int64 [sequences, count]; returns the last one's logits, float32 [sequences, vocabulary].

        Raises ValueError for ids that the model does not have, and ReplicateError for a position beyond the cache or
        when numbers are no longer finite.
        """

    def decode(self, tokens: torch.Tensor, steps: int, sampling: Sampling | None = None) -> torch.Tensor:
        """The next `steps` tokens, int64 [sequences, steps], in one call. tokens: the last ones, int64 [sequences, 1].

        They are not in the cache yet, and the last that is chosen is not afterwards. Raises what `extend` does.
        """
        chosen = tokens.new_empty(tokens.shape[0], max(0, steps))
        for _ in self.decode_into(chosen, tokens, steps, sampling):
            pass
        return chosen

    def decode_into(
        self, chosen: torch.Tensor, tokens: torch.Tensor, at_once: int, sampling: Sampling | None = None
    ) -> Iterator[int]:
        """As `decode`, `at_once` tokens of each sequence in a call; gives after each call how many it chose.

        `chosen`, contiguous int64 [sequences, steps], is filled when the last one has ended.
        """


def check_cache_size(sequences: int, capacity: int) -> None:
    """Raises ValueError if a cache would hold no token."""
    if sequences < 1 or capacity < 1:
        raise ValueError(
            f"A cache needs at least one sequence and one token, not {sequences} sequences of {capacity} tokens."
        )


def check_steps(tokens: torch.Tensor, steps: int, at_once: int) -> None:
    """Raises ValueError if there is no step to take, or `tokens` are not the last one of each sequence."""
    if min(steps, at_once) < 1:
        raise ValueError(f"decode needs at least one step, not {min(steps, at_once)}.")
    if tokens.dim() == 2 and tokens.shape[1] != 1:
        raise ValueError(
            f"decode needs the last token of each sequence, int64 [sequences, 1], not {named(tokens)}."
        )


def no_cache() -> ValueError:
    return ValueError("The decoder has no cache yet: call begin first.")


def no_logits() -> ValueError:
    return ValueError("There are no logits before the first step: call extend or decode first.")


def wrong_tokens(tokens: torch.Tensor, sequences: int) -> ValueError:
    return ValueError(f"The decoder needs int64 [{sequences}, count] tokens, not {named(tokens)}.")
