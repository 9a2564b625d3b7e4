"""How a decoder's program is filled from a transformers model, and why none can be."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn import Embedding, Module, ModuleList
from transformers import PreTrainedConfig, PreTrainedModel

from optigpu.hardware.cpu import one_cpu_of_each_core
from optigpu.models.loading.expressed import DECODER, ROTATIONS, Condition, Fields, unexpressed
from optigpu.models.loading.storages import storage_of
from optigpu.ops.decode.cpu.decoder import CpuDecoder
from optigpu.ops.decode.program import (
    Activation,
    Block,
    CacheKind,
    Expert,
    HeadNorm,
    Matrix,
    Mixture,
    Mlp,
    Norm,
    Program,
    RotaryTable,
    WeightKind,
)
from optigpu.ops.layouts import DECODE_TILE
from optigpu.ops.operands import is_finite
from optigpu.surgery.places import linear_places, weight_of
from optigpu.techniques.decoding.native_decode.families import ROLES, Roles, joined
from optigpu.techniques.decoding.native_decode.layers import (
    DecodeLinear,
    DecodeTable,
    exchange_table,
    joined_matrices,
    packed,
    packed_table,
    rows_of,
)
from optigpu.techniques.decoding.native_decode.prediction import LEAVE_OUT, other_size

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
    "relu2": "relu2",
}
"""By transformers' names, of which it has several for one function."""
_LAYERED = Condition(
    "angles of these kinds: " + ", ".join(ROTATIONS),
    lambda config: all(
        each is None or each["rope_type"] in ROTATIONS for each in config.rope_parameters.values()
    ),
)
EXPRESSED: Fields = (
    DECODER
    | dict.fromkeys(("hidden_act", "activation_function", "hidden_activation"), tuple(ACTIVATIONS))
    | dict.fromkeys(("rope_parameters.full_attention", "rope_parameters.sliding_attention"), _LAYERED)
)
"""What a program has of a configuration of any family."""
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
    roles = ROLES.get(model.config.model_type)
    if roles is None or type(model).__name__ != roles.model:
        kinds = ", ".join(known.model for known in ROLES.values())
        return f"supports {kinds}, not {type(model).__name__}; {LEAVE_OUT}"
    reason = unexpressed(model.config, expressed(roles))
    if reason:
        return f"does not support {reason}; {LEAVE_OUT}"
    blocks = _blocks(model)
    changed = {type(block).__name__ for block in blocks} - {roles.block}
    paths = {place.path for place in linear_places(model)} ^ {HEAD_PATH, *_expected(roles, blocks)}
    if changed or paths:
        strange = ", ".join(sorted(changed or paths)[:3])
        return f"needs the blocks of transformers' {roles.model}, and {strange} differs; {LEAVE_OUT}"
    reason = _other_shapes(model, roles, blocks)
    if reason:
        return f"{reason}; {LEAVE_OUT}"
    for name, parameter in model.named_parameters():
        if not is_finite(parameter):
            return f"needs finite weights, and {name} has some that are NaN or infinite; the model's files are damaged"
    return None


def _expected(roles: Roles, blocks: list[Module]) -> Iterator[str]:
    """The paths of the linear layers of all blocks but the experts that a router chooses among."""
    *attention, before, after = roles.stages
    for index, block in enumerate(blocks):
        mixture = roles.mixture if has_mixture(block, roles) else None
        mlp = [*before, *after] if mixture is None else []
        if mixture and mixture.shared:
            parent = joined(roles.mlp, mixture.shared)
            mlp += [path.replace(roles.mlp, parent, 1) for path in (*before, *after)]
        if mixture and mixture.shared_gate:
            mlp.append(joined(roles.mlp, mixture.shared_gate))
        for path in (*(path for stage in attention for path in stage), *mlp):
            yield f"{roles.path}.{roles.blocks}.{index}.{path}"


def _blocks(model: PreTrainedModel) -> list[Module]:
    roles = roles_of(model)
    return list(getattr(model.get_submodule(roles.path), roles.blocks))


def has_mixture(block: Module, roles: Roles) -> bool:
    return roles.mixture is not None and hasattr(block.get_submodule(roles.mlp), roles.mixture.experts)


