"""How much each input of a matrix matters: the mean of its squares over a text, llama.cpp's importance matrix.

The text is one that the model itself draws, so that it needs no file and is the same each time.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from optigpu.backends.llama_cpp.gguf_families import written_family

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

ROWS, LENGTH, SEED = 8, 256, 0
"""The text: sequences, and tokens of each."""
Importance = dict[str, NDArray[np.float32]]


def write_importance(model: "PreTrainedModel", path: Path) -> None:
    """Writes what `read_importance` reads."""
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **importance_of(model))


def read_importance(path: Path) -> Importance:
    """Means of squares by the name of a matrix in a GGUF file."""
    with np.load(path) as found:
        return {name: found[name] for name in found.files}


def importance_of(model: "PreTrainedModel") -> Importance:
    """The means of squares of what enters each matrix of a model, [inputs], by the matrix's name in a GGUF file.

    The model's layers are watched from then on.
    """
    import torch

    from optigpu.models.loading.self_written import sampled

    length = min(LENGTH, model.config.max_position_embeddings)
    tokens = sampled(model, model.config.vocab_size, ROWS, length, SEED)
    sums: dict[str, torch.Tensor] = {}

    def watch(name: str, layer: torch.nn.Module) -> None:
        def add(_layer: object, inputs: tuple[torch.Tensor, ...]) -> None:
            squares = inputs[0].double().square().flatten(0, -2).sum(0)
            sums[name] = sums[name] + squares if name in sums else squares

        layer.register_forward_pre_hook(add)

    for name, layer in _layers(model):
        watch(f"{name}.weight", layer)
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    return {name: (found / tokens.numel()).numpy().astype(np.float32) for name, found in sums.items()}


def _layers(model: "PreTrainedModel") -> "Iterator[tuple[str, torch.nn.Module]]":
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
