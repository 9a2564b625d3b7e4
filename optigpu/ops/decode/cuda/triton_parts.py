"""The parts of a decode step of one sequence as a persistent kernel has them: those of the other kernels, with weights
that are found by their addresses (step_plan.py), among programs that stay.

Strings and parts of a plan get a name before they are passed on: Triton 3.6 makes constants of numbers only.

Imported only where a GPU is used, because it loads Triton.
"""

import triton
import triton.language as tl

from optigpu.ops.decode.cuda.triton_attention import attend_part, join_head
from optigpu.ops.decode.cuda.triton_barrier import arrive, wait
from optigpu.ops.decode.cuda.triton_embedding import EMBEDDED, embed_block
from optigpu.ops.decode.cuda.triton_linear import linear_kernel
from optigpu.ops.decode.cuda.triton_steps import query_key_value_kernel

BLOCK = tl.constexpr(EMBEDDED)


@triton.jit
def tensor_at(addresses, place, TYPE: tl.constexpr):
    return tl.multiple_of(tl.load(addresses + place).to(tl.pointer_type(TYPE)), 16)


@triton.jit
def _matrix_at(addresses, MATRIX: tl.constexpr, NUMBERS: tl.constexpr):
    """Numbers, scales, units and biases."""
    return (
        tensor_at(addresses, MATRIX.place, NUMBERS),
        tensor_at(addresses, MATRIX.place + 1, tl.int8),
        tensor_at(addresses, MATRIX.place + 2, tl.bfloat16),
        tensor_at(addresses, MATRIX.place + 3, tl.float32),
    )


@triton.jit
def _table_at(addresses, TABLE: tl.constexpr):
    """The numbers of w4 and w8 byte by byte, as `embed_block` wants them."""
    if TABLE.kind == "bf16":
        numbers, scale, unit, _ = _matrix_at(addresses, TABLE, tl.bfloat16)
    elif TABLE.kind == "w4" or TABLE.kind == "w8":
        numbers, scale, unit, _ = _matrix_at(addresses, TABLE, tl.int8)
    else:
        numbers, scale, unit, _ = _matrix_at(addresses, TABLE, tl.int32)
    return numbers, scale, unit


@triton.jit
def embedded(program, programs, tokens, position, finer_places, x, addresses, PLAN: tl.constexpr):
    TABLE: tl.constexpr = PLAN.embedding
    KIND: tl.constexpr = TABLE.kind
    FINER: tl.constexpr = TABLE if PLAN.finer_embedding is None else PLAN.finer_embedding
    POSITIONS: tl.constexpr = TABLE if PLAN.positions is None else PLAN.positions
    POSITIONS_KIND: tl.constexpr = "none" if PLAN.positions is None else PLAN.positions.kind
    numbers, scale, unit = _table_at(addresses, TABLE)
    finer_numbers, finer_scale, finer_unit = _table_at(addresses, FINER)
    positions_numbers, positions_scale, positions_unit = _table_at(addresses, POSITIONS)
    for block in range(program, tl.cdiv(TABLE.inputs, BLOCK), programs):
        embed_block(
            0,
            block,
            tokens,
            position,
            numbers,
            scale,
            unit,
            finer_places,
            finer_numbers,
            finer_scale,
            finer_unit,
            positions_numbers,
            positions_scale,
            positions_unit,
            x,
            KIND,
            TABLE.group,
            PLAN.finer_embedding is not None,
            POSITIONS_KIND,
            POSITIONS.group,
            TABLE.inputs,
            BLOCK,
        )


