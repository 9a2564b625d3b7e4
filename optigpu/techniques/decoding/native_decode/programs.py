"""How a decoder's program is filled from a transformers model, and why none can be."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Embedding, LayerNorm, Module
from transformers import PreTrainedConfig, PreTrainedModel

from optigpu.hardware.cpu import one_cpu_of_each_core
from optigpu.models.families import FAMILIES
from optigpu.models.loading.expressed import DECODER, Fields, unexpressed
from optigpu.models.loading.storages import storage_of
from optigpu.ops.decode.cpu.decoder import CpuDecoder
from optigpu.ops.decode.program import Activation, Block, CacheKind, Matrix, Norm, Program, WeightKind
from optigpu.surgery.places import linear_places, weight_of
from optigpu.techniques.decoding.native_decode.layers import (
    DecodeLinear,
    DecodeTable,
    exchange_table,
    joined_matrices,
    packed_table,
)
from optigpu.techniques.decoding.native_decode.prediction import LEAVE_OUT, Runnable, other_size, runnable

if TYPE_CHECKING:
    from optigpu.ops.decode.cuda.decoder import CudaDecoder

    Decoder = CpuDecoder | CudaDecoder


HEAD_PATH = "lm_head"
"""The path of the head in every causal language model."""
ACTIVATIONS: dict[str, Activation] = {
    **dict.fromkeys(
        ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"), "gelu_tanh"
    ),
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    "relu": "relu",
    **dict.fromkeys(("silu", "swish"), "silu"),
}
"""By transformers' names, of which it has several for one function."""
EXPRESSED: Fields = DECODER | dict.fromkeys(("hidden_act", "activation_function"), tuple(ACTIVATIONS))
"""What a program has of a configuration."""
ATTACHED = "native_decode"
"""The model's attribute for tensors that its program has copied."""


class Attached(Module):
    """A program, and those of its tensors that the rest of the model does not hold."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program


def has_tied_head(model: PreTrainedModel) -> bool:
    """Whether head and embedding share a matrix, as long as nothing is packed."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def refusal(model: PreTrainedModel) -> str | None:
    """Why no program can be filled from a loaded model, as `known_refusal`; nothing is changed.

    What `checked_places` looks at, the linear layers' weights and inputs, is not looked at again.
    """
    family = runnable(model.config.model_type)
    if family is None or type(model).__name__ != family.decoder.model:
        kinds = ", ".join(known.decoder.model for name in FAMILIES if (known := runnable(name)))
        return f"supports {kinds}, not {type(model).__name__}; {LEAVE_OUT}"
    reason = unexpressed(model.config, EXPRESSED)
    if reason:
        return f"does not support {reason}; {LEAVE_OUT}"
    decoder = model.get_submodule(family.decoder.path)
    blocks: list[Module] = list(getattr(decoder, family.decoder.blocks))
    changed = {type(block).__name__ for block in blocks} - {family.decoder.block}
    root = f"{family.decoder.path}.{family.decoder.blocks}"
    layers = [path for stage in family.stages for path in stage]
    expected = {f"{root}.{index}.{path}" for index in range(len(blocks)) for path in layers}
    paths = {place.path for place in linear_places(model)} ^ {HEAD_PATH, *expected}
    if changed or paths:
        strange = ", ".join(sorted(changed or paths)[:3])
        return f"needs the blocks of transformers' {family.decoder.model}, and {strange} differs; {LEAVE_OUT}"
    reason = _other_shapes(model, family, decoder, blocks)
    if reason:
        return f"{reason}; {LEAVE_OUT}"
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            return f"needs finite weights, and {name} has some that are NaN or infinite; the model's files are damaged"
    return None


def _other_shapes(
    model: PreTrainedModel, family: Runnable, decoder: Module, blocks: list[Module]
) -> str | None:
    """The property of the model's parts that a program cannot express, or None."""
    attention: Any = blocks[0].get_submodule(family.attention.path)
    reason = other_size(model.config.hidden_size, attention.head_dim)
    if reason:
        return reason
    rows, outputs = (
        weight_of(layer).shape[0]
        for layer in (getattr(decoder, family.decoder.embedding), model.get_submodule(HEAD_PATH))
    )
    if rows != outputs:
        return f"needs a head with as many outputs as the embedding has rows; this model has {outputs} and {rows}"
    return None


