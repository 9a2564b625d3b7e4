"""A whole decode step of one sequence as one kernel: its programs stay for all of the step, and wait for each other
where one needs what others have stored.

The parts are those of the kernels that decode_step.py launches one by one. While a program waits, its first weights of
the next product are on their way.

Imported only where a GPU is used, because it loads Triton.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from optigpu.ops.decode.cuda.example_programs import CONTEXT, SCENES
from optigpu.ops.decode.cuda.step_memory import StepMemory
from optigpu.ops.decode.cuda.step_plan import WARPS, Division, planned
from optigpu.ops.decode.cuda.triton_barrier import arrive, wait
from optigpu.ops.decode.cuda.triton_parts import (
    attention,
    embedded,
    product,
    queries_keys_values,
    spread,
    tensor_at,
)
from optigpu.ops.decode.cuda.triton_steps import choose_kernel
from optigpu.ops.decode.program import Program
from optigpu.ops.kernel import Example, KernelCall
from optigpu.ops.launch import LaunchTarget


def step_call(program: Program, memory: StepMemory, division: Division) -> KernelCall:
    """A step of one sequence. Raises UnsupportedError as `planned` does."""
    plan, addresses = planned(program, memory, division)
    state, parts, x = memory.state, memory.parts, memory.x
    cosine, sine = (x, x) if memory.rotary is None else memory.rotary
    best = torch.zeros(1, division.programs, device=x.device)
    arguments = (
        *(state.tokens, state.position, state.not_finite, state.chosen),
        *(x, memory.query, parts.sums, parts.tops, parts.totals, memory.attended, memory.inner),
        *(memory.logits, memory.finer, memory.finer_places),
        *(best, torch.zeros_like(best, dtype=torch.int32), cosine, sine),
        torch.tensor(addresses, dtype=torch.int64).to(x.device),
        torch.zeros(1, dtype=torch.int32, device=x.device),
        *(len(memory.layers), state.chosen.shape[1]),
    )
    grid = (division.programs,)
    return KernelCall(_decode_step, grid, arguments, {"PLAN": plan}, WARPS, cooperative=True)


def examples(target: LaunchTarget) -> Iterator[Example]:
    """Steps of Llama 3 and of GPT-2."""
    for scene in SCENES:
        program = scene.program
        memory = StepMemory.of(program, scene.kv, 1, CONTEXT, target)
        call = step_call(program, memory, Division.of(target))
        yield Example(scene.name, call, scene.spilled_bytes)


@triton.jit
def _decode_step(
    tokens,
    position,
    not_finite,
    chosen,
    x,
    query,
    sums,
    tops,
    totals,
    attended,
    inner,
    logits,
    finer,
    finer_places,
    best_value,
    best_index,
    cosine,
    sine,
    addresses,
    arrivals,
    layers,
    capacity,
    PLAN: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    PARTS: tl.constexpr = PLAN.block
    QKV: tl.constexpr = PARTS.qkv
    HEADS: tl.constexpr = PARTS.attention
    OUTPUT: tl.constexpr = PARTS.output
    UP: tl.constexpr = PARTS.up
    DOWN: tl.constexpr = PARTS.down
    FINER: tl.constexpr = PLAN.finer
    HEAD: tl.constexpr = PLAN.head
    DP4A: tl.constexpr = PLAN.dp4a
    embedded(program, programs, tokens, position, finer_places, x, addresses, PLAN)
    ticket = arrive(arrivals, program, programs)
    for layer in range(layers):
        own = addresses + PLAN.shared + layer * PARTS.addresses
        CACHE: tl.constexpr = tl.int8 if HEADS.int8 else tl.bfloat16
        keys = tensor_at(own, HEADS.place, CACHE)
        values = tensor_at(own, HEADS.place + 1, CACHE)
        key_steps = tensor_at(own, HEADS.place + 2, tl.float32)
        value_steps = tensor_at(own, HEADS.place + 3, tl.float32)
        fresh = tensor_at(own, HEADS.place + 4, tl.float32)
        queries_keys_values(
            own,
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
            QKV,
            HEADS,
            DP4A,
        )
        wait(arrivals, arrive(arrivals, program, programs))
        attention(
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
            HEADS,
        )
        ticket = arrive(arrivals, program, programs)
        product(own, attended, x, x, x, arrivals, ticket, OUTPUT, DP4A, False)
        ticket = arrive(arrivals, program, programs)
        product(own, x, inner, x, x, arrivals, ticket, UP, DP4A, False)
        ticket = arrive(arrivals, program, programs)
        product(own, inner, x, x, x, arrivals, ticket, DOWN, DP4A, False)
        ticket = arrive(arrivals, program, programs)
    if FINER is not None:
        product(addresses, x, finer, x, x, arrivals, ticket, FINER, DP4A, False)
        wait(arrivals, arrive(arrivals, program, programs))
        spread(program, programs, finer, finer_places, logits, PLAN.embedding.outputs)
        ticket = arrive(arrivals, program, programs)
    product(addresses, x, logits, best_value, best_index, arrivals, ticket, HEAD, DP4A, True)
    ticket = arrive(arrivals, program, programs)
    if program == 0:  # the others have nothing left to do
        wait(arrivals, ticket)
        choose_kernel(
            best_value, best_index, tokens, position, not_finite, chosen, programs, capacity, PLAN.choices
        )
