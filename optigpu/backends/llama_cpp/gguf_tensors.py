"""A model of transformers as a GGUF file without a vocabulary: what llama.cpp calls its tensors, and how they lie.

`optigpu.models.families` says which parts a family has. Nothing here needs llama.cpp.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from optigpu.backends.llama_cpp.gguf_families import EXPRESSED, WrittenFamily, written_family
from optigpu.documents.shapes import ModelFacts
from optigpu.models.loading.expressed import require_expressed
from optigpu.models.loading.load import facts_of_config
from optigpu.models.loading.self_written import sampled

ROWS, LENGTH, SEED = 8, 256, 0
"""The text of an importance matrix: sequences, and tokens of each."""
Matrices = Literal["float16", "float32"]
Metadata = dict[str, int | float]
Named = Iterator[tuple[str, torch.Tensor]]


def write(model: PreTrainedModel, path: Path, matrices: Matrices) -> None:
    """Writes matrices in that dtype and vectors as float32, as llama.cpp's own converter does, one tensor at a time.

    Raises UnsupportedError for a family or a field of its configuration that cannot be written.
    """
    import gguf

    writer = gguf.GGUFWriter(str(path), written_family(model.config.model_type).gguf.architecture)
    for key, value in metadata(model.config).items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    types = gguf.LlamaFileType
    writer.add_file_type(types.ALL_F32 if matrices == "float32" else types.MOSTLY_F16)
    writer.add_tokenizer_model("none")
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
    is_matrix = tensor.dim() == 2 and name != "position_embd.weight"
    return np.dtype(matrices if is_matrix else "float32")


def metadata(config: PretrainedConfig) -> Metadata:
    """The numbers that a GGUF file holds beside its tensors, under llama.cpp's keys.

    Raises UnsupportedError for a family that is not written, and a field of the configuration that is not expressed.
    """
    family, facts = written_family(config.model_type), facts_of_config(config)
    require_expressed(config, EXPRESSED, "A GGUF file")
    assert facts.inner_size is not None, "the table has the width of every MLP that it has the layers of"
    norm = "layer_norm_rms_epsilon" if family.decoder.norm_kind == "RMSNorm" else "layer_norm_epsilon"
    found: Metadata = {
        "context_length": facts.longest,
        "embedding_length": facts.hidden_size,
        "block_count": facts.layers,
        "feed_forward_length": facts.inner_size,
        "attention.head_count": facts.heads,
        "attention.head_count_kv": facts.kv_heads,
        "attention.key_length": facts.head_size,
        "attention.value_length": facts.head_size,
        f"attention.{norm}": float(getattr(config, family.gguf.epsilon)),
        "vocab_size": facts.vocabulary,
    }
    if family.decoder.positions is None:
        found["rope.dimension_count"] = facts.head_size
        found["rope.freq_base"] = float(config.to_dict()["rope_parameters"]["rope_theta"])
    return {f"{family.gguf.architecture}.{key}": value for key, value in found.items()}


def tensors(model: PreTrainedModel) -> Named:
    """llama.cpp's names and the model's tensors, one after the other; a tied head is left out, as llama.cpp expects.

    Raises UnsupportedError for a family that is not written.
    """
    family, facts = written_family(model.config.model_type), facts_of_config(model.config)
    decoder = family.decoder
    once = {decoder.embedding: "token_embd", decoder.final: "output_norm"}
    if decoder.positions is None:
        factors = rope_factors(model.config)
        if factors:
            yield "rope_freqs.weight", torch.tensor(factors)
    else:
        once[decoder.positions] = "position_embd"
    parts = model.get_submodule(decoder.path)
    for name, theirs in once.items():
        yield from _of_layer(parts.get_submodule(name), theirs)
    for number in range(facts.layers):
        block = parts.get_submodule(f"{decoder.blocks}.{number}")
        for name, tensor in _of_block(block, family, facts):
            yield f"blk.{number}.{name}", tensor
    head = model.get_output_embeddings()
    if head.weight is not model.get_input_embeddings().weight:
        yield from _of_layer(head, "output")


def permuted(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of queries or keys [heads * size, ...] with halves interleaved: i and i + size / 2 become neighbours.

    llama.cpp rotates neighbouring pairs where transformers rotates a row of the first half with one of the second.
    """
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def rope_factors(config: PretrainedConfig) -> list[float] | None:
    """What llama.cpp divides each pair's frequency by for Llama 3's scaling, [head_size / 2]; None without scaling.

    Source: Llama 3.1's `apply_scaling`, as llama.cpp's converter has it.
    """
    rope = config.to_dict()["rope_parameters"]
    if rope["rope_type"] == "default":
        return None
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    size = facts_of_config(config).head_size
    factors = []
    for pair in range(size // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * pair / size)
        turns = rope["original_max_position_embeddings"] / wavelength
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors


def _of_block(block: torch.nn.Module, family: WrittenFamily, facts: ModelFacts) -> Named:
    rotated = {"attn_q": facts.heads, "attn_k": facts.kv_heads} if family.gguf.rotates_neighbours else {}
    for path, theirs in family.names.items():
        for name, tensor in _of_layer(block.get_submodule(path), theirs):
            # Conv1D keeps its matrix transposed.
            rows = tensor.T if family.conv1d and tensor.dim() == 2 else tensor
            yield name, permuted(rows, rotated[theirs]) if theirs in rotated else rows


def _of_layer(layer: torch.nn.Module, name: str) -> Named:
    """A layer's weight, and its bias where it has one."""
    for kind, parameter in layer.named_parameters(recurse=False):
        yield f"{name}.{kind}", parameter.detach()


def write_importance(model: PreTrainedModel, path: Path) -> None:
    """Writes how much each input of a matrix matters, llama.cpp's importance matrix, as arrays of numpy.

    They are the means of squares of what enters each matrix, [inputs], by its name in a GGUF file, over a text that the
    model itself draws: it needs no file and is the same each time. The model's layers are watched from then on.
    """
    length = min(LENGTH, model.config.max_position_embeddings)
    tokens = sampled(model, model.config.vocab_size, ROWS, length, SEED)
    sums: dict[str, torch.Tensor] = {}

    def watch(name: str, layer: torch.nn.Module) -> None:
        def add(_layer: object, inputs: tuple[torch.Tensor, ...]) -> None:
            squares = inputs[0].double().square().flatten(0, -2).sum(0)
            sums[name] = sums[name] + squares if name in sums else squares

        layer.register_forward_pre_hook(add)

    for name, layer in _matrices(model):
        watch(f"{name}.weight", layer)
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    means = {name: (found / tokens.numel()).numpy().astype(np.float32) for name, found in sums.items()}
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **means)


def _matrices(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Module]]:
    """The layers whose weights are matrices of a file, by their names there; a tied head is the embedding."""
    family = written_family(model.config.model_type)
    parts = model.get_submodule(family.decoder.path)
    head = model.get_output_embeddings()
    tied = head.weight is model.get_input_embeddings().weight
    yield "token_embd" if tied else "output", head
    for number, block in enumerate(parts.get_submodule(family.decoder.blocks).children()):
        for path, theirs in family.names.items():
            layer = block.get_submodule(path)
            if layer.get_parameter("weight").dim() == 2:
                yield f"blk.{number}.{theirs}", layer
