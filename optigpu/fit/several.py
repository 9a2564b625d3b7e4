"""What a decoder needs of each of several equal GPUs, and what they send each other, predicted from shapes. Tensor
parallelism divides every matrix and the cache among `tensor` GPUs, as Megatron-LM does; pipeline parallelism gives each
of `pipeline` groups of them some of the blocks."""

from collections.abc import Iterator
from typing import Literal

from optigpu.fit.fitting import Asked, NamedStack
from optigpu.fit.memory import WIDTHS, DecoderMemory
from optigpu.hardware.catalog import Device
from optigpu.models.described import DecoderShape, Part
from optigpu.vocabulary import DeviceKind, Frozen

WAYS = (1, 2, 4, 8)
MOST_GPUS = 32
SUMS_A_BLOCK = 2
"""After the attention and after the MLP. Shoeybi et al., Megatron-LM, 2019, arXiv:1909.08053."""
NO_LINK = "The speed of the link between the GPUs is not known; give it with --link."


class Division(Frozen):
    """One way to divide the model. Bytes are those of the GPU that holds the most, activations as on a single one.

    `sent_bytes_per_step` is what a GPU sends for a decode step of all sequences. `read_s` is the least time of a step:
    every stage reads its weights and its cache once, one stage after the other. `sent_s` is None without a link's
    speed.
    """

    tensor: int
    pipeline: int
    weight_bytes: int
    cache_bytes: int
    activation_bytes: int
    fits: bool
    sent_bytes_per_step: int
    read_s: float | None
    sent_s: float | None

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline

    @property
    def peak_bytes(self) -> int:
        """On the GPU that holds the most."""
        return self.weight_bytes + self.cache_bytes + self.activation_bytes


class FitOfSeveral(Frozen):
    """The divisions of a model over GPUs of one kind. All figures are predicted, and `basis` says so."""

    basis: Literal["predicted"] = "predicted"
    model: str
    stack: str
    gpu: str
    memory_bytes: int
    reserve_bytes: int
    batch: int
    context: int
    link_bytes_per_s: float | None
    divisions: tuple[Division, ...]
    reasons: dict[str, str]


def fit_several(
    shape: DecoderShape, card: Device, stack: NamedStack, asked: Asked, link_bytes_per_s: float | None
) -> FitOfSeveral:
    """Predicts every division that the model's heads and blocks allow. `link_bytes_per_s` is what a GPU sends in a
    second. Raises SpecError for a context that the model does not have, UnsupportedError for a technique whose bytes
    depend on more than shapes."""
    context = asked.context_of(shape)
    memory = DecoderMemory(shape, stack.techniques, DeviceKind.CUDA)
    need = memory.need(asked.load(asked.batch, context))
    usable = (card.memory_bytes or 0) - asked.reserve_bytes
    found = []
    for tensor, pipeline in _ways(shape):
        weights, cache = _fullest(memory, need.cache, tensor, pipeline)
        # for a decode step: a GPU's share of each sum in a ring, and the states for the next stage
        states = asked.batch * shape.facts.hidden_size * WIDTHS[memory.options.dtype]
        summed = -(-shape.facts.layers // pipeline) * SUMS_A_BLOCK * 2 * (tensor - 1) / tensor * states
        sent = round(summed + (states if pipeline > 1 else 0))
        bandwidth = card.memory_bandwidth_bytes_per_s
        found.append(
            Division(
                tensor=tensor,
                pipeline=pipeline,
                weight_bytes=weights,
                cache_bytes=cache,
                activation_bytes=need.activations,
                fits=weights + cache + need.activations <= usable,
                sent_bytes_per_step=sent,
                read_s=pipeline * (weights + cache) / bandwidth if bandwidth else None,
                sent_s=pipeline * sent / link_bytes_per_s if link_bytes_per_s else None,
            )
        )
    return FitOfSeveral(
        model=str(shape.reference),
        stack=stack.label,
        gpu=card.name,
        memory_bytes=card.memory_bytes or 0,
        reserve_bytes=asked.reserve_bytes,
        batch=asked.batch,
        context=context,
        link_bytes_per_s=link_bytes_per_s,
        divisions=tuple(found),
        reasons={} if link_bytes_per_s else {"sent_s": NO_LINK},
    )


def _ways(shape: DecoderShape) -> Iterator[tuple[int, int]]:
    """By the number of GPUs; key-value heads are divided evenly."""
    both = [(tensor, pipeline) for tensor in WAYS for pipeline in WAYS]
    for tensor, pipeline in sorted(both, key=lambda ways: (ways[0] * ways[1], ways[1])):
        divides = shape.facts.kv_heads % tensor == 0 and shape.facts.heads % tensor == 0
        if divides and pipeline <= shape.facts.layers and tensor * pipeline <= MOST_GPUS:
            yield tensor, pipeline


def _fullest(memory: DecoderMemory, cache: int, tensor: int, pipeline: int) -> tuple[int, int]:
    """Weights and cache of the GPU that holds the most: in the first stage, or in the last, which has the head."""
    stored = memory.stored
    layers = stored.facts.layers
    blocks = -(-layers // pipeline)
    of_blocks = sum(matrix.whole for matrix in stored.linear) * blocks / layers / tensor
    first = _whole(memory, Part.EMBEDDING, Part.POSITIONS) / tensor
    last = _whole(memory, Part.HEAD) / tensor
    if stored.tied and pipeline > 1 and not last:
        last = first  # the last stage has its own copy of a tied embedding
    ends = max(first, last) if pipeline > 1 else first + last
    return round(of_blocks + ends + stored.other_bytes), round(cache * blocks / layers / tensor)


def _whole(memory: DecoderMemory, *parts: Part) -> int:
    return sum(matrix.whole for matrix in memory.stored.matrices if matrix.part in parts)
