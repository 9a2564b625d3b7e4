"""What `int8_hybrid` decides on in a loaded model, and how its decisions are carried out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import Embedding, ModuleList
from transformers import PreTrainedModel

from optigpu.models.loading.storages import storage_of
from optigpu.ops.four_bits.scheme import Int4Scheme
from optigpu.ops.linear.int4_linear import int4_linear_backend
from optigpu.ops.linear.int8_linear import TILE, int8_linear_backend, quantize_rows
from optigpu.surgery.bit_allocation import BitDecision, Candidate, Level, Stage
from optigpu.surgery.integer_layers import (
    Int4Embedding,
    Int4Linear,
    Int8Embedding,
    Int8Linear,
    Int16Linear,
    int4_bytes,
)
from optigpu.surgery.places import (
    LinearLayer,
    Place,
    checked_places,
    damaged,
    exchange,
    places_of,
    read_layers,
    weight_of,
)
from optigpu.vocabulary import UnsupportedError

SCHEME = Int4Scheme()
"""The scheme of 4-bit weights."""


@dataclass(frozen=True)
class ModelParts:
    """A model taken apart. `linears` are its linear layers without a head that is tied to the embedding.

    `head` and `embedding` are the two ends of one table where they are tied; `head` is None where they are not, and
    `embedding` where it is not a plain torch Embedding or the model reads its weight by itself. `tables` are the other
    embeddings (of positions). All of these are left out where tables are kept. `first_block` is the beginning of the
    paths in the first block, None where blocks are not known.
    """

    model: PreTrainedModel
    linears: tuple[Place, ...]
    head: Place | None
    embedding: Place | None
    tables: tuple[Embedding, ...]
    first_block: str | None


def parts_of(model: PreTrainedModel, technique: str, with_tables: bool) -> ModelParts:
    """The model taken apart, with its tables or without; no weight is changed.

    Raises UnsupportedError when there is no linear layer, when the model is quantized already, and when a weight is NaN
    or infinite.
    """
    places = checked_places(model, technique)
    try:
        table = model.get_input_embeddings()
    except NotImplementedError:  # of an image classifier
        table = None
    embedding = None
    if type(table) is Embedding and not read_layers(model, [table]):
        embedding = places_of(model, lambda module: module is table)[0]
    tied = [place for place in places if embedding and place.layer.weight is embedding.layer.weight]
    head = tied[0] if tied else None
    if embedding is not None and head is None and not bool(embedding.layer.weight.isfinite().all()):
        raise UnsupportedError(damaged(technique, embedding.path))
    tables = [each for each in model.modules() if isinstance(each, Embedding) and each is not table]
    blocks = getattr(model.config, "num_hidden_layers", None)
    lists = (
        path
        for path, module in model.named_modules()
        if isinstance(module, ModuleList) and len(module) == blocks
    )
    first_list = next(lists, None)
    return ModelParts(
        model=model,
        linears=tuple(place for place in places if place is not head),
        head=head if with_tables else None,
        embedding=embedding if with_tables else None,
        tables=tuple(tables) if with_tables else (),
        first_block=None if first_list is None else f"{first_list}.0.",
    )


def candidates_of(parts: ModelParts, bits: int, keep_first_block: bool) -> list[Candidate]:
    """The candidates of the allocation, in the model's order, embedding first."""
    found = []
    if parts.embedding is not None:
        path = parts.embedding.path if parts.head is None else f"{parts.embedding.path} + {parts.head.path}"
        levels = _levels(parts.embedding.layer, bits if parts.head else 8, readable=True)
        found.append(Candidate(path, tuple(level for level in levels if level.bits <= 8), Stage.HEAD))
    for place in parts.linears:
        first = parts.first_block is not None and place.path.startswith(parts.first_block)
        stage = Stage.FIRST_BLOCK if first and keep_first_block else Stage.REST
        # The relative error of rounding each row to steps of its largest weight / 127, evenly spread within a step.
        weight = weight_of(place.layer).detach().float()
        largest, length = float(weight.abs().amax(dim=1).norm()), float(weight.norm())
        error = largest / 127 * (weight.shape[1] / 12) ** 0.5
        found.append(
            Candidate(place.path, _levels(place.layer, bits), stage, error / length if length else 0.0)
        )
    return found


