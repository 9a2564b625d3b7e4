"""Gradient checkpointing: a block that computes its activations again, and what that saves and costs."""

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from optigpu.facade.benchmark_result import Indexed
from optigpu.facade.functions.timing import device_for, peak_mb, place_name, require_divisible, timed
from optigpu.statistics.estimates import Bounds
from optigpu.vocabulary import UnsupportedError

CLASSES = 1000
WARMUP = 1


class CheckpointedTransformerBlock(nn.Module):
    """A transformer's block with norms after the sums, whose two halves are computed again in the backward pass.

    Without `checkpointing` it is the same block with all activations kept, so that the two can be compared. Each half
    is a segment of its own, of which the input alone is kept (Chen et al., Training Deep Nets with Sublinear Memory
    Cost, 2016, arXiv:1604.06174).

    >>> import torch
    >>> from optigpu import CheckpointedTransformerBlock
    >>> block = CheckpointedTransformerBlock(d_model=16, n_heads=2)
    >>> block(torch.randn(2, 8, 16)).shape
    torch.Size([2, 8, 16])
    """

    def __init__(self, d_model: int = 768, n_heads: int = 12, checkpointing: bool = True) -> None:
        """Raises SpecError if the heads do not divide the width."""
        super().__init__()
        require_divisible(d_model, n_heads)
        self.checkpointing = checkpointing
        self.attn = nn.MultiheadAttention(d_model, n_heads, batch_first=True)
        self.norm1 = nn.LayerNorm(d_model)
        self.ff = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))
        self.norm2 = nn.LayerNorm(d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, d_model], and the same shape back."""
        halves: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
            lambda x: self.norm1(x + self.attn(x, x, x, need_weights=False)[0]),
            lambda x: self.norm2(x + self.ff(x)),
        )
        for half in halves:
            x = checkpoint(half, x, use_reentrant=False) if self.checkpointing else half(x)
        return x


def enable_gradient_checkpointing_hf(model: PreTrainedModel) -> None:
    """Turns transformers' own gradient checkpointing on, and the key-value cache off, which a block that is computed
    again would fill twice. Raises UnsupportedError for a model that is not of transformers, or whose family marks no
    block for it."""
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(
            f"{kind} is no model of transformers; use torch.utils.checkpoint, or CheckpointedTransformerBlock."
        )
    if not model.supports_gradient_checkpointing:
        raise UnsupportedError(
            f"transformers' {kind} has no gradient checkpointing; use torch.utils.checkpoint."
        )
    newer: Callable[[], None] | None = getattr(model, "activation_checkpointing_enable", None)
    (newer or model.gradient_checkpointing_enable)()
    model.config.use_cache = False
    print(f"Gradient checkpointing enabled on {kind}")


@dataclass(frozen=True)
class CheckpointingRow(Indexed):
    """What a step of training takes: the median with its 95% interval in this process, and the peak memory in 2**20
    bytes: of CUDA's allocator, or of the tensors on a CPU, weights and the optimizer's state included. `vram_mb` is
    None on a CPU."""

    vram_mb: float | None
    step_ms: float
    peak_mb: float
    step_ms_ci: Bounds | None = None


def compare_checkpointing(
    seq_len: int = 2048,
    batch_size: int = 8,
    d_model: int = 768,
    n_layers: int = 12,
    n_heads: int = 12,
    device: str | None = None,
    n_steps: int = 10,
) -> dict[str, CheckpointingRow]:
    """Trains the same blocks without and with checkpointing, and prints what a step takes. `device` None is CUDA where
    there is a GPU, and else this CPU. Raises SpecError for heads that do not divide the width, and UnsupportedError for
    a device that is not here."""
    require_divisible(d_model, n_heads)
    place = device_for(device)
    print(f"Training {n_layers} blocks on {place_name(place)}, {batch_size} sequences of {seq_len}")
    results = {}
    for checkpointing in (False, True):
        name = "with checkpointing" if checkpointing else "without checkpointing"
        blocks = (CheckpointedTransformerBlock(d_model, n_heads, checkpointing) for _ in range(n_layers))
        model = nn.Sequential(*blocks, _FirstToken(), nn.Linear(d_model, CLASSES)).to(place)
        inputs = torch.randn(batch_size, seq_len, d_model, device=place)
        row = results[name] = _row(model, inputs, n_steps)
        print(f"{name}: peak {row.peak_mb:.1f}MB, step {row.step_ms:.1f}ms")
        del model
        gc.collect()
    return results


class _FirstToken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] to [batch, width]."""
        return x[:, 0]


def _row(model: nn.Module, inputs: torch.Tensor, n_steps: int) -> CheckpointingRow:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    labels = torch.randint(CLASSES, inputs.shape[:1], device=inputs.device)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    times = timed(step, inputs.device, warmup=WARMUP, repeats=n_steps)
    optimizer.zero_grad()
    states = (each for state in optimizer.state.values() for each in state.values())
    held = [inputs, *model.parameters(), *(each for each in states if isinstance(each, torch.Tensor))]
    peak = peak_mb(step, held, inputs.device)
    return CheckpointingRow(
        peak if inputs.device.type == "cuda" else None, times.median_ms, peak, times.ci_ms
    )
