"""A model of transformers as a GGUF file: the numbers of its configuration, and its tensors with llama.cpp's names.

The names are those of the package gguf; `gguf_families` says what lies otherwise in a family. Nothing here needs
llama.cpp.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from optigpu.backends.llama_cpp.gguf_families import WrittenFamily, written_family
from optigpu.backends.llama_cpp.gguf_tokenizer import add_tokenizer
from optigpu.documents.facts import ModelFacts
from optigpu.models.loading.expressed import require_expressed
from optigpu.models.loading.gguf_file import llama3_divisors
from optigpu.models.loading.load import facts_of_config
from optigpu.models.loading.self_written import sampled
from optigpu.vocabulary import UnsupportedError

Value = int | float | bool | str | list[bool]
Metadata = dict[str, Value]
_FULL, _WINDOWED = "full_attention", "sliding_attention"
_PLAIN = ("default", None)
_WHOLE = ("_count", "_length")
"""How keys of whole numbers end; a configuration may have a whole number where a file has none."""


def metadata(config: PretrainedConfig, inner_size: int) -> Metadata:
    """The values that a GGUF file holds beside its tensors, under llama.cpp's keys; `inner_size` is that of the MLP.

    Raises UnsupportedError for a family that is not written, and a field of the configuration that is not expressed.
    """
    family, facts = written_family(config.model_type), facts_of_config(config)
    require_expressed(config, family.fields, "A GGUF file")
    epsilon = family.epsilon if isinstance(family.epsilon, float) else float(getattr(config, family.epsilon))
    found: Metadata = {
        "context_length": facts.longest,
        "embedding_length": facts.hidden_size,
        "block_count": facts.layers,
        "feed_forward_length": inner_size,
        "attention.head_count": facts.heads,
        "attention.head_count_kv": facts.kv_heads,
        "attention.key_length": facts.head_size,
        "attention.value_length": facts.head_size,
        family.norm: epsilon,
        "vocab_size": facts.vocabulary,
    }
    for key, field in family.numbers.items():
        value = getattr(config, field)
        if value is not None:
            found[key] = value if isinstance(value, bool) or key.endswith(_WHOLE) else float(value)
    found |= _windows(config, family, facts.longest) | _rotation(config, facts.head_size)
    return {f"{family.architecture}.{key}": value for key, value in found.items()}


def rope_factors(config: PretrainedConfig) -> list[float] | None:
    """What llama.cpp divides each pair's frequency by for Llama 3's scaling, [head size / 2]; None without it."""
    rope = _rope(config)
    if rope is None or rope.get("rope_type") != "llama3":
        return None
    return llama3_divisors(rope, facts_of_config(config).head_size // 2)


def _windows(config: PretrainedConfig, family: WrittenFamily, context: int) -> Metadata:
    """Which layers have windows; where the architecture has none, a context that no window cuts."""
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None)
    windowed = [each == _WINDOWED for each in layers] if layers else []
    if not window or (layers and not any(windowed)):
        return {}
    if not family.windows:
        return {"context_length": min(context, window)}
    return {"attention.sliding_window": window, "attention.sliding_window_pattern": windowed}


def _rope(config: PretrainedConfig, kind: str = _FULL) -> dict[str, Any] | None:
    """How a kind of layers rotates; None for a model without rotary embeddings."""
    known = config.to_dict().get("rope_parameters")
    if not known:
        return None
    return dict(known.get(kind, known))


def _rotation(config: PretrainedConfig, head_size: int) -> Metadata:
    rope, windowed = _rope(config), _rope(config, _WINDOWED)
    if rope is None or windowed is None:
        return {}
    found: Metadata = {
        "rope.dimension_count": int(head_size * (rope.get("partial_rotary_factor") or 1.0)),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if windowed != rope:
        if windowed.get("rope_type") not in _PLAIN:
            raise UnsupportedError(
                f"A GGUF file does not express rope_type = {windowed['rope_type']!r} of layers with sliding windows; "
                "ask for the backend torch."
            )
        found["rope.freq_base_swa"] = float(windowed["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        found["rope.scaling.original_context_length"] = int(rope["original_max_position_embeddings"])
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if rope.get(ours) is not None:
                found[f"rope.scaling.{theirs}"] = float(rope[ours])
    elif rope["rope_type"] not in ("default", "linear", "llama3"):
        raise UnsupportedError(
            f"A GGUF file does not express rope_type = {rope['rope_type']!r}; ask for the backend torch."
        )
    return found


ROWS, LENGTH, SEED = 8, 256, 0
"""The text of an importance matrix: sequences, and tokens of each."""
Matrices = Literal["float16", "float32"]
Named = Iterator[tuple[str, torch.Tensor]]
_ENDS = (".weight", ".bias")
_IN_FLOAT32 = ("position_embd.weight", "ffn_gate_inp.weight", ".bias")
"""Matrices that are read row by row, that choose experts, or that have the biases of experts as rows."""
_HEAD, _EMBEDDING, _FACTORS = "output.weight", "token_embd.weight", "rope_freqs.weight"


@dataclass(frozen=True)
class Names:
    """llama.cpp's names of a model's tensors."""

    model: PreTrainedModel
    family: WrittenFamily
    facts: ModelFacts
    known: gguf.TensorNameMap

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Names":
        """Raises UnsupportedError for a family that is not written, or that the installed gguf does not name."""
        family, facts = written_family(model.config.model_type), facts_of_config(model.config)
        numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        if family.architecture not in numbers:
            raise UnsupportedError(
                f"The installed package gguf does not know the architecture {family.architecture}; install a newer one."
            )
        return cls(model, family, facts, gguf.get_tensor_name_map(numbers[family.architecture], facts.layers))

    def __getitem__(self, name: str) -> str:
        """Of a tensor of the model. Raises UnsupportedError for one that llama.cpp's architecture does not have."""
        prefix = f"{self.model.base_model_prefix}."
        for each in (name, name.removeprefix(prefix)):
            found = self.known.get_name(each, try_suffixes=_ENDS)
            if found:
                return str(found)
        raise UnsupportedError(
            f"llama.cpp's {self.family.architecture} models have no place for this model's {name}; ask for the backend "
            "torch."
        )


