"""CpuDecoder against plain torch with the same rounding, on every instruction set that this CPU has."""

import os
import resource
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optigpu.hardware.cpu import cpu_features
from optigpu.ops.decode.cpu.decoder import INSTRUCTION_SETS, CpuDecoder, CpuInstructions, best_instruction_set
from optigpu.ops.decode.cpu.packing import pack
from optigpu.ops.decode.program import (
    WEIGHT_KINDS,
    Block,
    CacheKind,
    FinerRows,
    Mlp,
    Program,
    Sampling,
    WeightKind,
)
from optigpu.vocabulary import ReplicateError, UnsupportedError
from tests.breadth import spread
from tests.engine.decode_reference import ReferenceDecoder, untied
from tests.engine.random_programs import (
    CONTEXT,
    LIKE_GEMMA,
    LIKE_GPT2,
    LIKE_LLAMA,
    LIKE_MIXTRAL,
    LIKE_NEOX,
    LIKE_OLMO,
    LIKE_OSS,
    Shape,
    random_program,
    tokens,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")  # the operator has its own threads
KINDS = [(kind, group) for kind in WEIGHT_KINDS for group in (32, 64, 128) if kind != "bf16" or group == 32]
SHAPES = {
    "gpt2": LIKE_GPT2,
    "gemma": LIKE_GEMMA,
    "neox": LIKE_NEOX,
    "olmo": LIKE_OLMO,
    "mixtral": LIKE_MIXTRAL,
    "oss": LIKE_OSS,
    "llama": LIKE_LLAMA,
}
CACHES: tuple[CacheKind, ...] = ("bf16", "int8", "int4")
PROMPT, STEPS = 9, 2
SMALL = Shape(width=64, heads=4, kv_heads=4, head_size=16, inner=96, vocabulary=50)


def instruction_sets() -> list[CpuInstructions]:
    features = set(cpu_features())
    needed = {
        "portable": set(),
        "avx2": {"avx2", "fma"},
        "avx512_vnni": {"avx512bw", "avx512vl", "avx512_vnni"},
        "arm_dot": {"asimddp"},
        "arm_i8mm": {"asimddp", "i8mm"},
    }
    return [name for name in INSTRUCTION_SETS if name != "best" and needed[name] <= features]


def dense(block: Block) -> Mlp:
    assert isinstance(block.mlp, Mlp)
    return block.mlp


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.abs().max())


def begun(program: Program, sequences: int = 1, **options: object) -> CpuDecoder:
    decoder = CpuDecoder(program, **options)  # type: ignore[arg-type]
    decoder.begin(sequences, CONTEXT)
    return decoder


# ---- The same numbers as plain torch.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "group", "family", "kv"), spread(KINDS, SHAPES, CACHES, by_default=5), ids=str
)
def test_the_logits_are_those_of_the_reference(
    kind: WeightKind, group: int, family: str, kv: CacheKind
) -> None:
    program = random_program(SHAPES[family], kind, group=group)
    given_tokens, expected = untied(program, kv, 1, PROMPT + STEPS)
    for name in instruction_sets():
        decoder = begun(program, kv=kv, threads=2, instruction_set=name)
        assert relative_error(decoder.extend(given_tokens[:, :PROMPT]), expected[PROMPT - 1]) < 1e-3, name
        for token, logits in zip(given_tokens[:, PROMPT:].split(1, dim=1), expected[PROMPT:], strict=True):
            assert relative_error(decoder.extend(token), logits) < 1e-3, name
        assert decoder.length == PROMPT + STEPS


