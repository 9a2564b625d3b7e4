"""The bytes that a step reads of a loaded model: all of its weights, but only the used rows of lookup tables."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch.nn import Embedding, Module
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageClassification, PreTrainedModel

from optigpu.documents.facts import Footprint, ImageFacts, ImageFootprint, ModelFacts
from optigpu.models.loading.checkpoint import count_packed
from optigpu.models.loading.storages import storage_of, storages
from optigpu.models.loading.token_work import counted


def image_footprint_of(model: PreTrainedModel, facts: ImageFacts, shape: Sequence[int]) -> ImageFootprint:
    """An image classifier's footprint for an image [channels, height, width]; torch counts operations over its
    shapes."""
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        # Attention in separate products: the counter does not know every fused kernel.
        plain = AutoModelForImageClassification.from_config(model.config, attn_implementation="eager")
        plain.eval()(pixel_values=torch.empty(1, *shape))
    flops, pixels = counter.get_total_flops(), math.prod(shape)
    return ImageFootprint(facts, weight_bytes(model), flops, pixels, product_dtypes(model))


def footprint_of(model: PreTrainedModel, facts: ModelFacts) -> Footprint:
    """The footprint of a transformers decoder after the stack has changed it; `facts` are those from before. Of a model
    of several parts (an encoder of images) a step reads the decoder, the head and the embedding."""
    parts: set[Module] = set(model.modules())
    if model.config.get_text_config(decoder=True) is not model.config:
        parts = {*model.get_decoder().modules(), model.get_output_embeddings()}
    tables: set[Module] = {module for module in parts if isinstance(module, Embedding)}
    tables.add(model.get_input_embeddings())

    def own(module: Module) -> list[torch.Tensor]:
        return [*module.parameters(recurse=False), *module.buffers(recurse=False)]

    streamed = storages(tensor for each in parts if each not in tables for tensor in own(each))
    rows = [tensor for table in tables for tensor in own(table) if storage_of(tensor) not in streamed]
    return Footprint(
        facts=facts if facts.work or facts.uncounted else counted(facts, model.config),
        streamed_bytes=sum(streamed.values()),
        # A number by which rows are scaled is no table.
        row_bytes=sum(tensor.nbytes // max(1, tensor.shape[0]) for tensor in rows if tensor.dim()),
        product_dtypes=product_dtypes(model),
    )


def product_dtypes(model: Module) -> tuple[str, ...]:
    """What quantized layers multiply in, by their attribute `product_dtypes`."""
    return tuple(sorted({dtype for each in model.modules() for dtype in getattr(each, "product_dtypes", ())}))


def weight_bytes(model: Module) -> int:
    """Bytes of the storages behind a model's parameters and buffers; what is shared counts once."""
    return sum(storages([*model.parameters(), *model.buffers()]).values())


def parameters_of(model: Module) -> dict[str, tuple[int, int]]:
    """The identity and the number of weights of each parameter by its name; what is tied has several names."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: (id(parameter), parameter.numel()) for name, parameter in named}


def share_gone(before: Mapping[str, tuple[int, int]], model: Module, weights: int) -> float:
    """Of a model's `weights`, those that came packed or are no parameters any more under one of their names."""
    left = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    gone = dict(found for name, found in before.items() if name not in left)
    return (sum(gone.values()) + count_packed(model)) / weights
