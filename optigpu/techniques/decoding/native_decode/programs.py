"""How a decoder's program is filled from a transformers model."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import Embedding, LayerNorm, Module
from transformers import PreTrainedConfig, PreTrainedModel

from optigpu.ops.decode.program import Block, Norm, Program
from optigpu.surgery.places import Place, storage_of, weight_of
from optigpu.techniques.decoding.native_decode.layers import DecodeEmbedding, DecodeLinear, joined_matrices
from optigpu.techniques.decoding.native_decode.limits import Runnable, runnable
from optigpu.techniques.decoding.native_decode.requirements import ACTIVATIONS, HEAD_PATH

ATTACHED = "native_decode"
"""The model's attribute for tensors that its program has copied."""


class Attached(Module):
    """A program, and those of its tensors that the rest of the model does not hold."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program


def exchange_embedding(model: PreTrainedModel) -> None:
    """Replaces the embedding by a bfloat16 table; looked-up rows keep the embedding's dtype."""
    parts = _family(model).decoder
    decoder = model.get_submodule(parts.path)
    place = Place(f"{parts.path}.{parts.embedding}", decoder, parts.embedding)
    place.put(DecodeEmbedding(getattr(decoder, parts.embedding)))


def attach(model: PreTrainedModel) -> Program:
    """Fills a program from a model whose linear layers are DecodeLinears, and has the model keep it.

    Tensors that the model did not hold, float32 copies of what came in 16 bits, are counted with its weights.
    """
    program = program_of(model)
    kept = Attached(program)
    held = {storage_of(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    for name, tensor in _norm_tensors(program):
        if storage_of(tensor) not in held:
            kept.register_buffer(name, tensor)
    positions = program.positions
    if positions is not None and storage_of(positions) not in held:
        # A table, of which a token reads one row.
        kept.add_module("positions", Embedding.from_pretrained(positions))
    model.add_module(ATTACHED, kept)
    return program


def attached(model: PreTrainedModel) -> Program:
    """The program that a model keeps."""
    kept = model.get_submodule(ATTACHED)
    assert isinstance(kept, Attached)
    return kept.program


def program_of(model: PreTrainedModel) -> Program:
    """The program of a model that nothing refuses and whose linear layers are DecodeLinears."""
    config, family = model.config, _family(model)
    parts = family.decoder
    decoder = model.get_submodule(parts.path)
    stack: list[Module] = list(getattr(decoder, parts.blocks))
    blocks = tuple(_block(config, family, block) for block in stack)
    embedding, positions = weight_of(getattr(decoder, parts.embedding)), _positions(decoder, parts.positions)
    rotary: Module | None = getattr(decoder, "rotary_emb", None)
    attention: Any = stack[0].get_submodule(family.attention.path)
    return Program(
        width=embedding.shape[1],
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_size=attention.head_dim,
        inner=blocks[0].up.outputs,
        vocabulary=embedding.shape[0],
        context=config.max_position_embeddings if positions is None else positions.shape[0],
        activation=ACTIVATIONS[getattr(config, family.family.keys.activation)],
        embedding=embedding,
        positions=positions,
        rotary=None if rotary is None else _rotary(rotary, embedding.device),
        blocks=blocks,
        final=_norm(getattr(decoder, parts.final)),
        head=_decode_linear(model, HEAD_PATH).matrix,
    )


def _family(model: PreTrainedModel) -> Runnable:
    found = runnable(model.config.model_type)
    assert found is not None  # or the model was refused
    return found


def _decode_linear(parent: Module, path: str) -> DecodeLinear:
    found = parent.get_submodule(path)
    assert isinstance(found, DecodeLinear)
    return found


def _block(config: PreTrainedConfig, family: Runnable, block: Module) -> Block:
    attention: Any = block.get_submodule(family.attention.path)
    return Block(
        first=_norm(block.get_submodule(family.decoder.first)),
        qkv=joined_matrices([_decode_linear(block, path) for path in family.qkv]),
        output=_decode_linear(block, family.output).matrix,
        second=_norm(block.get_submodule(family.decoder.second)),
        gate=_decode_linear(block, family.gate).matrix if family.gate else None,
        up=_decode_linear(block, family.up).matrix,
        down=_decode_linear(block, family.down).matrix,
        scale=float(attention.scaling),
        window=_window(config, family, attention),
    )


def _window(config: PreTrainedConfig, family: Runnable, attention: Module) -> int | None:
    """Some families have one window for all layers, others one for some of them."""
    holder = config if family.attention.window_in == "config" else attention
    window: int | None = getattr(holder, "sliding_window", None)
    return window


def _norm(norm: Any) -> Norm:
    weight, bias = weight_of(norm).detach().float(), getattr(norm, "bias", None)
    if isinstance(norm, LayerNorm):
        return Norm("layer", weight, None if bias is None else bias.detach().float(), norm.eps)
    return Norm("rms", weight, None, norm.variance_epsilon)


def _positions(decoder: Module, name: str | None) -> torch.Tensor | None:
    """OPT's table begins with two rows that no position has."""
    if name is None:
        return None
    table: Module = getattr(decoder, name)
    return weight_of(table).detach()[getattr(table, "offset", 0) :].float()


def _rotary(embedding: Module, device: torch.device) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    def table(length: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(length, device=device).unsqueeze(0)
        cosines, sines = embedding(torch.empty(0, device=device), positions)
        half = cosines.shape[-1] // 2
        return cosines[0, :, :half].contiguous(), sines[0, :, :half].contiguous()

    return table


def _norm_tensors(program: Program) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights and biases of all norms, each with a name."""
    norms = {"final": program.final}
    for index, block in enumerate(program.blocks):
        norms |= {f"block_{index}_first": block.first, f"block_{index}_second": block.second}
    for name, norm in norms.items():
        yield f"{name}_weight", norm.weight
        if norm.bias is not None:
            yield f"{name}_bias", norm.bias