def exchange_tables(model: PreTrainedModel, kind: WeightKind, group: int, *, tied: bool) -> None:
    """Packs the tables whose rows are looked up; a tied embedding has those of the head, which is a DecodeLinear."""
    parts = runnable_of(model).decoder
    decoder = model.get_submodule(parts.path)
    embedding: Embedding = getattr(decoder, parts.embedding)
    if tied:
        exchange_table(embedding, _decode_linear(model, HEAD_PATH).matrix)
    else:
        exchange_table(embedding, packed_table(embedding.weight, kind, group))
    if parts.positions is not None:
        positions: Embedding = getattr(decoder, parts.positions)
        used = positions.weight[getattr(positions, "offset", 0) :]  # OPT has two rows without a position
        exchange_table(positions, packed_table(used, kind, group))


def attach(model: PreTrainedModel) -> Program:
    """Fills a program from a model whose layers and tables are packed, and has the model keep it.

    Tensors that the model did not hold, float32 copies of what came in 16 bits, are counted with its weights.
    """
    program = program_of(model)
    kept = Attached(program)
    held = {storage_of(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    for name, tensor in _norm_tensors(program):
        if storage_of(tensor) not in held:
            kept.register_buffer(name, tensor)
    model.add_module(ATTACHED, kept)
    return program


def attached(model: PreTrainedModel) -> Program:
    """The program that a model keeps."""
    kept = model.get_submodule(ATTACHED)
    assert isinstance(kept, Attached)
    return kept.program


def program_of(model: PreTrainedModel) -> Program:
    """The program of a model that nothing refuses and whose layers and tables are packed."""
    config, family = model.config, runnable_of(model)
    parts = family.decoder
    decoder = model.get_submodule(parts.path)
    stack: list[Module] = list(getattr(decoder, parts.blocks))
    blocks = tuple(_block(config, family, block) for block in stack)
    embedding = _table(decoder, parts.embedding)
    positions = None if parts.positions is None else _table(decoder, parts.positions)
    rotary: Module | None = getattr(decoder, "rotary_emb", None)
    attention: Any = stack[0].get_submodule(family.attention.path)
    return Program(
        width=embedding.inputs,
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_size=attention.head_dim,
        inner=blocks[0].up.outputs,
        vocabulary=embedding.outputs,
        context=config.max_position_embeddings if positions is None else positions.outputs,
        activation=ACTIVATIONS[getattr(config, family.family.keys.activation)],
        embedding=embedding,
        positions=positions,
        rotary=None if rotary is None else _rotary(rotary, embedding.numbers.device),
        blocks=blocks,
        final=_norm(getattr(decoder, parts.final)),
        head=_decode_linear(model, HEAD_PATH).matrix,
    )


def runnable_of(model: PreTrainedModel) -> Runnable:
    """The family of a model that nothing refuses."""
    found = runnable(model.config.model_type)
    assert found is not None  # or the model was refused
    return found


def _decode_linear(parent: Module, path: str) -> DecodeLinear:
    found = parent.get_submodule(path)
    assert isinstance(found, DecodeLinear)
    return found


def _table(decoder: Module, name: str) -> Matrix:
    found = getattr(decoder, name)
    assert isinstance(found, DecodeTable)
    return found.matrix


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
        # Some families have one window for all layers, others one for some of them.
        window=getattr(
            config if family.attention.window_in == "config" else attention, "sliding_window", None
        ),
    )


def _norm(norm: Any) -> Norm:
    weight, bias = weight_of(norm).detach().float(), getattr(norm, "bias", None)
    if isinstance(norm, LayerNorm):
        return Norm("layer", weight, None if bias is None else bias.detach().float(), norm.eps)
    return Norm("rms", weight, None, norm.variance_epsilon)


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


def new_decoder(program: Program, kv: CacheKind) -> "Decoder":
    """A decoder on the device of the program's weights; on a CPU with as many threads as torch has."""
    if program.device.type != "cpu":
        from optigpu.ops.decode.cuda.decoder import CudaDecoder  # imports Triton

        return CudaDecoder(program, kv)
    return CpuDecoder(program, kv, threads=torch.get_num_threads(), cpus=one_cpu_of_each_core())


def placement_facts(decoder: "Decoder") -> dict[str, Any]:
    """On which memory nodes the weights lie; empty where there was no choice."""
    return decoder.placement.facts() if isinstance(decoder, CpuDecoder) and decoder.placement else {}