@pytest.mark.slow
@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.data())
def test_any_shape_and_every_remainder_gives_the_logits_of_the_reference(data: st.DataObject) -> None:
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 3]))
    by_groups = data.draw(st.booleans())
    shape = Shape(
        rotary=data.draw(st.booleans()),
        width=16 * data.draw(st.integers(1, 7)),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_size=4 * data.draw(st.integers(1, 12)),
        inner=4 * data.draw(st.integers(3, 40)),
        vocabulary=data.draw(st.integers(2, 70)),
        blocks=data.draw(st.integers(1, 2)),
        window=data.draw(st.sampled_from([None, 1, 5, 17, 40])),
        activation=data.draw(st.sampled_from(["gelu_tanh", "gelu", "relu", "silu", "relu2"])),
        norms=data.draw(st.sampled_from(["before", "after", "both"])),
        head_norms=data.draw(st.sampled_from([None, "head", *([] if by_groups else ["whole"])])),
        rotary_size=data.draw(st.sampled_from([None, 4])),
        by_groups=by_groups,
        neighbours=data.draw(st.booleans()),
        parallel=data.draw(st.booleans()),
        alternates=data.draw(st.booleans()),
        sinks=data.draw(st.booleans()),
        scales=data.draw(st.sampled_from([(1.0, 1.0), (3.0, 0.3)])),
        caps=data.draw(st.sampled_from([(None, None), (2.0, 3.0)])),
    )
    program = random_program(shape, "bf16", seed=data.draw(st.integers(0, 99)))
    sequences, count = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 40))
    reference = ReferenceDecoder(program)
    reference.begin(sequences, CONTEXT)
    expected = reference.extend(tokens(shape, sequences, count))
    for name in instruction_sets():
        decoder = begun(program, sequences, threads=data.draw(st.integers(1, 3)), instruction_set=name)
        assert relative_error(decoder.extend(tokens(shape, sequences, count)), expected) < 1e-3


@pytest.mark.parametrize("outputs", spread(range(16, 50)))
def test_every_remainder_of_a_block_of_outputs(outputs: int) -> None:
    shape = SMALL._replace(vocabulary=outputs, blocks=1)
    for program in (random_program(shape, kind) for kind in WEIGHT_KINDS):
        given_tokens, expected = untied(program, "bf16", 1, 1)
        for name in instruction_sets():
            found = begun(program, instruction_set=name).extend(given_tokens)
            assert relative_error(found, expected[0]) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("shape", [LIKE_LLAMA, LIKE_OLMO], ids=["norms before", "norms after"])
def test_matrices_of_several_kinds_stand_in_one_program(shape: Shape) -> None:
    three, four, coded, five, six, eight, whole = (random_program(shape, kind) for kind in WEIGHT_KINDS)
    first = replace(
        four.blocks[0], qkv=(four.blocks[0].qkv[0], eight.blocks[0].qkv[1], whole.blocks[0].qkv[2])
    )
    mlps = [dense(each.blocks[1]) for each in (whole, coded, five)]
    second = replace(six.blocks[1], mlp=Mlp(mlps[0].gate, mlps[1].up, mlps[2].down))
    first = replace(first, output=three.blocks[0].output)
    mixed = replace(four, blocks=(first, second), head=eight.head, embedding=three.embedding)
    given_tokens, expected = untied(mixed, "bf16", 1, PROMPT)
    assert relative_error(begun(mixed, threads=2).extend(given_tokens), expected[-1]) < 1e-3


# ---- However it is called.


@pytest.fixture
def program() -> Program:
    return random_program(LIKE_LLAMA, "w4")


@pytest.mark.parametrize("sequences", [1, 3])
def test_threads_and_calls_change_nothing(program: Program, sequences: int) -> None:
    prompt = tokens(LIKE_LLAMA, sequences, 30)
    expected = begun(program, sequences, threads=1)
    logits = expected.extend(prompt)
    chosen = expected.decode(logits.argmax(1, keepdim=True), 8)
    for threads in (2, 3, 5):
        decoder = begun(program, sequences, threads=threads, cpus=sorted(os.sched_getaffinity(0)))
        assert torch.equal(decoder.extend(prompt), logits)
        assert torch.equal(decoder.decode(logits.argmax(1, keepdim=True), 8), chosen)
        assert torch.equal(decoder.logits, expected.logits)
    one_by_one = begun(program, sequences, threads=2)
    last = one_by_one.extend(prompt).argmax(1, keepdim=True)
    for step in range(8):
        last = one_by_one.decode(last, 1)
        assert torch.equal(last, chosen[:, step : step + 1])