def has_mixtures(model: PreTrainedModel) -> bool:
    """Whether some block of a model that nothing refuses has experts that are chosen among."""
    return any(has_mixture(block, roles_of(model)) for block in _blocks(model))


def _other_shapes(model: PreTrainedModel, roles: Roles, blocks: list[Module]) -> str | None:
    """The property of the model's parts that a program cannot express, or None."""
    decoder, attention = model.get_submodule(roles.path), blocks[0].get_submodule(roles.attention)
    reason = other_size(model.config.hidden_size, head_size_of(attention))
    if reason:
        return reason
    rows, outputs = (
        weight_of(layer).shape[0]
        for layer in (getattr(decoder, roles.embedding), model.get_submodule(HEAD_PATH))
    )
    if rows != outputs:
        return f"needs a head with as many outputs as the embedding has rows; this model has {outputs} and {rows}"
    if roles.gate_up and model.config.intermediate_size % DECODE_TILE:
        return (
            f"needs an intermediate_size that is a multiple of {DECODE_TILE} where gate and up are one matrix; this "
            f"model has {model.config.intermediate_size}"
        )
    return None


def exchange_tables(model: PreTrainedModel, kind: WeightKind, group: int, *, tied: bool) -> None:
    """Packs the tables whose rows are looked up; a tied embedding has those of the head, which is a DecodeLinear."""
    roles = roles_of(model)
    decoder = model.get_submodule(roles.path)
    embedding: Embedding = getattr(decoder, roles.embedding)
    if tied:
        exchange_table(embedding, _decode_linear(model, HEAD_PATH).matrix)
    else:
        exchange_table(embedding, packed_table(embedding.weight, kind, group))
    if roles.positions is not None:
        positions: Embedding = getattr(decoder, roles.positions)
        used = positions.weight[getattr(positions, "offset", 0) :]  # OPT has two rows without a position
        exchange_table(positions, packed_table(used, kind, group))


