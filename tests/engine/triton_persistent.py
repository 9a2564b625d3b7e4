"""Scenes for a decode step as one kernel, and what each must show; run in processes of their own as triton_decode.py.

In the interpreter a kernel has one program, or several that take turns where they wait (triton_turns.py). What the
barrier adds up to is shown arrival by arrival. That programs which run at once meet is for tests/gpu.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import triton
import triton.language as tl

from optigpu.ops.decode.cuda.decode_step import CudaDecodeStep
from optigpu.ops.decode.cuda.packing import joined_program, pack_for_cuda
from optigpu.ops.decode.cuda.persistent_step import PersistentDecodeStep
from optigpu.ops.decode.cuda.step_memory import StepMemory
from optigpu.ops.decode.cuda.step_plan import Division
from optigpu.ops.decode.cuda.triton_barrier import arrive, passed
from optigpu.ops.decode.cuda.triton_persistent import step_call
from optigpu.ops.decode.program import CacheKind, Program, WeightKind
from optigpu.ops.kernel import KernelCall
from optigpu.ops.launch import WARPS_A_MULTIPROCESSOR, LaunchTarget
from optigpu.vocabulary import UnsupportedError
from tests.engine.triton_decode import CACHES, KINDS, Draw, fill, tiny_program
from tests.engine.triton_turns import run_in_turns

CAPACITY, STEPS, FEW_STEPS = 8, 4, 2
"""Past the window of Llama's blocks, and so many that a token reads another one's keys."""
ALIKE: tuple[WeightKind, ...] = ("w8", "w4k", "bf16", "w4")
"""Of GPT-2's four matrices: each block has the same."""
HIGHEST_BIT, ROUNDS = 2**31, 3
LONG = 400
"""Tokens of a cache that attention takes in several parts."""


def program_of(family: str, kinds: tuple[WeightKind, ...], device: str = "cpu", blocks: int = 2) -> Program:
    return joined_program(tiny_program(pack_for_cuda, family, kinds, device, blocks))


