"""Standard and fused attention as functions, and both over the length of the sequence: the workload `attention`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from optigpu.backends.operators import AttentionShape
from optigpu.backends.torch import operators
from optigpu.backends.torch.device import kind_of
from optigpu.backends.torch.operators import TorchOperatorRuntime
from optigpu.facade.benchmark_result import MEBIBYTE, Indexed
from optigpu.facade.functions.timing import device_for, place_name, speedup, timed_in_turns
from optigpu.statistics.estimates import Bounds
from optigpu.workloads.attention import AttentionRequest, needed_bytes
from optigpu.workloads.requests.operators import require_memory

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
