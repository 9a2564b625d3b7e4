"""python -m optigpu.models.loading.describing PATH: what the model of a folder or of a GGUF file is, as JSON.

transformers builds it with shapes and no numbers, and passes two tokens through it.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from torch.nn import Embedding, Linear, Module, Parameter
from transformers import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    AutoConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.pytorch_utils import Conv1D

from optigpu.models.described import (
    Described,
    Description,
    LayerCache,
    MatrixShape,
    Part,
    image_facts_from_config,
)
from optigpu.models.families import family_of
from optigpu.models.gguf_header import read_header
from optigpu.models.loading.footprint import counted, shapes_of
from optigpu.models.loading.gguf_file import restore
from optigpu.models.loading.load import loaded_facts, why_no_decoder

_WIDE, _NARROW = 4, 2
"""Bytes of a number of float32 and of bfloat16."""
_TOKENS = 2
_Shape = TypeVar("_Shape", MatrixShape, LayerCache)


def described(config: PretrainedConfig) -> Described:
    if type(config) in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        values = config.to_dict() | {"num_labels": config.num_labels}
        return Described(images=image_facts_from_config(config.model_type, values))
    reason = why_no_decoder(config)
    return Described(refused=reason) if reason else Described(decoder=description(config))


def description(config: PretrainedConfig) -> Description:
    wide, model = shapes_of(config, torch.float32), shapes_of(config, torch.bfloat16)
    inside = {id(weight) for _, layer in _layers(model) for weight in layer.parameters(recurse=False)}
    pairs = zip(wide.parameters(), model.parameters(), strict=True)
    twins = {id(one) for one, other in pairs if id(other) in inside}
    # What is twice as wide in float32 has the model's dtype, and the rest one of its own.
    more, less = _bytes(wide, twins), _bytes(model, inside)
    numbers = (more - less) // (_WIDE - _NARROW)
    return Description(
        facts=counted(loaded_facts(model), config),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        matrices=tuple(_counted(_matrices(model))),
        numbers=numbers,
        fixed_bytes=less - _NARROW * numbers,
        caches=_caches(model),
    )


def _layers(model: PreTrainedModel) -> Iterator[tuple[str, Module]]:
    """The layers and tables that are one matrix, by their paths."""
    for path, module in model.named_modules():
        if isinstance(module, Linear | Conv1D | Embedding):
            yield path, module


def _matrices(model: PreTrainedModel) -> Iterator[MatrixShape]:
    names = _names(model.config.get_text_config(decoder=True).model_type)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for path, layer in _layers(model):
        weight = layer.weight
        assert isinstance(weight, Parameter)
        outputs, inner = weight.T.shape if isinstance(layer, Conv1D) else weight.shape
        part = Part.POSITIONS if isinstance(layer, Embedding) else Part.LINEAR
        if layer in (embedding, head):
            part = Part.EMBEDDING if layer is embedding else Part.HEAD
        within = re.split(r"\.\d+\.", path)[-1]
        name = names.get(within, within) if part is Part.LINEAR else part.value
        has_bias = getattr(layer, "bias", None) is not None
        yield MatrixShape(name=name, part=part, outputs=outputs, inner=inner, count=1, bias=has_bias)


def _counted(shapes: Iterable[_Shape]) -> Iterator[_Shape]:
    for shape, count in Counter(shapes).items():
        yield shape.model_copy(update={"count": count})


def _names(family: str) -> dict[str, str]:
    """What techniques call a block's layers, by their paths in a block of the family."""
    known = family_of(family)
    names: dict[str, str] = {}
    if known.attention:
        qkv = ("qkv",) if len(known.attention.qkv) == 1 else ("qkv.q", "qkv.k", "qkv.v")
        layers = (*known.attention.qkv, known.attention.output)
        names |= {
            f"{known.attention.path}.{own}": name for own, name in zip(layers, (*qkv, "output"), strict=True)
        }
    if known.mlp:
        paths = {known.mlp.gate: "gate", known.mlp.up: "up", known.mlp.down: "down"}
        names |= {f"{known.mlp.path}.{own}".lstrip("."): name for own, name in paths.items() if own}
    return names


def _bytes(model: PreTrainedModel, without: set[int]) -> int:
    """Of parameters and buffers; what is shared counts once."""
    held = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    return sum(size for tensor, size in held.items() if tensor not in without)


def _caches(model: PreTrainedModel) -> tuple[LayerCache, ...] | None:
    """What each layer keeps of a token, by what the model's own cache holds after a pass."""
    ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad():
            passed = model(input_ids=ids, use_cache=True)
    except Exception:  # a forward pass may ask for numbers, and fails in its own way where there are none
        return None
    layers = getattr(passed.get("past_key_values"), "layers", None)
    if layers is None or {type(layer) for layer in layers} - {DynamicLayer, DynamicSlidingWindowLayer}:
        return None
    return tuple(_counted(map(_kept, layers)))


def _kept(layer: DynamicLayer) -> LayerCache:
    assert layer.keys is not None
    assert layer.values is not None
    return LayerCache(
        window=getattr(layer, "sliding_window", None),
        kv_heads=layer.keys.shape[1],
        key_size=layer.keys.shape[-1],
        value_size=layer.values.shape[-1],
        count=1,
    )


def main() -> int:
    """Prints what the model is, or on stderr why that cannot be told; then the status is 1."""
    try:
        given = Path(sys.argv[1])
        source = {"gguf_file": given.name} if given.is_file() else {}
        folder = given.parent if source else given
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True, **source)
        if source:
            restore(config, read_header(given), given)
        print(described(config).model_dump_json())
    except Exception as error:  # a configuration that somebody wrote may fail anywhere
        print(next(iter(str(error).splitlines()), type(error).__name__), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