def tensors(model: PreTrainedModel) -> Named:
    """llama.cpp's names and the model's tensors, one after the other.

    A tied head is left out where llama.cpp takes the embedding in its place. Raises UnsupportedError for a family that
    is not written, and a tensor that it has no place for.
    """
    names = Names.of(model)
    factors = rope_factors(model.config)
    if factors:
        yield _FACTORS, torch.tensor(factors)
    transposed = {f"{path}.weight" for path, layer in model.named_modules() if isinstance(layer, Conv1D)}
    written = set()
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        for place, part in _parts(name, tensor.T if name in transposed else tensor, names.family):
            theirs = names[place]
            written.add(theirs)
            yield theirs, _laid_out(theirs, part, names)
    if names.family.head == "needed" and _HEAD not in written:
        yield _HEAD, model.get_input_embeddings().get_parameter("weight").detach()


def _parts(name: str, tensor: torch.Tensor, family: WrittenFamily) -> Named:
    """A tensor by its name; experts as llama.cpp has them, [experts, outputs, inputs], with gate and up apart."""
    path, _, kind = name.rpartition("experts.")
    matrix, end = kind.removesuffix("_bias"), ".bias" if kind.endswith("_bias") else ".weight"
    if matrix not in ("gate_up_proj", "down_proj"):
        yield (f"{name}.weight" if name.endswith(".sinks") else name), tensor
        return
    if family.inputs_first and end == ".weight":
        tensor = tensor.transpose(1, 2)
    if matrix == "down_proj":
        yield f"{path}experts.down_proj{end}", tensor
        return
    parts = (tensor[:, ::2], tensor[:, 1::2]) if family.inputs_first else tensor.chunk(2, dim=1)
    for half, part in zip(("gate_proj", "up_proj"), parts, strict=True):
        yield f"{path}experts.{half}{end}", part


