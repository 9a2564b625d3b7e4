"""Standard and fused attention as functions, and both over the length of the sequence: the workload `attention`. And a
small decoder with a key-value cache, to read and to try, and the speed at which a model generates."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from optigpu.backends.operators import AttentionShape
from optigpu.backends.torch import operators
from optigpu.backends.torch.device import kind_of
from optigpu.backends.torch.operators import TorchOperatorRuntime
from optigpu.facade.benchmark_result import MEBIBYTE, Indexed
from optigpu.facade.timing import (
    device_for,
    place_name,
    require_divisible,
    speedup,
    timed,
    timed_in_turns,
)
from optigpu.models.loading.self_written import forked_random
from optigpu.statistics.estimates import Bounds
from optigpu.vocabulary import SpecError
from optigpu.workloads.attention import AttentionRequest, needed_bytes
from optigpu.workloads.requests import require_memory

WARMUP, REPEATS = 5, 20
SEQ_LENGTHS = (512, 1024, 2048, 4096, 8192)


def standard_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Attention by its definition: the scores of all pairs are in memory, batch * heads * length**2 of them.

    q, k, v and the result: [batch, heads, length, head_size]. `scale` None is 1 / sqrt(head_size).

    >>> import torch
    >>> from optigpu import flash_attention_native, standard_attention
    >>> q, k, v = torch.randn(3, 2, 4, 16, 8)
    >>> torch.allclose(standard_attention(q, k, v), flash_attention_native(q, k, v), atol=1e-5)
    True
    """
    return operators.standard_attention(q, k, v, q.size(-1) ** -0.5 if scale is None else scale)


