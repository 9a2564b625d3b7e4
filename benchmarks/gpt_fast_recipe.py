"""gpt-fast's recipe for decoding at batch 1, on random weights of a preset's shapes.

A plain model with a static cache, decoded token by token through torch.compile(mode="reduce-overhead", fullgraph=True)
with coordinate-descent tuning. Linear layers are torch's `_weight_int4pack_mm` (groups of 32), int8 weights with a
scale for each output that are widened as they are read, or bfloat16. Source: github.com/meta-pytorch/gpt-fast.
"""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import gelu, layer_norm, linear, rms_norm, scaled_dot_product_attention, silu

from optigpu.surgery.made_steps import record_cuda_graph

Weights = Literal["int4", "int8", "bf16"]
GROUP = 32
INNER_TILES = 8
INT4_OUTPUTS = 8
"""What torch's int4 operator wants the outputs to be a multiple of."""
EPSILON = 1e-5
WARM_UPS = 3
AGAIN_S = 0.1
"""After this time another alarm follows: Python drops what is raised in a destructor."""


@dataclass(frozen=True)
class Shapes:
    """Of a decoder. `gated`: like Llama, with RMSNorm, rotary embeddings and a gate; else like GPT-2."""

    gated: bool
    width: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    layers: int
    vocabulary: int