def _laid_out(name: str, tensor: torch.Tensor, names: Names) -> torch.Tensor:
    """A tensor as llama.cpp expects it under its name."""
    family, facts = names.family, names.facts
    if family.one_less and name.endswith("norm.weight"):
        return tensor + 1
    if family.rotates_neighbours and re.search(r"\.attn_[qk]\.", name):
        return permuted(tensor, facts.heads if ".attn_q." in name else facts.kv_heads)
    if family.joined_by_head and ".attn_qkv." in name:
        by_head = tensor.reshape(facts.heads, 3, facts.head_size, *tensor.shape[1:])
        return by_head.transpose(0, 1).reshape(tensor.shape)
    return tensor


def permuted(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of queries or keys [heads * size, ...] with halves interleaved: i and i + size / 2 become neighbours.

    llama.cpp rotates neighbouring pairs where transformers rotates a row of the first half with one of the second.
    """
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def write(
    model: PreTrainedModel, path: Path, matrices: Matrices, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Writes matrices in that dtype and vectors as float32, as llama.cpp's own converter does, one tensor at a time.

    Without a tokenizer, or with one that llama.cpp does not have, the file has no vocabulary. Raises UnsupportedError
    for a family, a field of its configuration or a tensor that cannot be written.
    """
    writer = gguf.GGUFWriter(str(path), written_family(model.config.model_type).architecture)
    kinds = {gguf.GGUFValueType.INT32: gguf.GGUFValueType.UINT32}  # no number is negative
    # The width of the MLP, by what its last layer takes.
    shapes = (
        tensor.shape for name, tensor in tensors(model) if re.match(r"blk\.0\.ffn_down(_exps)?\.weight", name)
    )
    for key, value in metadata(model.config, int(next(shapes)[-1])).items():
        kind = gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key, value, kinds.get(kind, kind))
    types = gguf.LlamaFileType
    writer.add_file_type(types.ALL_F32 if matrices == "float32" else types.MOSTLY_F16)
    add_tokenizer(writer, tokenizer, model.config.get_text_config().vocab_size)
    for name, tensor in tensors(model):
        dtype = _dtype(name, tensor, matrices)
        writer.add_tensor_info(name, tuple(tensor.shape), dtype, tensor.numel() * dtype.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in tensors(model):
        writer.write_tensor_data(tensor.contiguous().numpy().astype(_dtype(name, tensor, matrices)))
    writer.close()


def _dtype(name: str, tensor: torch.Tensor, matrices: Matrices) -> "np.dtype[np.floating]":
    is_matrix = tensor.dim() > 1 and not name.endswith(_IN_FLOAT32)
    return np.dtype(matrices if is_matrix else "float32")


def write_importance(model: PreTrainedModel, path: Path) -> None:
    """Writes how much each input of a matrix matters, llama.cpp's importance matrix, as arrays of numpy.

    They are the means of squares of what enters each matrix, [inputs], by its name in a GGUF file, over a text that the
    model itself draws: it needs no file and is the same each time. The model's layers are watched from then on.
    """
    length = min(LENGTH, facts_of_config(model.config).longest)
    tokens = sampled(model, model.config.vocab_size, ROWS, length, SEED)
    sums: dict[str, torch.Tensor] = {}

    def watch(name: str, layer: torch.nn.Module) -> None:
        def add(_layer: object, inputs: tuple[torch.Tensor, ...]) -> None:
            squares = inputs[0].double().square().flatten(0, -2).sum(0)
            sums[name] = sums[name] + squares if name in sums else squares

        layer.register_forward_pre_hook(add)

    for name, layer in _matrices(model):
        watch(name, layer)
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    means = {name: (found / tokens.numel()).numpy().astype(np.float32) for name, found in sums.items()}
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **means)


def _matrices(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Module]]:
    """The layers whose weights are matrices of a file, by their names there; a tied head is the embedding."""
    names, head = Names.of(model), model.get_output_embeddings()
    tied = head.weight is model.get_input_embeddings().weight
    yield _EMBEDDING if tied and names.family.head != "needed" else _HEAD, head
    for path, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear | Conv1D) and layer is not head:
            yield names[f"{path}.weight"], layer