@pytest.mark.parametrize("at_once", [3, 20])
def test_tokens_come_in_parts_as_they_come_at_once(program: Program, at_once: int) -> None:
    first = tokens(LIKE_LLAMA, 2, 1)
    decoder = begun(program, 2, threads=2)
    expected, logits = decoder.decode(first, 8), decoder.logits.clone()
    decoder.begin(2, CONTEXT)
    found = torch.zeros(2, 8, dtype=torch.int64)
    parts = list(decoder.decode_into(found, first, at_once))
    assert parts == [min(at_once, 8 - done) for done in range(0, 8, at_once)]
    assert torch.equal(found, expected)
    assert torch.equal(decoder.logits, logits)
    assert decoder.length == 8


def test_a_prompt_at_once_and_token_by_token_agree(program: Program) -> None:
    prompt = tokens(LIKE_LLAMA, 2, 40)
    at_once, stepwise = begun(program, 2), begun(program, 2)
    for token in prompt.split(1, dim=1):
        stepwise.extend(token)
    assert torch.equal(at_once.extend(prompt), stepwise.logits)


# ---- Sampling.


def drawn(
    program: Program, temperature: float, seed: int, sequences: int = 1, threads: int = 1
) -> torch.Tensor:
    decoder = begun(program, sequences, threads=threads)
    last = decoder.extend(tokens(SMALL, 1, 3).expand(sequences, -1)).argmax(1, keepdim=True)
    return decoder.decode(last, 20, Sampling(temperature, seed))


def test_a_seed_gives_the_same_text_and_another_seed_another() -> None:
    program = random_program(SMALL, "w8")
    assert torch.equal(drawn(program, 1.0, 7), drawn(program, 1.0, 7, threads=2))
    assert not torch.equal(drawn(program, 1.0, 7), drawn(program, 1.0, 8))
    assert torch.equal(drawn(program, 0.0, 7), drawn(program, 0.0, 8))
    assert drawn(program, 1.0, 7, sequences=8).unique(dim=0).shape[0] == 8


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_as_often_as_their_probability_says(temperature: float) -> None:
    program, sequences = random_program(SMALL, "w8"), 4000
    decoder = begun(program, sequences, threads=2)
    start = tokens(SMALL, 1, 1)
    found = decoder.decode(start.expand(sequences, 1), 1, Sampling(temperature, 3))
    expected = (decoder.logits[0].double() / temperature).softmax(0)
    counts = torch.bincount(found[:, 0], minlength=SMALL.vocabulary).double()
    likely = expected * sequences > 5
    squares = ((counts - expected * sequences).square() / (expected * sequences))[likely].sum()
    # The 0.9999 quantile of chi-square with so many degrees of freedom, by Wilson and Hilferty (1931).
    degrees = int(likely.sum())
    assert degrees > 5
    assert squares < degrees * (1 - 2 / (9 * degrees) + 3.72 * (2 / (9 * degrees)) ** 0.5) ** 3


# ---- What goes wrong is said.


def test_a_position_beyond_the_cache_is_refused_and_nothing_is_lost(program: Program) -> None:
    decoder = CpuDecoder(program)
    decoder.begin(1, 10)
    decoder.extend(tokens(LIKE_LLAMA, 1, 10))
    with pytest.raises(ReplicateError, match="Position 10 is out of range: the cache has room for 10 tokens"):
        decoder.extend(tokens(LIKE_LLAMA, 1, 1))
    assert decoder.length == 10
    decoder.begin(1, 1000)
    with pytest.raises(ReplicateError, match=f"Position {CONTEXT} is out of range"):
        decoder.extend(tokens(LIKE_LLAMA, 1, CONTEXT + 1))


POISON = 202


def poisoned(program: Program, value: float) -> Program:
    """With a token that is no number."""
    assert program.embedding.unit is not None
    unit = program.embedding.unit.clone()
    unit.view(-1)[POISON] = value
    return replace(program, embedding=replace(program.embedding, unit=unit))


@pytest.mark.parametrize(
    ("value", "threads", "count"),
    spread([float("nan"), float("inf"), float("-inf")], [1, 3], [1, 20], by_default=3),
)
def test_numbers_that_are_not_finite_are_found(
    program: Program, value: float, threads: int, count: int
) -> None:
    decoder = begun(poisoned(program, value), threads=threads)
    fine = tokens(LIKE_LLAMA, 1, count) % POISON
    expected = decoder.extend(fine)
    bad = fine.clone()
    bad[0, -1] = POISON
    with pytest.raises(ReplicateError, match="no longer finite in block 0"):
        decoder.extend(bad)
    assert decoder.length == count
    decoder.begin(1, CONTEXT)
    assert torch.equal(decoder.extend(fine), expected)


