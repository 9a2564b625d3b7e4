"""Whether a model fits a GPU with each of several stacks, at which context and which batch; and what it needs of each
of several equal GPUs, and what they send each other. Tensor parallelism divides every matrix and the cache among
`tensor` GPUs, as Megatron-LM does; pipeline parallelism gives each of `pipeline` groups of them some of the blocks."""

from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from optigpu.documents.facts import ModelFacts
from optigpu.fit.memory import WIDTHS, DecoderMemory, Load, MemoryNeed
from optigpu.hardware.catalog import Device, HardwareKind, devices
from optigpu.job.plan import MEMORY_LADDER
from optigpu.job.spec import resolve
from optigpu.models.described import DecoderShape, Part
from optigpu.surgery.gptqmodel.technique import conv1d_reason
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import Technique
from optigpu.techniques.quantization.awq import Awq
from optigpu.vocabulary import DeviceKind, Frozen, SpecError, UnsupportedError

WORKLOAD = "generate"


@dataclass(frozen=True)
class NamedStack:
    """A resolved stack of a backend with the label of its row."""

    label: str
    techniques: tuple[Technique, ...]
    backend: str = "torch"


def stack_of(techniques: tuple[Technique, ...], label: str | None = None) -> NamedStack:
    """A stack that was asked for. Raises SpecError when two techniques exclude each other."""
    resolved = resolve(techniques, WORKLOAD)
    backend = next((name for each in resolved for name in each.backends if name != "torch"), "torch")
    names = " + ".join(technique.name for technique in resolved) or "fp32"
    return NamedStack(label or names, resolved, backend)


def usual_stacks(card: Device, facts: ModelFacts) -> tuple[NamedStack, ...]:
    """From 32 bits a weight to 4, in the half precision that the card's matrix units have."""
    half = "bf16" if "bf16" in card.peak_flop_per_s else "fp16"
    fp8 = ("fp8",) if "fp8" in card.peak_flop_per_s else ()
    alone = ("int8_kv_cache", "int8_weight_only", *fp8, "llm_int8", "nf4", "int4_weight_only", "gptq", "awq")
    several = (half, "int8_kv_cache", "int4_weight_only")
    names = ((), (half,), *((half, name) for name in alone), several, (half, "cpu_offload"))
    stacks = (stack_of(tuple(TECHNIQUES[name](name=name) for name in each)) for each in names)
    awq = not conv1d_reason(facts.family)  # whose checkpoints have no such layers
    every = (*stacks, _gguf())
    return tuple(each for each in every if awq or not any(isinstance(one, Awq) for one in each.techniques))


def cpu_stacks() -> tuple[NamedStack, ...]:
    """Those with operators for a CPU, from 32 bits a weight to 4."""
    names = ("int8_weight_only", "int8_hybrid", "int4_weight_only", "native_decode")
    return (stack_of(()), *(stack_of((TECHNIQUES[name](name=name),)) for name in names), _gguf())


def _gguf() -> NamedStack:
    four_bits = TECHNIQUES["gguf"].model_validate({"name": "gguf", "type": "Q4_K_M"})
    return stack_of((four_bits,), "gguf Q4_K_M")


def memory_ladder() -> tuple[NamedStack, ...]:
    return tuple(NamedStack(rung.label, rung.stack(WORKLOAD), rung.backend) for rung in MEMORY_LADDER)


RESERVE_BYTES = 3 * 2**28
"""What a GPU's memory holds beside tensors: CUDA's context, its libraries' workspaces, and gaps between blocks.

An assumption of ours; `--reserve` replaces it. A GPU that also draws a desktop needs more.
"""
MOST_SEQUENCES = 4096
USUAL_CONTEXT = 2048


class StackFit(Frozen):
    """What one stack needs for the asked load, predicted, and how far it goes on the card.

    `host` says that it runs in the host's memory and needs none of the card's. A stack whose memory cannot be predicted
    has a `reason` and no figures. `largest_context` is in tokens, with one sequence; `largest_batch` is in sequences of
    the asked context. Both are 0 where not even one fits.
    """

    label: str
    techniques: tuple[str, ...]
    backend: str
    host: bool = False
    weight_bytes: int | None = None
    cache_bytes: int | None = None
    activation_bytes: int | None = None
    peak_bytes: int | None = None
    fits: bool = False
    largest_context: int | None = None
    largest_batch: int | None = None
    reason: str | None = None


class Fit(Frozen):
    """The stacks of a model on a card. All bytes of it are predicted, and `basis` says so.

    `advice` is what would fit where nothing does.
    """

    basis: Literal["predicted"] = "predicted"
    model: str
    parameters: int
    gpu: str
    memory_bytes: int
    reserve_bytes: int
    batch: int
    context: int
    new_tokens: int
    most_context: int
    stacks: tuple[StackFit, ...]
    advice: tuple[str, ...] = ()

    @property
    def usable_bytes(self) -> int:
        return self.memory_bytes - self.reserve_bytes