@triton.jit
def product(
    addresses,
    x,
    y,
    best_value,
    best_index,
    arrivals,
    ticket,
    PHASE: tl.constexpr,
    DP4A: tl.constexpr,
    BEST: tl.constexpr,
):
    """y from x, once all programs have arrived."""
    MATRIX: tl.constexpr = PHASE.matrix
    GATE: tl.constexpr = PHASE.gate
    NORM: tl.constexpr = PHASE.norm
    KIND: tl.constexpr = MATRIX.kind
    NORM_KIND: tl.constexpr = NORM.kind
    ACTIVATION: tl.constexpr = PHASE.activation
    INTO: tl.constexpr = PHASE.into
    NUMBERS: tl.constexpr = tl.bfloat16 if KIND == "bf16" else tl.int32
    numbers, scale, unit, bias = _matrix_at(addresses, MATRIX, NUMBERS)
    gate_numbers, gate_scale, gate_unit, gate_bias = _matrix_at(addresses, GATE, NUMBERS)
    linear_kernel(
        x,
        tensor_at(addresses, NORM.place, tl.float32),
        tensor_at(addresses, NORM.place + 1, tl.float32),
        NORM.epsilon,
        numbers,
        scale,
        unit,
        bias,
        gate_numbers,
        gate_scale,
        gate_unit,
        gate_bias,
        y,
        best_value,
        best_index,
        1,
        MATRIX.outputs,
        KIND,
        MATRIX.group,
        MATRIX.inputs,
        PHASE.padded,
        MATRIX.bias,
        DP4A,
        NORM_KIND,
        NORM.bias,
        PHASE.gated,
        GATE.bias,
        ACTIVATION,
        INTO,
        BEST,
        1,
        PHASE.tile,
        arrivals,
        ticket,
    )


@triton.jit
def queries_keys_values(
    addresses,
    x,
    cosine,
    sine,
    position,
    query,
    keys,
    values,
    fresh,
    capacity,
    arrivals,
    ticket,
    PHASE: tl.constexpr,
    HEADS: tl.constexpr,
    DP4A: tl.constexpr,
):
    """To the queries and the cache, once all programs have arrived."""
    MATRIX: tl.constexpr = PHASE.matrix
    NORM: tl.constexpr = PHASE.norm
    KIND: tl.constexpr = MATRIX.kind
    NORM_KIND: tl.constexpr = NORM.kind
    NUMBERS: tl.constexpr = tl.bfloat16 if KIND == "bf16" else tl.int32
    numbers, scale, unit, bias = _matrix_at(addresses, MATRIX, NUMBERS)
    query_key_value_kernel(
        x,
        tensor_at(addresses, NORM.place, tl.float32),
        tensor_at(addresses, NORM.place + 1, tl.float32),
        NORM.epsilon,
        numbers,
        scale,
        unit,
        bias,
        cosine,
        sine,
        position,
        query,
        keys,
        values,
        fresh,
        1,
        MATRIX.outputs,
        0,
        HEADS.heads,
        HEADS.kv_heads,
        capacity,
        KIND,
        MATRIX.group,
        MATRIX.inputs,
        PHASE.padded,
        MATRIX.bias,
        DP4A,
        NORM_KIND,
        NORM.bias,
        HEADS.head_size,
        HEADS.rotary,
        HEADS.int8,
        1,
        PHASE.tile,
        arrivals,
        ticket,
    )


@triton.jit
def attention(
    program,
    programs,
    query,
    fresh,
    keys,
    values,
    key_steps,
    value_steps,
    position,
    sums,
    tops,
    totals,
    attended,
    capacity,
    arrivals,
    HEADS: tl.constexpr,
):
    """Its two passes, the parts of all heads among the programs and then the heads; nobody waits before or after."""
    for item in range(program, HEADS.kv_heads * HEADS.parts, programs):
        head = item // HEADS.parts
        part = item % HEADS.parts
        attend_part(
            head,
            part,
            HEADS.parts,
            query,
            fresh,
            keys,
            values,
            key_steps,
            value_steps,
            position,
            sums,
            tops,
            totals,
            HEADS.scale,
            capacity,
            HEADS.kv_heads,
            HEADS.window,
            HEADS.sharing,
            HEADS.members,
            HEADS.head_size,
            HEADS.padded,
            HEADS.tokens,
            HEADS.int8,
        )
    wait(arrivals, arrive(arrivals, program, programs))
    for head in range(program, HEADS.heads, programs):
        join_head(head, sums, tops, totals, attended, HEADS.head_size, HEADS.padded, HEADS.parts)


@triton.jit
def spread(program, programs, finer, finer_places, logits, OUTPUTS: tl.constexpr):
    """logits: `finer` at the rows that have one, 0 at others."""
    for start in range(program * BLOCK, OUTPUTS, programs * BLOCK):
        output = start + tl.arange(0, BLOCK)
        inside = output < OUTPUTS
        place = tl.load(finer_places + output, mask=inside, other=-1)
        tl.store(logits + output, tl.load(finer + place, mask=place >= 0, other=0.0), mask=inside)