class Int4Linear(nn.Module):
    """Weights that are random bits."""

    packed: torch.Tensor
    scales: torch.Tensor

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        padded = -(-outputs // INT4_OUTPUTS) * INT4_OUTPUTS
        bits = torch.randint(256, (padded, inputs // 2), dtype=torch.uint8)
        self.register_buffer("packed", torch.ops.aten._convert_weight_to_int4pack(bits, INNER_TILES))
        scales = torch.full((inputs // GROUP, padded, 2), 0.2 * inputs**-0.5, dtype=torch.bfloat16)
        scales[..., 1] = 0
        self.register_buffer("scales", scales)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, 1, outputs] of bfloat16 [1, 1, inputs]."""
        found: torch.Tensor = torch.ops.aten._weight_int4pack_mm(x[0], self.packed, GROUP, self.scales)
        return found[None]


class Int8Linear(nn.Module):
    """Weights that are random bytes."""

    weight: torch.Tensor
    scales: torch.Tensor

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8))
        scales = torch.full((outputs,), inputs**-0.5 / 73, dtype=torch.bfloat16)
        self.register_buffer("scales", scales)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, 1, outputs] of bfloat16 [1, 1, inputs]."""
        return linear(x, self.weight.to(x.dtype)) * self.scales


class Bf16Linear(nn.Module):
    """Weights from a normal distribution."""

    weight: torch.Tensor

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        weight = torch.randn(outputs, inputs, dtype=torch.bfloat16).mul_(inputs**-0.5)
        self.register_buffer("weight", weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, 1, outputs] of bfloat16 [1, 1, inputs]."""
        return linear(x, self.weight)


LINEAR: dict[Weights, Callable[[int, int], nn.Module]] = {
    "int4": Int4Linear,
    "int8": Int8Linear,
    "bf16": Bf16Linear,
}


class Norm(nn.Module):
    """RMSNorm, or LayerNorm with a bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(shapes.width, dtype=torch.bfloat16))
        self.register_buffer(
            "bias", None if shapes.gated else torch.zeros(shapes.width, dtype=torch.bfloat16)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        if self.bias is None:
            return rms_norm(x, x.shape[-1:], self.weight, EPSILON)
        return layer_norm(x, x.shape[-1:], self.weight, self.bias, EPSILON)


class Block(nn.Module):
    """Attention over a static cache, and an MLP. Biases, which cost nothing, are left out."""

    gate: nn.Module | None
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, shapes: Shapes, weights: Weights, capacity: int) -> None:
        super().__init__()
        made, self.shapes = LINEAR[weights], shapes
        heads = shapes.heads + 2 * shapes.kv_heads
        self.first, self.second = Norm(shapes), Norm(shapes)
        self.qkv = made(heads * shapes.head_size, shapes.width)
        self.output = made(shapes.width, shapes.heads * shapes.head_size)
        self.gate = made(shapes.inner, shapes.width) if shapes.gated else None
        self.up = made(shapes.inner, shapes.width)
        self.down = made(shapes.width, shapes.inner)
        cache = torch.zeros(1, shapes.kv_heads, capacity, shapes.head_size, dtype=torch.bfloat16)
        self.register_buffer("keys", cache)
        self.register_buffer("values", cache.clone())

    def forward(
        self, x: torch.Tensor, position: torch.Tensor, seen: torch.Tensor, angles: torch.Tensor
    ) -> torch.Tensor:
        """x: bfloat16 [1, 1, width]; position: int64 [1]; seen: bool [1, capacity]; angles: [2, 1, head_size / 2]."""
        x = x + self.output(self._attended(self.first(x), position, seen, angles))
        h = self.second(x)
        up = self.up(h)
        inner = gelu(up, approximate="tanh") if self.gate is None else silu(self.gate(h)) * up
        found: torch.Tensor = x + self.down(inner)
        return found

    def _attended(
        self, h: torch.Tensor, position: torch.Tensor, seen: torch.Tensor, angles: torch.Tensor
    ) -> torch.Tensor:
        shapes = self.shapes
        heads = self.qkv(h).unflatten(2, (-1, shapes.head_size)).transpose(1, 2)
        query, key, value = heads.split([shapes.heads, shapes.kv_heads, shapes.kv_heads], dim=1)
        if shapes.gated:
            query, key = turned(query, angles), turned(key, angles)
        self.keys[:, :, position] = key
        self.values[:, :, position] = value
        sharing = shapes.heads // shapes.kv_heads
        keys, values = (cache.repeat_interleave(sharing, dim=1) for cache in (self.keys, self.values))
        return scaled_dot_product_attention(query, keys, values, attn_mask=seen).transpose(1, 2).flatten(2)


class GptFastModel(nn.Module):
    """A token in, the most likely next one out. Made on the device, block by block."""

    embedding: torch.Tensor
    positions: torch.Tensor | None
    seen: torch.Tensor
    angles: torch.Tensor

    def __init__(self, shapes: Shapes, weights: Weights, capacity: int) -> None:
        super().__init__()
        embedding = torch.randn(shapes.vocabulary, shapes.width, dtype=torch.bfloat16)
        self.register_buffer("embedding", embedding)
        positions = torch.randn(capacity, shapes.width, dtype=torch.bfloat16)
        self.register_buffer("positions", None if shapes.gated else positions)
        self.blocks = nn.ModuleList(Block(shapes, weights, capacity) for _ in range(shapes.layers))
        self.final = Norm(shapes)
        self.head = LINEAR[weights](shapes.vocabulary, shapes.width)
        self.register_buffer("seen", torch.ones(capacity, capacity, dtype=torch.bool).tril())
        self.register_buffer("angles", torch.stack(rotary(capacity, shapes.head_size)).to(torch.bfloat16))

    def forward(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """int64 [1, 1] of tokens [1, 1] at position [1]."""
        x = self.embedding[token]
        if self.positions is not None:
            x = x + self.positions[position]
        seen, angles = self.seen[position], self.angles[:, position]
        for block in self.blocks:
            x = block(x, position, seen, angles)
        logits: torch.Tensor = self.head(self.final(x))
        return logits[..., : self.embedding.shape[0]].argmax(dim=2)

    def weight_bytes(self) -> int:
        """What a step reads of weights: all but caches and the rows of tables that it does not look up."""
        apart = ("embedding", "positions", "seen", "angles", "keys", "values")
        return sum(
            buffer.numel() * buffer.element_size()
            for name, buffer in self.named_buffers()
            if name.rsplit(".", 1)[-1] not in apart
        )


def with_linear(model: GptFastModel) -> GptFastModel:
    """The same with torch's own linear layers, which libraries know how to quantize."""
    for module in [*model.modules()]:
        for name, made in module.named_children():
            if isinstance(made, Bf16Linear):
                layer = nn.Linear(made.weight.shape[1], made.weight.shape[0], bias=False, device="meta")
                layer.weight = nn.Parameter(made.weight, requires_grad=False)
                setattr(module, name, layer)
    return model


def rotary(capacity: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, float32 [capacity, size / 2]."""
    speeds = 10000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(capacity).float(), speeds)
    return angles.cos(), angles.sin()


def turned(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """[1, heads, 1, size] by angles [2, 1, size / 2]."""
    cosine, sine = angles
    first, second = heads.chunk(2, dim=3)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=3)


def compiled(
    model: GptFastModel, *, recorded: bool = True
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The step as gpt-fast compiles it; attention in plain products, which it found better for the compiler.

    `recorded`: as a CUDA graph, which is gpt-fast's way; without it the kernels are launched one by one.
    """
    import torch._inductor.config as inductor
    from torch.nn.attention import SDPBackend, sdpa_kernel

    inductor.coordinate_descent_tuning = True
    step: Any = torch.compile(model, mode="reduce-overhead" if recorded else "default", fullgraph=True)

    def run(token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            chosen: torch.Tensor = step(token, position)
            return chosen.clone()  # the next replay overwrites it

    return run


class TooLong(BaseException):
    """The time for compiling is over; no Exception, which the compiler would catch."""


def compiled_within(
    seconds: float, model: GptFastModel, token: torch.Tensor, position: torch.Tensor
) -> tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], float | None]:
    """The compiled step, and how long compiling it took; without that figure, where the time was over, `recorded`."""

    def stop(*_: object) -> None:
        raise TooLong

    run, begun = compiled(model), time.monotonic()
    signal.signal(signal.SIGALRM, stop)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
            for _ in range(WARM_UPS):
                run(token, position)
            return run, time.monotonic() - begun
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except TooLong:
        return recorded(model, token, position), None


def recorded(
    model: GptFastModel, token: torch.Tensor, position: torch.Tensor
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The step operator by operator, as a CUDA graph; off a GPU as it is."""
    step = torch.no_grad()(model.forward)
    if token.device.type != "cuda":
        return step
    token, position = token.clone(), position.clone()
    replay, chosen = record_cuda_graph(lambda: step(token, position), lambda: None)

    def run(*following: torch.Tensor) -> torch.Tensor:
        for mine, theirs in zip((token, position), following, strict=True):
            mine.copy_(theirs)
        replay()
        found: torch.Tensor = chosen.clone()
        return found

    return run