class Asked(Frozen):
    """What is to be generated at once: `context` counts prompt and new tokens of a sequence.

    None asks for USUAL_CONTEXT, or for all that the model has where that is less.
    """

    batch: int = 1
    context: int | None = None
    new_tokens: int = 128
    reserve_bytes: int = RESERVE_BYTES
    device: DeviceKind = DeviceKind.CUDA

    def context_of(self, shape: DecoderShape) -> int:
        """Of a model. Raises SpecError for a context that it does not have."""
        context = min(USUAL_CONTEXT, shape.facts.longest) if self.context is None else self.context
        if not 2 <= context <= shape.facts.longest:
            raise SpecError(
                f"context: {context} is out of range; {shape.reference} takes from 2 to {shape.facts.longest} tokens."
            )
        return context

    def load(self, batch: int, context: int) -> Load:
        """As many sequences of so many tokens, of which as many are new as can be."""
        new = min(self.new_tokens, context - 1)
        return Load(batch, context - new, new)


def fit(shape: DecoderShape, card: Device, stacks: Sequence[NamedStack], asked: Asked) -> Fit:
    """Predicts every stack. Raises SpecError for a context that the model does not have, or a card without room."""
    context = asked.context_of(shape)
    memory = card.memory_bytes or 0
    if memory <= asked.reserve_bytes:
        raise SpecError(
            f"reserve: {asked.reserve_bytes} bytes leave nothing of the {memory} bytes of {card.name}; reserve less."
        )
    rows = tuple(_stack_fit(shape, stack, memory - asked.reserve_bytes, asked, context) for stack in stacks)
    found = Fit(
        model=str(shape.reference),
        parameters=shape.description.parameters,
        gpu=card.name,
        memory_bytes=memory,
        reserve_bytes=asked.reserve_bytes,
        batch=asked.batch,
        context=context,
        new_tokens=asked.new_tokens,
        most_context=shape.facts.longest,
        stacks=rows,
    )
    return found.model_copy(update={"advice": _advice(found)})


def _stack_fit(shape: DecoderShape, stack: NamedStack, usable: int, asked: Asked, context: int) -> StackFit:
    host = stack.backend != "torch" and asked.device is DeviceKind.CUDA
    about = StackFit(
        label=stack.label,
        techniques=tuple(each.name for each in stack.techniques),
        backend=stack.backend,
        host=host,
    )
    try:
        memory = DecoderMemory(
            shape, stack.techniques, DeviceKind.CPU if host else asked.device, backend=stack.backend
        )
    except UnsupportedError as error:
        return about.model_copy(update={"reason": str(error)})

    def need(batch: int, context: int) -> MemoryNeed:
        return memory.need(asked.load(batch, context))

    here = need(asked.batch, context)
    figures = {
        "weight_bytes": here.weights,
        "cache_bytes": here.cache,
        "activation_bytes": here.activations,
        "peak_bytes": here.peak,
        "fits": host or here.peak <= usable,
    }
    if not host:
        figures |= {
            "largest_context": largest(lambda size: need(1, size).peak <= usable, 2, shape.facts.longest),
            "largest_batch": largest(lambda size: need(size, context).peak <= usable, 1, MOST_SEQUENCES),
        }
    return about.model_copy(update=figures)


def largest(fits: Callable[[int], bool], least: int, most: int) -> int:
    """The largest size from `least` to `most` that fits, where all smaller ones fit as well; 0 if none does."""
    sizes = range(least, most + 1)
    count = bisect(sizes, False, key=lambda size: not fits(size))
    return sizes[count - 1] if count else 0


def _advice(found: Fit) -> tuple[str, ...]:
    known = [row for row in found.stacks if row.peak_bytes is not None]
    on_card = [row for row in known if not row.host]
    if not on_card or any(row.fits for row in on_card):
        return ()
    advice = []
    furthest = max(on_card, key=lambda row: row.largest_context or 0)
    if furthest.largest_context:
        advice.append(
            f"{furthest.label} fits with one sequence of up to {furthest.largest_context:,} tokens."
        )
    least = min(on_card, key=lambda row: row.peak_bytes or 0)
    wanted = (least.peak_bytes or 0) + found.reserve_bytes
    cards = [
        card for card in devices() if card.kind is HardwareKind.GPU and (card.memory_bytes or 0) >= wanted
    ]
    if cards:
        smallest = min(cards, key=lambda card: card.memory_bytes or 0)
        gib = (smallest.memory_bytes or 0) / 2**30
        advice.append(f"{least.label} fits {smallest.name} ({gib:.0f} GiB) as asked.")
    else:
        advice.append(
            f"{least.label} needs {wanted / 2**30:.0f} GiB, more than any GPU of the catalog has; it takes several."
        )
    advice += [
        f"{row.label} runs on the CPU with {(row.peak_bytes or 0) / 1e9:.1f} GB of the host's memory."
        for row in known
        if row.host
    ]
    return tuple(advice)


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