def test_numbers_that_overflow_on_the_way_are_found() -> None:
    program = random_program(SMALL, "bf16")
    block, mlp = program.blocks[1], dense(program.blocks[1])
    huge = replace(mlp, down=replace(mlp.down, numbers=torch.full_like(mlp.down.numbers, 3e38)))
    broken = replace(program, blocks=(program.blocks[0], replace(block, mlp=huge)))
    with pytest.raises(ReplicateError, match="no longer finite before the head"):
        begun(broken, threads=2).extend(tokens(SMALL, 1, 3))


@pytest.mark.parametrize(
    ("given_tokens", "sentence"),
    [
        (torch.tensor([[50]]), r"Token id 50 is out of range: this model's ids are 0 to 49\."),
        (torch.tensor([[-1]]), "Token id -1 is out of range"),
        (torch.tensor([[1.0]]), r"needs int64 \[1, count\] tokens, not float32 \[1, 1\]"),
        (torch.tensor([[1], [2]]), r"not int64 \[2, 1\]"),
        (torch.tensor([1]), r"not int64 \[1\]"),
        (torch.empty(1, 0, dtype=torch.int64), "at least one token"),
    ],
)
def test_wrong_tokens_are_refused(given_tokens: torch.Tensor, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        begun(random_program(SMALL, "w8")).extend(given_tokens)


def test_calls_that_make_no_sense_are_refused() -> None:
    program = random_program(SMALL, "w8")
    with pytest.raises(ValueError, match="at least one thread"):
        CpuDecoder(program, threads=0)
    decoder = CpuDecoder(program)
    with pytest.raises(ValueError, match="call begin first"):
        decoder.extend(tokens(SMALL, 1, 1))
    decoder.begin(1, 5)
    one, gaps = tokens(SMALL, 1, 1), torch.zeros(1, 4).long()[:, ::2]
    calls: dict[str, Callable[[], object]] = {
        "at least one sequence and one token, not 0 sequences of 5 tokens": lambda: decoder.begin(0, 5),
        "no logits before the first step": lambda: decoder.logits,
        "at least one step": lambda: decoder.decode(one, 0),
        "the last token": lambda: decoder.decode(tokens(SMALL, 1, 2), 1),
        "fills a contiguous int64": lambda: list(decoder.decode_into(gaps, one, 1)),
        "temperature must be": lambda: decoder.decode(one, 1, Sampling(float("nan"))),
    }
    for sentence, call in calls.items():
        with pytest.raises(ValueError, match=sentence):
            call()


def test_programs_that_do_not_fit_together_are_refused() -> None:
    program, other = random_program(SMALL, "w8"), random_program(LIKE_GPT2, "w8")
    block, mlp = program.blocks[1], dense(program.blocks[1])
    block = replace(block, mlp=replace(mlp, down=mlp.up))
    for sentence, wrong in {
        "head must be 50 x 64, not 203 x 128": replace(program, head=other.head),
        "embedding must be 50 x 64, not 203 x 128": replace(program, embedding=other.embedding),
        "positions must be 64 x 64, not 64 x 128": replace(program, positions=other.positions),
        "Block 1: down must be 64 x 96, not 96 x 64": replace(program, blocks=(program.blocks[0], block)),
        "divide its 64 inputs, not of 48": replace(program, head=replace(program.head, group=48)),
        "the same group size": replace(program, head=replace(program.head, group=64, finer=None)),
        "head_size must be a multiple of 4 and at most 512, not 6": replace(program, head_size=6),
    }.items():
        with pytest.raises(ValueError, match=sentence):
            CpuDecoder(wrong)


@pytest.mark.parametrize(
    ("rows", "kind", "group"),
    [([4, 1], "w8", 32), ([1, 1], "w8", 32), ([-1, 1], "w8", 32), ([1, 50], "w8", 32), ([1, 4], "w4", 64)],
    ids=str,
)
def test_finer_rows_that_do_not_fit_are_refused(rows: list[int], kind: WeightKind, group: int) -> None:
    program = random_program(SMALL, "w8")
    finer = FinerRows(torch.tensor(rows), pack(torch.ones(2, 64), None, kind, group))
    refined = replace(program.head, finer=finer)
    for table, wrong in {
        "head": replace(program, head=refined),
        "embedding": replace(program, embedding=refined),
    }.items():
        with pytest.raises(ValueError, match=f"{table} needs finer rows in ascending order, of its own kind"):
            CpuDecoder(wrong)


def test_a_cache_that_cannot_be_had_is_refused_and_the_decoder_lives_on() -> None:
    decoder = CpuDecoder(random_program(SMALL, "w8"))
    with pytest.raises(UnsupportedError, match="not enough memory for a cache of 1099511627776 tokens"):
        decoder.begin(1, 2**40)
    decoder.begin(1, 5)
    assert decoder.extend(tokens(SMALL, 1, 1)).isfinite().all()


def claimed(program: Program, outputs: int) -> Program:
    """With a head that claims that many outputs without having allocated them."""
    head = replace(program.head, outputs=outputs)
    return replace(program, vocabulary=outputs, head=head, embedding=head)


def test_more_outputs_than_the_threads_can_share_are_refused() -> None:
    program, most = random_program(SMALL, "w8"), 16 * (2**24 - 1)
    with pytest.raises(
        ValueError, match=f"head has {most + 16} outputs; the CPU decoder takes at most {most}"
    ):
        CpuDecoder(claimed(program, most + 1))
    block = program.blocks[0]
    heads = most // 16 + 1
    wide = replace(block.qkv[0], outputs=3 * 16 * heads), replace(block.output, inputs=16 * heads)
    huge = replace(
        program, heads=heads, kv_heads=heads, blocks=(replace(block, qkv=wide[:1], output=wide[1]),)
    )
    with pytest.raises(ValueError, match=f"Block 0: qkv has {48 * heads} outputs"):
        CpuDecoder(huge)


def test_activations_that_find_no_memory_are_an_error_and_no_crash() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS, (used + 2**28, limit[1])
    )  # the logits of so many outputs take 2**30
    try:
        with pytest.raises(UnsupportedError, match="not enough memory for the decoder's activations"):
            CpuDecoder(claimed(random_program(SMALL, "w8"), 2**28 - 16))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)