def flash_attention_native(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """torch's scaled_dot_product_attention: the same result from blocks of scores that never are in memory together.
    torch chooses the kernel: FlashAttention-2, memory-efficient attention, or cuDNN's; a kernel of its own on a CPU;
    and the definition for what none of them takes (Dao et al., FlashAttention, 2022, arXiv:2205.14135)."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


@dataclass(frozen=True)
class AttentionRow(Indexed):
    """Both implementations at one length: medians, their ratio with its 95% interval in this process, and peak memory.
    Memory is in 2**20 bytes: of CUDA's allocator, or of the tensors on a CPU."""

    seq_len: int
    standard_ms: float
    flash_ms: float
    speedup: float
    speedup_ci: Bounds | None
    standard_mb: float
    flash_mb: float


def benchmark_attention_implementations(
    batch_size: int = 4,
    n_heads: int = 12,
    seq_lengths: Sequence[int] = SEQ_LENGTHS,
    d_head: int = 64,
    device: str | None = None,
    dtype: str | None = None,
    repeats: int = REPEATS,
) -> list[AttentionRow]:
    """Times standard and fused attention in turns at each length, prints a table and returns its rows. `device` None is
    CUDA where there is a GPU, and else this CPU; `dtype` None is float16 on CUDA and float32 on a CPU. The workload
    `attention` measures the same operators in several processes, with a roofline. Raises UnsupportedError where a
    length does not fit the memory, where no fused kernel takes these shapes, and for a device that is not here."""
    place = device_for(device)
    name = dtype or ("float16" if place.type == "cuda" else "float32")
    print(f"Attention on {place_name(place)} in {name}, batch {batch_size}, {n_heads} heads of {d_head}")
    print(
        f"{'Seq Len':>10} | {'Standard (ms)':>15} | {'Flash (ms)':>12} | {'Speedup':>20} | "
        f"{'Standard (MB)':>15} | {'Flash (MB)':>12}"
    )
    return [
        _row(AttentionShape(length, batch_size, n_heads, n_heads, d_head, False, name, False), place, repeats)
        for length in seq_lengths
    ]


def _row(standard: AttentionShape, place: torch.device, repeats: int) -> AttentionRow:
    """Times both at one length, and prints the table's line."""
    fused = AttentionShape(**(vars(standard) | {"fused": True}))
    runtime = TorchOperatorRuntime(kind_of(place), seed=0)
    peaks: dict[str, float] = {}
    calls = {}
    for name, shape in {"standard": standard, "flash": fused}.items():
        noun = f"{AttentionRequest.noun} over {shape.length} tokens"
        require_memory(runtime, needed_bytes(shape), f"the arrays of {name} {noun}")
        operator = runtime.attention(shape)
        peaks[name] = (runtime.peak_memory(operator.call).allocated_bytes or 0) / MEBIBYTE
        calls[name] = operator.call
    times = timed_in_turns(calls, place, warmup=WARMUP, repeats=repeats)
    ratio, bounds = speedup(times["standard"], times["flash"])
    slow, fast = times["standard"].median_ms, times["flash"].median_ms
    gain = f"{ratio:.2f}x" + (f" [{bounds[0]:.2f}, {bounds[1]:.2f}]" if bounds else "")
    print(
        f"{standard.length:>10} | {slow:>15.3f} | {fast:>12.3f} | {gain:>20} | "
        f"{peaks['standard']:>15.1f} | {peaks['flash']:>12.1f}"
    )
    return AttentionRow(standard.length, slow, fast, ratio, bounds, peaks["standard"], peaks["flash"])


KvCache = tuple[torch.Tensor, torch.Tensor]
"""Keys and values so far, [batch, heads, length, head_size] each."""
CONTEXT = 2048
"""How many positions a CachedTransformerDecoder has an embedding of."""
GENERATION_WARMUP, GENERATION_REPEATS = 1, 5


class CachedMultiHeadAttention(nn.Module):
    """Causal attention that keeps the keys and values of all tokens so far, so that each is computed once. Several
    tokens may come after a cache: each attends to the cached ones and to those before it."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        """Raises SpecError if the heads do not divide the width."""
        super().__init__()
        require_divisible(d_model, n_heads)
        self.n_heads = n_heads
        self.d_head = d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, d_model, bias=False)
        self.v_proj = nn.Linear(d_model, d_model, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: torch.Tensor, kv_cache: KvCache | None = None) -> tuple[torch.Tensor, KvCache]:
        """x and the result: [batch, new tokens, d_model]. The cache that comes back holds the new tokens too."""
        shape = (self.n_heads, self.d_head)
        projected = (project(x).unflatten(-1, shape) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (each.transpose(1, 2) for each in projected)
        before = 0
        if kv_cache is not None:
            before = kv_cache[0].shape[2]
            k, v = (torch.cat([old, new], dim=2) for old, new in zip(kv_cache, (k, v), strict=True))
        new = x.shape[1]
        # row i is token before + i, which sees itself and all before it
        seen = (
            torch.ones(new, before + new, dtype=torch.bool, device=x.device).tril(before)
            if before and new > 1
            else None
        )
        found = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=before == 0)
        result: torch.Tensor = self.out_proj(found.transpose(1, 2).flatten(2))
        return result, (k, v)


class CachedTransformerDecoder(nn.Module):
    """Layers of attention with a key-value cache between an embedding and a head; weights are random.

    `generate` draws the first new token from the logits at the prompt's last position.

    >>> import torch
    >>> from optigpu import CachedTransformerDecoder
    >>> decoder = CachedTransformerDecoder(vocab_size=50, d_model=16, n_heads=2, n_layers=2)
    >>> prompt = torch.randint(0, 50, (1, 5))
    >>> tokens = decoder.generate(prompt, max_new_tokens=4, temperature=0)
    >>> logits, _ = decoder(torch.cat([prompt, tokens], dim=1))
    >>> logits[:, 4:-1].argmax(-1).equal(tokens)
    True
    """

    def __init__(self, vocab_size: int, d_model: int = 512, n_heads: int = 8, n_layers: int = 6) -> None:
        """Raises SpecError if the heads do not divide the width."""
        super().__init__()
        self.embed = nn.Embedding(vocab_size, d_model)
        self.pos_embed = nn.Embedding(CONTEXT, d_model)
        self.layers = nn.ModuleList(CachedMultiHeadAttention(d_model, n_heads) for _ in range(n_layers))
        self.norms = nn.ModuleList(nn.LayerNorm(d_model) for _ in range(n_layers))
        self.head = nn.Linear(d_model, vocab_size)
        self.n_layers = n_layers

    def forward(
        self, input_ids: torch.Tensor, kv_caches: list[KvCache] | None = None
    ) -> tuple[torch.Tensor, list[KvCache]]:
        """Logits [batch, new tokens, vocabulary] of the tokens [batch, new tokens], which follow those of the caches.
        Raises SpecError for more tokens than there are positions."""
        before = kv_caches[0][0].shape[2] if kv_caches else 0
        length = before + input_ids.shape[1]
        if length > CONTEXT:
            raise SpecError(
                f"The sequence has {length} tokens, and there are {CONTEXT} positions; generate fewer."
            )
        x = self.embed(input_ids) + self.pos_embed(torch.arange(before, length, device=input_ids.device))
        grown = []
        for index, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            found, cache = layer(norm(x), kv_caches[index] if kv_caches else None)
            x = x + found
            grown.append(cache)
        return self.head(x), grown

    @torch.no_grad()
    def generate(
        self, input_ids: torch.Tensor, max_new_tokens: int = 100, temperature: float = 1.0
    ) -> torch.Tensor:
        """New tokens [batch, max_new_tokens] after a prompt [batch, length], drawn with torch's random numbers.
        `temperature` 0 takes the most likely tokens. Raises SpecError for a negative one, and as `forward`."""
        _require_temperature(temperature)
        logits, caches = self(input_ids)
        tokens = [_chosen(logits[:, -1], temperature)]
        for _ in range(max_new_tokens - 1):
            logits, caches = self(tokens[-1], caches)
            tokens.append(_chosen(logits[:, -1], temperature))
        return torch.cat(tokens, dim=1)


def _chosen(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """[batch, vocabulary] to [batch, 1]."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    return torch.multinomial(torch.softmax(logits / temperature, dim=-1), num_samples=1)


def _require_temperature(temperature: float) -> None:
    if not (math.isfinite(temperature) and temperature >= 0):
        raise SpecError(
            f"temperature: {temperature} is not 0 or a positive number; 0 takes the most likely tokens."
        )


@dataclass(frozen=True)
class GenerationTiming(Indexed):
    """How fast a model generates: medians over the repeats, the prompt's pass included, and the tokens of the last one,
    [1, max_new]."""

    total_ms: float
    total_ms_ci: Bounds | None
    tokens_per_s: float
    tokens: torch.Tensor


def benchmark_generation(
    model: CachedTransformerDecoder | PreTrainedModel,
    vocab_size: int = 32000,
    seq_len: int = 128,
    max_new: int = 50,
    device: str | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    repeats: int = GENERATION_REPEATS,
) -> GenerationTiming:
    """Times `model.generate` after a random prompt of ids below `vocab_size`, and prints the speed. The model is a
    CachedTransformerDecoder or one of transformers, which is kept from ending early. `seed` draws the prompt and the
    tokens: the same seed gives the same ones, in each of the `repeats`. `temperature` 0 takes the most likely tokens.
    `device` None is CUDA where there is a GPU, and else this CPU. Raises SpecError for ids that the model does not have
    and for no new token, UnsupportedError for a device that is not here."""
    _require_temperature(temperature)
    if isinstance(model, CachedTransformerDecoder):
        known: int = model.embed.num_embeddings
    else:
        known = model.config.get_text_config(decoder=True).vocab_size
    if vocab_size > known:
        raise SpecError(f"vocab_size: {vocab_size} is more than the {known} ids of this model; name its own.")
    if max_new < 1:
        raise SpecError(f"max_new: {max_new} new tokens have no speed; ask for 1 or more.")
    place = device_for(device)
    module: nn.Module = model
    module.to(place).eval()
    source = torch.Generator().manual_seed(seed)
    prompt = torch.randint(vocab_size, (1, seq_len), generator=source).to(place)
    generate = _generator(model, prompt, max_new, temperature)
    kept: list[torch.Tensor] = []

    def once() -> None:
        torch.manual_seed(seed)
        kept[:] = [generate()]

    with forked_random(place):
        times = timed(once, place, warmup=GENERATION_WARMUP, repeats=repeats)
    rate = 1e3 * max_new / times.median_ms
    print(f"With KV Cache on {place_name(place)}: {times.median_ms:.1f}ms total, {rate:.1f} token/s")
    return GenerationTiming(times.median_ms, times.ci_ms, rate, kept[0])


def _generator(
    model: CachedTransformerDecoder | PreTrainedModel, prompt: torch.Tensor, max_new: int, temperature: float
) -> Callable[[], torch.Tensor]:
    """One generation of exactly `max_new` tokens, without the prompt."""
    if isinstance(model, CachedTransformerDecoder):
        return lambda: model.generate(prompt, max_new_tokens=max_new, temperature=temperature)
    decode: Any = model.generate  # its type names every kind of output
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0}
    choice = drawn if temperature else {"do_sample": False}

    def generate() -> torch.Tensor:
        made: torch.Tensor = decode(prompt, max_new_tokens=max_new, min_new_tokens=max_new, **choice)
        return made[:, prompt.shape[1] :]

    return generate