def attach(model: PreTrainedModel) -> Program:
    """Fills a program from a model whose layers and tables are packed, and has the model keep it.

    Tensors that the model did not hold, float32 copies of what came in 16 bits, are counted with its weights.
    """
    program = program_of(model)
    kept = Attached(program)
    held = {storage_of(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    for router in _routers(model):
        router.data = router.to(torch.bfloat16).to(router.dtype)  # as the program has it
    for name, tensor in _own_tensors(program):
        if storage_of(tensor) not in held:
            kept.register_buffer(name, tensor)
    model.add_module(ATTACHED, kept)
    return program


def _routers(model: PreTrainedModel) -> Iterator[torch.nn.Parameter]:
    """The weights of all routers."""
    roles = roles_of(model)
    for block in _blocks(model):
        if roles.mixture and has_mixture(block, roles):
            router: Any = block.get_submodule(joined(roles.mlp, roles.mixture.router))
            yield router.weight


def attached(model: PreTrainedModel) -> Program:
    """The program that a model keeps."""
    kept = model.get_submodule(ATTACHED)
    assert isinstance(kept, Attached)
    return kept.program


def program_of(model: PreTrainedModel) -> Program:
    """The program of a model that nothing refuses and whose layers and tables are packed."""
    config, roles = model.config, roles_of(model)
    decoder = model.get_submodule(roles.path)
    stack = _blocks(model)
    embedding = _table(decoder, roles.embedding)
    positions = None if roles.positions is None else _table(decoder, roles.positions)
    angles = angles_of(decoder, stack, roles, embedding.numbers.device)
    rotary_size = 2 * angles[0](1)[0].shape[1] if angles else 0
    kinds = _kinds(config)
    with embedding.numbers.device:  # weights of norms that have none
        blocks = tuple(
            _block(config, roles, block, index, kinds, len(angles)) for index, block in enumerate(stack)
        )
    head_size = head_size_of(stack[0].get_submodule(roles.attention))
    heads = blocks[0].output.inputs // head_size
    own_scale: torch.Tensor | None = getattr(getattr(decoder, roles.embedding), "embed_scale", None)
    scale = _number(config, roles.logit_scale, 1.0) / _number(config, roles.logit_divisor, 1.0)
    return Program(
        width=embedding.inputs,
        heads=heads,
        kv_heads=(sum(matrix.outputs for matrix in blocks[0].qkv) // head_size - heads) // 2,
        head_size=head_size,
        inner=next((block.mlp.up.outputs for block in blocks if isinstance(block.mlp, Mlp)), DECODE_TILE),
        vocabulary=embedding.outputs,
        context=_context(config) if positions is None else positions.outputs,
        activation=ACTIVATIONS[getattr(config, roles.activation)],
        embedding=embedding,
        positions=positions,
        rotaries=angles,
        blocks=blocks,
        final=_scaled(_norm(getattr(decoder, roles.final), roles), scale),
        head=_decode_linear(model, HEAD_PATH).matrix,
        rotary_size=rotary_size,
        neighbours=roles.neighbours,
        by_groups=roles.by_groups,
        parallel=is_parallel(config, roles),
        embedding_scale=float(own_scale)
        if own_scale is not None
        else _number(config, roles.embedding_scale, 1.0),
        residual_scale=_number(config, roles.residual_scale, 1.0),
        score_cap=_number(config, roles.score_cap, None),
        logit_cap=_number(config, roles.logit_cap, None),
    )


def roles_of(model: PreTrainedModel) -> Roles:
    """The roles of the modules of a model that nothing refuses."""
    return ROLES[model.config.model_type]


def expressed(roles: Roles) -> Fields:
    """What a program has of a family's configurations."""
    named = (
        *(roles.embedding_scale, roles.residual_scale, roles.logit_scale, roles.logit_divisor),
        *(roles.score_cap, roles.logit_cap, roles.parallel if isinstance(roles.parallel, str) else None),
    )
    mixture: Fields = roles.mixture.fields if roles.mixture else {}
    return EXPRESSED | mixture | roles.fields | {name: None for name in named if name}


def is_parallel(config: PreTrainedConfig, roles: Roles) -> bool:
    return bool(getattr(config, roles.parallel)) if isinstance(roles.parallel, str) else roles.parallel


def head_size_of(attention: Any) -> int:
    size: int = attention.head_dim if hasattr(attention, "head_dim") else attention.head_size
    return size


def _number(config: PreTrainedConfig, name: str | None, otherwise: Any) -> Any:
    """A field of the configuration, or what stands for none."""
    found = None if name is None else getattr(config, name)
    return otherwise if found is None else float(found)


def _context(config: PreTrainedConfig) -> int:
    """Tokens of a text. Angles of longrope are other ones beyond what the model was first trained with."""
    longest: int = config.max_position_embeddings
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") != "longrope":
        return longest
    first = parameters.get("original_max_position_embeddings")
    return min(longest, int(first or config.original_max_position_embeddings))


def _kinds(config: PreTrainedConfig) -> list[str] | None:
    """The kind of each layer where each kind has angles of its own."""
    own: list[str] | None = getattr(config, "layer_types", None)
    parameters = getattr(config, "rope_parameters", None) or {}
    return own if own and all(kind in parameters for kind in own) else None


def _decode_linear(parent: Module, path: str) -> DecodeLinear:
    found = parent.get_submodule(path)
    assert isinstance(found, DecodeLinear)
    return found


def _table(decoder: Module, name: str) -> Matrix:
    found = getattr(decoder, name)
    assert isinstance(found, DecodeTable)
    return found.matrix


def _block(
    config: PreTrainedConfig, roles: Roles, block: Module, index: int, kinds: list[str] | None, tables: int
) -> Block:
    attention: Any = block.get_submodule(roles.attention)
    qkv = [_decode_linear(attention, name) for name in roles.qkv]
    first, second = (_norm_at(block, name, roles) for name in (roles.first, roles.second))
    table = sorted(set(kinds)).index(kinds[index]) if kinds else 0
    is_turned = tables and (roles.turned_if is None or getattr(attention, roles.turned_if))
    return Block(
        first=first,
        qkv=joined_matrices(qkv),
        output=_decode_linear(attention, roles.output).matrix,
        second=second or (first if is_parallel(config, roles) else None),
        mlp=_mixture(config, roles, block.get_submodule(roles.mlp))
        if has_mixture(block, roles)
        else _mlp(block.get_submodule(roles.mlp), roles),
        scale=float(attention.scaling) if hasattr(attention, "scaling") else 1 / float(attention.scale_attn),
        # Some families have one window for all layers, others one for some of them.
        window=getattr(config if roles.window == "config" else attention, "sliding_window", None)
        if roles.window
        else None,
        rotary=table if is_turned else None,
        query_norm=_head_norm(attention, roles.query_norm, roles),
        key_norm=_head_norm(attention, roles.key_norm, roles),
        sinks=None if roles.sinks is None else getattr(attention, roles.sinks).detach().float(),
        after_attention=_norm_at(block, roles.after_attention, roles),
        after_mlp=_norm_at(block, roles.after_mlp, roles),
    )


def _mlp(mlp: Module, roles: Roles) -> Mlp:
    down = _decode_linear(mlp, roles.down).matrix
    if roles.gate_up is None:
        gate = None if roles.gate is None else _decode_linear(mlp, roles.gate).matrix
        return Mlp(gate, _decode_linear(mlp, roles.up).matrix, down)
    both = _decode_linear(mlp, roles.gate_up).matrix
    return Mlp(rows_of(both, 0, both.outputs // 2), rows_of(both, both.outputs // 2, both.outputs), down)


def _mixture(config: PreTrainedConfig, roles: Roles, module: Module) -> Mixture:
    its = roles.mixture
    assert its is not None
    router: Any = module.get_submodule(its.router)
    experts, bias = module.get_submodule(its.experts), getattr(router, "bias", None)
    lists = [part for _, part in experts.named_children() if isinstance(part, ModuleList)]
    layers = [[_decode_linear(part, str(number)) for number in range(len(part))] for part in lists]
    for part in layers:
        joined_matrices(part)  # in memory, where their operator wants that
    up, down = ([layer.matrix for layer in part] for part in layers)
    shared = None if its.shared is None else _mlp(module.get_submodule(its.shared), roles)
    choice_bias = None if its.choice_bias is None else getattr(router, its.choice_bias).detach().float()
    named = its.normalized
    return Mixture(
        router=packed(router.weight, bias, "bf16", 0),
        experts=tuple(Expert((first,), last) for first, last in zip(up, down, strict=True)),
        chosen=getattr(config, its.chosen),
        score=its.score,
        normalized=bool(getattr(config, named)) if isinstance(named, str) else named,
        scale=_number(config, its.scale, 1.0),
        choice_bias=choice_bias,
        shared=None
        if shared is None
        else Expert((*((shared.gate,) if shared.gate else ()), shared.up), shared.down),
        shared_gate=None if its.shared_gate is None else _decode_linear(module, its.shared_gate).matrix,
        pairs=its.clamp is not None,
        clamp=None if its.clamp is None else (getattr(config, its.clamp[0]), getattr(config, its.clamp[1])),
    )


def _norm_at(block: Module, name: str | None, roles: Roles) -> Norm | None:
    """The norm of that name, None where a block has none."""
    found = None if name is None else getattr(block, name, None)
    return None if found is None else _norm(found, roles)


def _norm(norm: Any, roles: Roles) -> Norm:
    kind: Literal["layer", "rms"] = "layer" if "LayerNorm" in type(norm).__name__ else "rms"
    epsilon: float = getattr(norm, "eps", getattr(norm, "variance_epsilon", roles.epsilon))
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    weight = torch.ones(norm.normalized_shape) if weight is None else weight.detach().float()
    return Norm(
        kind,
        weight + 1 if roles.one_plus else weight,
        None if bias is None else bias.detach().float(),
        epsilon,
    )


def _head_norm(attention: Any, name: str | None, roles: Roles) -> HeadNorm | None:
    """Of one weight for a head, of one for each head, or of one for all numbers of a token."""
    module = None if name is None else getattr(attention, name, None)
    if module is None:
        return None
    size, queries = head_size_of(attention), name == roles.query_norm
    outputs = [_decode_linear(attention, each).outputs for each in roles.qkv]
    count = outputs[0] if queries else outputs[1]
    parts = [_norm(each, roles) for each in getattr(module, "norms", [module])]
    weight = torch.cat([part.weight.flatten() for part in parts])
    biases = [part.bias.flatten() for part in parts if part.bias is not None]
    together = count if weight.dim() == 1 and len(parts) == 1 and module.weight.shape == (count,) else size
    repeats = count // weight.numel()
    bias = torch.cat(biases).repeat(repeats) if biases else None
    return HeadNorm(Norm(parts[0].kind, weight.repeat(repeats), bias, parts[0].epsilon), together)


def _scaled(norm: Norm, scale: float) -> Norm:
    """A norm whose outputs are `scale` times as large; a head without a bias then gives such logits."""
    if scale == 1:
        return norm
    bias = None if norm.bias is None else norm.bias * scale
    return replace(norm, weight=norm.weight * scale, bias=bias)


def angles_of(
    decoder: Module, stack: list[Module], roles: Roles, device: torch.device
) -> tuple[Callable[[int], RotaryTable], ...]:
    """For each kind of layer what gives the cosines and sines of a text; none where nothing is turned."""
    if roles.angles == "stored":
        attention: Any = stack[0].get_submodule(roles.attention)
        return (partial(_stored_angles, attention.embed_positions),)
    embedding: Any = getattr(decoder, "rotary_emb", None)
    if embedding is None:
        return ()
    kinds = _kinds(embedding.config)
    named: list[dict[str, str]] = [{"layer_type": kind} for kind in sorted(set(kinds))] if kinds else [{}]
    longest = _context(embedding.config)
    return tuple(partial(_angles, embedding, each, roles, longest, device) for each in named)


def _stored_angles(table: torch.Tensor, length: int) -> RotaryTable:
    sines, cosines = table[:length].float().chunk(2, dim=1)
    more = (0, 0, 0, length - len(sines))
    return torch.nn.functional.pad(cosines, more), torch.nn.functional.pad(sines, more)


def _angles(
    embedding: Any, kind: dict[str, str], roles: Roles, longest: int, device: torch.device, length: int
) -> RotaryTable:
    """Beyond the longest text zeros, which nothing reads."""
    positions = torch.arange(min(length, longest), device=device).unsqueeze(0)
    found = embedding(torch.empty(0, device=device), positions, **kind)
    once = slice(None, None, 2) if roles.neighbours else slice(found[0].shape[-1] // 2)
    pairs = slice(None) if roles.angles == "once" else once
    more = (0, 0, 0, max(0, length - longest))
    cosines, sines = (torch.nn.functional.pad(each[0, :, pairs], more).contiguous() for each in found)
    return cosines, sines


def _own_tensors(program: Program) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights and biases of all norms, sinks and routers, each with a name."""
    found: dict[str, torch.Tensor | None] = {}
    norms: dict[str, Norm | None] = {"final": program.final}
    for index, block in enumerate(program.blocks):
        found[f"block_{index}_sinks"] = block.sinks
        if isinstance(block.mlp, Mixture):
            router = block.mlp.router
            found |= {f"block_{index}_router": router.numbers, f"block_{index}_router_bias": router.bias}
            found[f"block_{index}_choice_bias"] = block.mlp.choice_bias
        parts = {name: getattr(block, name) for name in ("first", "second", "after_attention", "after_mlp")}
        heads = {name: getattr(block, name) for name in ("query_norm", "key_norm")}
        parts |= {name: each.norm for name, each in heads.items() if each is not None}
        norms |= {f"block_{index}_{name}": norm for name, norm in parts.items()}
    for name, norm in norms.items():
        if norm is not None:
            found |= {f"{name}_weight": norm.weight, f"{name}_bias": norm.bias}
    yield from ((name, tensor) for name, tensor in found.items() if tensor is not None)


def new_decoder(program: Program, kv: CacheKind) -> "Decoder":
    """A decoder on the device of the program's weights; on a CPU with as many threads as torch has."""
    if program.device.type != "cpu":
        from optigpu.ops.decode.cuda.decoder import CudaDecoder  # imports Triton

        return CudaDecoder(program, kv)
    return CpuDecoder(program, kv, threads=torch.get_num_threads(), cpus=one_cpu_of_each_core())


def placement_facts(decoder: "Decoder") -> dict[str, Any]:
    """On which memory nodes the weights lie; empty where there was no choice."""
    return decoder.placement.facts() if isinstance(decoder, CpuDecoder) and decoder.placement else {}
