"""Sequences of different lengths in one pass of CpuDecoder: bit by bit what each of them is alone."""

import random
from collections.abc import Sequence

import pytest
import torch

from optigpu.ops.decode.cpu.decoder import CpuDecoder, CpuInstructions, Part
from optigpu.ops.decode.program import CacheKind, Program, WeightKind
from optigpu.vocabulary import ReplicateError, UnsupportedError
from tests.breadth import cases, spread
from tests.engine.random_programs import CONTEXT, LIKE_GPT2, LIKE_LLAMA, random_program, tokens
from tests.engine.test_ops_decode_cpu import CACHES, KINDS, SHAPES, SMALL, instruction_sets

pytestmark = pytest.mark.usefixtures("one_torch_thread")  # the operator has its own threads

LENGTHS = (9, 1, 30, 17, 16, 15, 33, 2, 48, 5, 31, 3, 21, 7, 40, 12)
NEW = 4


def prompts_of(program: Program, count: int) -> list[list[int]]:
    """Of the first `count` LENGTHS."""
    return [
        torch.randint(program.vocabulary, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        for length in LENGTHS[:count]
    ]


class Alone:
    """Each sequence decoded by itself, greedily: its tokens, and the logits that they were chosen by."""

    def __init__(self, program: Program, kv: CacheKind = "bf16", name: CpuInstructions = "best") -> None:
        self._decoder = CpuDecoder(program, kv, instruction_set=name)

    def decoded(self, prompt: list[int], count: int) -> tuple[list[int], list[torch.Tensor]]:
        self._decoder.begin(1, CONTEXT)
        logits = [self._decoder.extend(torch.tensor([prompt]))]
        while len(logits) < count:
            logits.append(self._decoder.extend(logits[-1].argmax(1, keepdim=True)))
        return [int(each.argmax()) for each in logits], logits


def batched(
    decoder: CpuDecoder, prompts: Sequence[list[int]], count: int
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """All prompts in a pass, then steps of all: the tokens and the logits of each."""
    chosen = decoder.advance([Part(slot, 0, prompt, 1) for slot, prompt in enumerate(prompts)])
    found, logits = [[token] for token in chosen], [decoder.logits.clone()]
    for step in range(count - 1):
        parts = [Part(slot, len(prompt) + step, found[slot][-1:], 1) for slot, prompt in enumerate(prompts)]
        for slot, token in enumerate(decoder.advance(parts)):
            found[slot].append(token)
        logits.append(decoder.logits.clone())
    return found, logits


@pytest.mark.parametrize(
    ("kind", "group", "family", "kv"), spread(KINDS, SHAPES, CACHES, by_default=5), ids=str
)
def test_sequences_of_different_lengths_are_what_each_is_alone(
    kind: WeightKind, group: int, family: str, kv: CacheKind
) -> None:
    program = random_program(SHAPES[family], kind, group)
    prompts = prompts_of(program, 9)
    for name in instruction_sets():
        alone = Alone(program, kv, name)
        decoder = CpuDecoder(program, kv, threads=2, instruction_set=name)
        decoder.begin(9, CONTEXT)
        found, logits = batched(decoder, prompts, NEW)
        for slot, prompt in enumerate(prompts):
            expected, its_logits = alone.decoded(prompt, NEW)
            assert found[slot] == expected, name
            assert all(ours[slot].equal(its[0]) for ours, its in zip(logits, its_logits, strict=True)), name


@pytest.mark.parametrize("count", spread(range(1, 17), by_default=3))
def test_every_number_of_sequences(count: int) -> None:
    """Every remainder of the rows that are multiplied together, and those that every thread prepares for itself."""
    program = random_program(LIKE_LLAMA, "w4")
    for name in instruction_sets():
        alone = Alone(program, name=name)
        decoder = CpuDecoder(program, threads=3, instruction_set=name)
        decoder.begin(count, CONTEXT)
        found, _ = batched(decoder, prompts_of(program, count), NEW)
        assert found == [alone.decoded(prompt, NEW)[0] for prompt in prompts_of(program, count)], name


@pytest.mark.parametrize(("page", "threads"), spread([16, 32, 64], [1, 2, 5], by_default=3))
def test_pages_and_threads_change_nothing(page: int, threads: int) -> None:
    program = random_program(LIKE_GPT2, "w4")
    plain, paged = CpuDecoder(program), CpuDecoder(program, threads=threads)
    plain.begin(6, CONTEXT)
    paged.begin(6, CONTEXT, page)
    expected, found = (batched(decoder, prompts_of(program, 6), NEW) for decoder in (plain, paged))
    assert found[0] == expected[0]
    assert all(ours.equal(its) for ours, its in zip(found[1], expected[1], strict=True))


@pytest.mark.parametrize("seed", cases(range(12), 5))
def test_sequences_join_wait_and_leave_between_passes(seed: int) -> None:
    """Any texts in any order, prompts in parts beside the steps of others, pages from hand to hand."""
    source = random.Random(seed)
    shape = (LIKE_LLAMA, LIKE_GPT2)[seed % 2]
    program = random_program(shape, ("w4", "w8", "bf16", "w4k", "w3k")[seed % 5])
    kv: CacheKind = ("bf16", "int8", "int4")[seed // 2 % 3]
    alone, slots = Alone(program, kv), source.randint(1, 9)
    decoder = CpuDecoder(program, kv, threads=source.randint(1, 3))
    decoder.begin(slots, CONTEXT, 16 * source.randint(1, 2))
    # The whole text, how long its prompt is, and how much is in the cache.
    running: dict[int, tuple[list[int], int, int]] = {}
    for _ in range(60):
        for slot in set(range(slots)) - set(running):
            prompt = [source.randrange(shape.vocabulary) for _ in range(source.randint(1, 40))]
            count = source.randint(1, CONTEXT - len(prompt))
            running[slot] = prompt + alone.decoded(prompt, count)[0], len(prompt), 0
        parts, expected = [], []
        for slot in source.sample(sorted(running), source.randint(1, len(running))):
            text, prompted, done = running[slot]
            count = source.randint(1, prompted - done) if done < prompted else 1
            is_asked = done + count >= prompted
            parts.append(Part(slot, done, text[done : done + count], int(is_asked)))
            expected += text[done + count : done + count + 1] if is_asked else []
            running[slot] = text, prompted, done + count
        assert decoder.advance(parts) == expected
        for slot in [slot for slot, (text, _, done) in running.items() if done == len(text) - 1]:
            del running[slot]
            decoder.leave(slot)


def test_what_was_taken_back_is_forgotten() -> None:
    program = random_program(LIKE_LLAMA, "w4")
    decoder = CpuDecoder(program)
    decoder.begin(2, CONTEXT)
    text = tokens(LIKE_LLAMA, 1, 20)[0].tolist()
    expected = decoder.advance([Part(0, 0, text, 20)])
    decoder.advance([Part(1, 0, text[:9], 1)])
    decoder.advance([Part(1, 9, [1, 2, 3, 4], 4)])  # which were wrong
    assert decoder.advance([Part(1, 9, text[9:], 11)]) == expected[9:]


def test_plain_decoding_goes_on_beside_it() -> None:
    program = random_program(LIKE_LLAMA, "w8")
    decoder, other = CpuDecoder(program), CpuDecoder(program)
    for each in (decoder, other):
        each.begin(2, CONTEXT)
        each.extend(tokens(LIKE_LLAMA, 2, 5))
    decoder.advance([Part(1, 5, [1, 2], 1)])
    last = tokens(LIKE_LLAMA, 2, 1)
    assert decoder.decode(last, 4).equal(other.decode(last, 4))


def test_what_a_pass_cannot_do_is_said_and_nothing_is_lost() -> None:
    program = random_program(SMALL, "w8")
    decoder = CpuDecoder(program)
    with pytest.raises(ValueError, match="call begin first"):
        decoder.advance([Part(0, 0, [1], 1)])
    decoder.begin(2, 20)
    first = decoder.advance([Part(0, 0, [1, 2], 1)])
    for part, sentence in {
        Part(2, 0, (1,), 1): "has no sequence 2: it has 2",
        Part(-1, 0, (1,), 1): "has no sequence -1",
        Part(0, 19, (1, 2), 1): "Position 20 is out of range: the cache has room for 20 tokens",
        Part(0, -1, (1,), 1): "Position -1 is out of range",
    }.items():
        with pytest.raises(ReplicateError, match=sentence):
            decoder.advance([part])
    with pytest.raises(ReplicateError, match="tokens of sequence 0 must follow each other"):
        decoder.advance([Part(0, 0, [1], 1), Part(1, 0, [1], 1), Part(0, 1, [1], 1)])
    with pytest.raises(ValueError, match="Token id 50 is out of range"):
        decoder.advance([Part(0, 0, [50], 1)])
    with pytest.raises(ValueError, match="at least one token"):
        decoder.advance([])
    assert decoder.advance([Part(1, 0, [1, 2], 1)]) == first


def test_pages_that_keys_do_not_fit_are_refused() -> None:
    decoder = CpuDecoder(random_program(SMALL, "w8"))
    for page, whole in ((8, 16), (24, 32), (0, 16)):
        with pytest.raises(UnsupportedError, match=f"ask for pages of {whole} tokens"):
            decoder.begin(2, 40, page)
    decoder.begin(2, 40, 16)
    with pytest.raises(ValueError, match="Sequence 0 has no page for its token 0"):
        decoder.extend(tokens(SMALL, 2, 1))


def test_a_sequence_that_leaves_gives_its_pages_to_the_next() -> None:
    """So the cache of many short sequences is as large as those that are there at once."""
    program = random_program(SMALL, "w8")
    decoder = CpuDecoder(program)
    decoder.begin(1, 64, 16)
    text = tokens(SMALL, 1, 40)[0].tolist()
    expected = decoder.advance([Part(0, 0, text, 1)])
    for _ in range(20):
        decoder.leave(0)
        assert decoder.advance([Part(0, 0, text, 1)]) == expected