def persistent_steps() -> None:
    """Bit by bit those of the kernels that are launched one by one: each format of weights, both caches by turns."""
    for index, (kind, family) in enumerate(itertools.product(KINDS, ("llama", "gpt2"))):
        steps = STEPS if family == "llama" else FEW_STEPS
        assert_same_steps(program_of(family, (kind,), blocks=1), CACHES[index // 2 % 2 ^ index % 2], steps)
    assert_same_steps(program_of("gpt2", ALIKE), "bf16", FEW_STEPS)
    assert_same_steps(program_of("llama", ("w4",), blocks=3), "int8", FEW_STEPS)


def assert_same_steps(program: Program, kv: CacheKind, steps: int) -> None:
    launched, one = CudaDecodeStep(program, kv, 1, CAPACITY), PersistentDecodeStep(program, kv, CAPACITY)
    for step in (launched, one):
        step.state.tokens.fill_(7)
    for position in range(steps):
        launched.run()
        one.run()
        assert torch.equal(one.logits, launched.logits), (kv, position)
        for name in ("tokens", "position", "not_finite"):
            assert torch.equal(getattr(one.state, name), getattr(launched.state, name)), (name, position)
    assert torch.equal(one.state.chosen[:, :steps], launched.state.chosen[:, :steps])
    for mine, other in zip(one.layers, launched.layers, strict=True):
        assert torch.equal(mine.keys[:, :, :steps], other.keys[:, :, :steps])
        assert torch.equal(mine.values[:, :, :steps], other.values[:, :, :steps])


def programs_in_turns() -> None:
    """Several programs share the work, and none reads what another has not written, in whatever order they come."""
    gpt2, llama = program_of("gpt2", ("w4",)), program_of("llama", ("bf16",))
    assert_shared(gpt2, "bf16", capacity=CAPACITY, position=0, programs=3)
    assert_shared(llama, "int8", capacity=LONG, position=LONG - 3, programs=5)
    assert_shared(llama, "bf16", capacity=LONG, position=LONG - 3, programs=2)
    step, call = shared_step(llama, "bf16", LONG, 5)
    begin_at(step, LONG - 3)
    expected = launched_logits(step, llama, "bf16")
    run_in_turns(call, seed=0, waiting=False)
    assert not torch.allclose(step.logits, expected, rtol=0, atol=0.01)  # the test notices who does not wait


def assert_shared(program: Program, kv: CacheKind, capacity: int, position: int, programs: int) -> None:
    """Up to the order of sums: attention has more parts for more programs."""
    step, call = shared_step(program, kv, capacity, programs)
    assert (step.parts.tops.shape[1] > 1) == (capacity == LONG)
    begin_at(step, position)
    for seed in range(3):
        expected = launched_logits(step, program, kv)
        run_in_turns(call, seed)
        error = float((step.logits - expected).abs().max() / expected.abs().max())
        assert error <= 1e-5, (kv, programs, seed, error)
        assert int(step.state.tokens) == int(expected.argmax())


def shared_step(
    program: Program, kv: CacheKind, capacity: int, programs: int
) -> tuple[StepMemory, KernelCall]:
    target = LaunchTarget(warps=programs * WARPS_A_MULTIPROCESSOR, dp4a=False, loads=1)
    memory = StepMemory.of(program, kv, 1, capacity, target)
    return memory, step_call(program, memory, Division(target, programs))


def begin_at(memory: StepMemory, position: int) -> None:
    """With a cache of random numbers before the position, and buffers that show who reads what nobody has written."""
    draw = Draw(position)
    for layer in memory.layers:
        fill(layer, draw)
    memory.state.tokens.fill_(7)
    memory.state.position.fill_(position)
    parts = memory.parts
    for buffer in (
        memory.x,
        memory.query,
        memory.attended,
        memory.inner,
        parts.sums,
        parts.tops,
        parts.totals,
    ):
        buffer.fill_(-3)


def launched_logits(memory: StepMemory, program: Program, kv: CacheKind) -> torch.Tensor:
    """Of the step from that state, by kernels that are launched one by one."""
    step = CudaDecodeStep(program, kv, 1, memory.state.chosen.shape[1])
    step.state.tokens.copy_(memory.state.tokens)
    step.state.position.copy_(memory.state.position)
    for mine, other in zip(step.layers, memory.layers, strict=True):
        for name in ("keys", "values", "key_steps", "value_steps"):
            if getattr(mine, name) is not None:
                getattr(mine, name).copy_(getattr(other, name))
    step.run()
    return step.logits


def persistent_states() -> None:
    """Positions may be set back, and a logit that is not finite is noticed."""
    program = program_of("gpt2", ("bf16",), blocks=1)
    step = PersistentDecodeStep(program, "bf16", CAPACITY)
    texts = []
    for _ in range(2):
        step.reset()
        step.state.tokens.fill_(7)
        for _ in range(STEPS):
            step.run()
        texts.append((step.state.chosen[:, :STEPS].clone(), step.logits.clone()))
    assert torch.equal(texts[0][0], texts[1][0])
    assert torch.equal(texts[0][1], texts[1][1])
    assert not step.state.not_finite.any()
    nowhere = torch.full_like(program.embedding.numbers, torch.nan)
    broken = replace(program, embedding=replace(program.embedding, numbers=nowhere))
    step = PersistentDecodeStep(broken, "bf16", CAPACITY)
    step.run()
    assert step.state.not_finite.all()


def persistent_refusals() -> None:
    gpt2, llama = program_of("gpt2", ("w4",)), program_of("llama", ("w4",))
    first, second = llama.blocks
    others = program_of("llama", ("w8",)).blocks[1]
    apart = tiny_program(pack_for_cuda, "llama", ("w8", "w4", "bf16"))
    crooked = torch.empty(97)[1:].copy_(gpt2.final.weight)
    gated = replace(second, gate=others.gate)
    target = LaunchTarget(warps=2, dp4a=False)
    scenes: tuple[tuple[Program, str], ...] = (
        (replace(llama, blocks=(first, others)), "blocks that are all alike"),
        (replace(llama, blocks=(first, replace(second, window=4))), "blocks that are all alike"),
        (joined_program(apart), "queries, keys and values of one format"),
        (replace(llama, blocks=(gated, gated)), "a gate of the format of the matrix beside it: w8 is not w4"),
        (replace(gpt2, final=replace(gpt2.final, weight=crooked)), "weights aligned to 16 bytes"),
    )
    for program, words in scenes:
        refused(partial(PersistentDecodeStep, program, "bf16", CAPACITY), words)
    two = partial(PersistentDecodeStep, gpt2, "bf16", CAPACITY, Division(target, programs=2))
    refused(two, "of 2 programs would wait for ever: 1 of them run at once on cpu")


def refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        call()


@triton.jit
def arrive_once(arrivals, tickets, program, programs):
    tl.store(tickets + program, arrive(arrivals, program, programs))


@triton.jit
def look(arrivals, tickets, found, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(found + place, passed(arrivals, tl.load(tickets + place)).to(tl.int32))


def rounds_of_arrivals() -> None:
    """In whatever order programs arrive, nobody passes before the last one has, all do then, and the next round can
    begin without a reset; so can another launch with other programs."""
    orders = random.Random(0)
    arrivals = torch.zeros(1, dtype=torch.int32)
    for programs in (1, 2, 3, 8, 132):
        for round_ in range(ROUNDS):
            order = list(range(programs))
            if round_:
                orders.shuffle(order)
            assert_meets(arrivals, order)


def assert_meets(arrivals: torch.Tensor, order: list[int]) -> None:
    programs, before = len(order), int(arrivals)
    count = triton.next_power_of_2(programs)
    tickets, found = torch.full((count,), before, dtype=torch.int32), torch.empty(count, dtype=torch.int32)
    for arrived, program in enumerate(order, start=1):
        arrive_once[(1,)](arrivals, tickets, program, programs)
        look[(1,)](arrivals, tickets, found, count)
        assert found[:programs].tolist() == [int(arrived == programs)] * programs, (programs, arrived)
    assert (int(arrivals) - before) % 2**32 == HIGHEST_BIT
