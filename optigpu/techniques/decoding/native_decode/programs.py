"""How a decoder's program is filled from a transformers model."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from optigpu.ops.decode.program import Block, Matrix, Norm, Program
from optigpu.surgery.places import Place
from optigpu.techniques.decoding.native_decode.families import ACTIVATIONS, FAMILIES, HEAD, Family
from optigpu.techniques.decoding.native_decode.layers import joined_matrices

if TYPE_CHECKING:
    import torch

    from optigpu.ops.decode.program import RotaryTable

ATTACHED = "native_decode"
"""The name under which a model holds what its program has copies of."""


def embedding_place(model: Any) -> Place:
    """Where the embedding of a model of a known family stands."""
    family = FAMILIES[model.config.model_type]
    return Place(
        f"{family.decoder}.{family.embedding}", model.get_submodule(family.decoder), family.embedding
    )


def attach(model: Any) -> Program:
    """Fills a program from a model whose linear layers are DecodeLinears, and has the model keep it.

    Tensors that the model did not hold, float32 copies of what came in 16 bits, are counted with its weights.
    """
    from torch.nn import Embedding, Module

    program, kept = program_of(model), Module()
    held = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    for name, tensor in _norm_tensors(program):
        if tensor.untyped_storage().data_ptr() not in held:
            kept.register_buffer(name, tensor)
    positions = program.positions
    if positions is not None and positions.untyped_storage().data_ptr() not in held:
        # A table, of which a token reads one row.
        kept.add_module("positions", Embedding.from_pretrained(positions))
    model.add_module(ATTACHED, kept)
    model.decode_program = program
    return program


def attached(model: Any) -> Program:
    """The program that a model keeps."""
    program: Program = model.decode_program
    return program


def program_of(model: Any) -> Program:
    """The program of a model that nothing refuses and whose linear layers are DecodeLinears."""
    config, family = model.config, FAMILIES[model.config.model_type]
    decoder = model.get_submodule(family.decoder)
    blocks = tuple(_block(config, family, block) for block in getattr(decoder, family.blocks))
    attention = getattr(decoder, family.blocks)[0].get_submodule(family.attention)
    embedding, positions = getattr(decoder, family.embedding).weight, _positions(decoder, family)
    return Program(
        width=embedding.shape[1],
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_size=attention.head_dim,
        inner=blocks[0].up.outputs,
        vocabulary=embedding.shape[0],
        context=config.max_position_embeddings if positions is None else positions.shape[0],
        activation=ACTIVATIONS[getattr(config, family.activation)],
        embedding=embedding,
        positions=positions,
        rotary=_rotary(decoder.rotary_emb, embedding.device) if hasattr(decoder, "rotary_emb") else None,
        blocks=blocks,
        final=_norm(getattr(decoder, family.final)),
        head=model.get_submodule(HEAD).matrix,
    )


def _block(config: Any, family: Family, block: Any) -> Block:
    attention = block.get_submodule(family.attention)

    def matrix(path: str) -> Matrix:
        found: Matrix = block.get_submodule(path).matrix
        return found

    return Block(
        first=_norm(block.get_submodule(family.first)),
        qkv=joined_matrices([block.get_submodule(path) for path in family.qkv]),
        output=matrix(family.output),
        second=_norm(block.get_submodule(family.second)),
        gate=matrix(family.gate) if family.gate else None,
        up=matrix(family.up),
        down=matrix(family.down),
        scale=float(attention.scaling),
        window=_window(config, attention),
    )


def _window(config: Any, attention: Any) -> int | None:
    """Mistral has one window for all layers, Qwen one for some."""
    told = config if config.model_type == "mistral" else attention
    window: int | None = getattr(told, "sliding_window", None)
    return window


def _norm(norm: Any) -> Norm:
    from torch.nn import LayerNorm

    weight, bias = norm.weight.detach().float(), getattr(norm, "bias", None)
    if isinstance(norm, LayerNorm):
        return Norm("layer", weight, None if bias is None else bias.detach().float(), norm.eps)
    return Norm("rms", weight, None, norm.variance_epsilon)


def _positions(decoder: Any, family: Family) -> "torch.Tensor | None":
    """OPT's table begins with two rows that no position has."""
    if family.positions is None:
        return None
    table = getattr(decoder, family.positions)
    found: torch.Tensor = table.weight.detach()[getattr(table, "offset", 0) :].float()
    return found


def _rotary(embedding: Any, device: Any) -> "Callable[[int], RotaryTable]":
    def table(length: int) -> "RotaryTable":
        import torch

        positions = torch.arange(length, device=device).unsqueeze(0)
        cosines, sines = embedding(torch.empty(0, device=device), positions)
        half = cosines.shape[-1] // 2
        return cosines[0, :, :half].contiguous(), sines[0, :, :half].contiguous()

    return table


def _norm_tensors(program: Program) -> "Iterator[tuple[str, torch.Tensor]]":
    """The weights and biases of all norms, each with a name."""
    norms = {"final": program.final}
    for index, block in enumerate(program.blocks):
        norms |= {f"block_{index}_first": block.first, f"block_{index}_second": block.second}
    for name, norm in norms.items():
        yield f"{name}_weight", norm.weight
        if norm.bias is not None:
            yield f"{name}_bias", norm.bias