def fp32_bytes(model: PreTrainedModel) -> int:
    """Bytes of a model's weights and buffers if all floating-point numbers were float32; what is shared counts once."""
    tensors = {storage_of(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    return sum(
        tensor.numel() * (4 if tensor.is_floating_point() else tensor.element_size())
        for tensor in tensors.values()
    )


def rest_of(parts: ModelParts) -> list[BitDecision]:
    """The decisions for all other modules: tables of positions get 16 bits, the rest is unchanged."""
    found = []
    if parts.tables:
        size = sum(table.weight.numel() * min(2, table.weight.element_size()) for table in parts.tables)
        path = next(path for path, module in parts.model.named_modules() if module is parts.tables[0])
        reason = "rows are looked up and added, so that bfloat16 costs little"
        found.append(BitDecision(path, Level("bfloat16", 16, size), reason))
    bits = 8 * next(parts.model.parameters()).element_size()
    others = Level("as loaded", bits, _other_bytes(parts))
    reason = "norms, biases, buffers and layers of other kinds are not quantized"
    return [*found, BitDecision("all else", others, reason)]


def carry_out(parts: ModelParts, decisions: Sequence[BitDecision]) -> None:
    """Carries out the decisions; the embedding shares the head's table if they are tied."""
    kinds = {decision.path: decision.level.kind for decision in decisions}
    for place in parts.linears:
        exchange([place], _MAKERS[kinds[place.path]])
    if parts.embedding is not None:
        embedding, dtype = parts.embedding, parts.embedding.layer.weight.dtype
        if parts.head is None:
            embedding.put(Int8Embedding(*quantize_rows(weight_of(embedding.layer)), dtype))
        else:
            # Makes the head quantized, and the embedding look its rows up in the head's table.
            if kinds[f"{embedding.path} + {parts.head.path}"] == "int4":
                four = Int4Linear.of(parts.head.layer, SCHEME, readable=True)
                parts.head.put(four)
                embedding.put(Int4Embedding(four.packed, dtype))
            else:
                eight = Int8Linear.of(parts.head.layer)
                parts.head.put(eight)
                embedding.put(Int8Embedding(eight.packed, eight.scale, dtype))
    for table in parts.tables:
        weight = table.weight.detach()
        if weight.element_size() > 2:
            del table.weight
            # A buffer: a model takes the dtype of its first parameter for its own.
            table.register_buffer("weight", weight.to(torch.bfloat16))


_MAKERS: dict[str, Callable[[LinearLayer], torch.nn.Module]] = {
    "int4": partial(Int4Linear.of, scheme=SCHEME),
    "int8": Int8Linear.of,
    "int8 + int8": Int16Linear.of,
}
"""How a layer of each kind is made of a Linear or a Conv1D."""


def _levels(layer: torch.nn.Module, bits: int, readable: bool = False) -> tuple[Level, ...]:
    """From the fewest bits on; groups of 4-bit numbers must divide a layer's inputs. `readable`: rows are looked up."""
    weight = weight_of(layer)
    outputs, inner = weight.shape
    tile = TILE if int8_linear_backend(weight.device).startswith("native") else 1
    whole = -(-outputs // tile) * tile * inner + 4 * outputs
    levels = (Level("int8", 8, whole), Level("int8 + int8", 16, 2 * whole))
    if bits == 8 or inner % SCHEME.group_size:
        return levels
    if readable and int4_linear_backend(weight.device, weight.dtype) == "torch-int4pack":
        return (Level("int4", 4, outputs * (inner // 2 + 2 * (inner // SCHEME.group_size))), *levels)
    return (Level("int4", 4, int4_bytes(weight, SCHEME)), *levels)


def _other_bytes(parts: ModelParts) -> int:
    """Bytes of what stays, and of the replaced layers' biases, which become float32."""
    places = [place for place in (*parts.linears, parts.head, parts.embedding) if place is not None]
    replaced = [*(place.layer for place in places), *parts.tables]
    gone = {storage_of(weight) for layer in replaced for weight in layer.parameters()}
    kept = {
        storage_of(tensor): tensor.untyped_storage().nbytes()
        for tensor in [*parts.model.parameters(), *parts.model.buffers()]
        if storage_of(tensor) not in gone
    }
    biases = [getattr(place.layer, "bias", None) for place in places]
    return int(sum(kept.values()) + sum(4 * bias.numel() for bias in biases if bias is not None))