def test_a_forked_child_is_told_that_the_threads_are_not_its_own() -> None:
    decoder = begun(random_program(SMALL, "w8"), threads=2)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # newer Pythons advise against what is tested here
        child = os.fork()
    if child == 0:
        try:
            decoder.extend(tokens(SMALL, 1, 1))
        except ValueError as error:
            os._exit(0 if "forked" in str(error) else 2)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_instruction_set_that_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INSTRUCTION_SETS, "avx2", 9)  # which no CPU has
    with pytest.raises(ValueError, match="This CPU lacks the instruction set that was asked for"):
        CpuDecoder(random_program(SMALL, "w8"), instruction_set="avx2")


def test_the_best_instruction_set_is_one_that_there_is() -> None:
    assert best_instruction_set() == instruction_sets()[-1]


# ---- Threads.


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@pytest.mark.slow
def test_threads_sleep_when_there_is_nothing_to_do() -> None:
    decoder = begun(random_program(SMALL, "w8"), threads=4)
    decoder.extend(tokens(SMALL, 1, 1))
    time.sleep(0.05)
    before = cpu_seconds()
    time.sleep(1.0)
    assert cpu_seconds() - before < 0.3
    assert decoder.extend(tokens(SMALL, 1, 1)).isfinite().all()


def test_the_caller_may_go_where_it_could_before() -> None:
    before = os.sched_getaffinity(0)
    begun(random_program(SMALL, "w8"), threads=2, cpus=sorted(before)).extend(tokens(SMALL, 1, 1))
    assert os.sched_getaffinity(0) == before


def test_a_decoder_that_is_gone_leaves_no_threads() -> None:
    def count() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    before = count()
    decoder = begun(random_program(SMALL, "w8"), threads=6)
    assert count() == before + 5
    del decoder
    assert count() == before
