"""Several tokens in one pass of CpuDecoder, of different sequences or guessed: bit by bit what each is alone."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from optigpu.ops.decode.cpu.decoder import CpuDecoder, CpuInstructions, Part
from optigpu.ops.decode.cpu.packing import pack
from optigpu.ops.decode.cpu.speculation import GuessingDecoder
from optigpu.ops.decode.program import WEIGHT_KINDS, CacheKind, Program, WeightKind
from optigpu.vocabulary import ReplicateError, UnsupportedError
from tests.breadth import cases, spread
from tests.engine.random_programs import CONTEXT, LIKE_GPT2, LIKE_LLAMA, random_program, tokens
from tests.engine.test_ops_decode_cpu import CACHES, KINDS, SHAPES, SMALL, instruction_sets

pytestmark = pytest.mark.usefixtures("one_torch_thread")
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
    program = random_program(SHAPES[family], kind, group=group)
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
    program = random_program(shape, WEIGHT_KINDS[seed % len(WEIGHT_KINDS)])
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


# ---- Guesses.


PROMPT, STEPS = 9, 50


def plainly(decoder: CpuDecoder, prompt: torch.Tensor, steps: int) -> torch.Tensor:
    """The first token and `steps` more, [1, steps + 1]."""
    decoder.begin(1, prompt.shape[1] + steps)
    first = decoder.extend(prompt).argmax(1, keepdim=True)
    return torch.cat([first, decoder.decode(first, steps)], dim=1)


def guessed(
    decoder: GuessingDecoder, prompt: torch.Tensor, steps: int, at_once: int = 1
) -> tuple[torch.Tensor, list[int]]:
    """The same with guesses, and how many tokens came in each call."""
    first = decoder.begin(prompt, steps + 1).argmax(1, keepdim=True)
    others = first.new_zeros(1, steps)
    calls = list(decoder.decode_into(others, at_once))
    return torch.cat([first, others], dim=1), calls


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "group", "family"), spread(KINDS, SHAPES, by_default=4), ids=str)
def test_the_tokens_are_those_of_plain_decoding(kind: WeightKind, group: int, family: str) -> None:
    shape = SHAPES[family]
    program = random_program(shape, kind, group=group)
    draft_program = random_program(shape._replace(blocks=1), "w8", group=group)
    for name in instruction_sets():
        decoder = CpuDecoder(program, threads=2, instruction_set=name)
        drafts = [None, *(CpuDecoder(each, beside=decoder) for each in (draft_program, program))]
        expected = plainly(decoder, tokens(shape, 1, PROMPT), STEPS)
        for draft in drafts:
            guessing = GuessingDecoder(decoder, 3, 5, draft)
            for _ in range(2):
                assert guessed(guessing, tokens(shape, 1, PROMPT), STEPS)[0].equal(expected), name


@pytest.mark.parametrize("lookahead", spread(range(1, 18), by_default=3))
def test_every_number_of_guesses(lookahead: int) -> None:
    """A draft that is the decoder itself is always right."""
    program = random_program(LIKE_LLAMA, "w4")
    decoder = CpuDecoder(program, threads=3)
    expected = plainly(decoder, tokens(LIKE_LLAMA, 1, PROMPT), STEPS)
    guessing = GuessingDecoder(decoder, 3, lookahead, CpuDecoder(program, beside=decoder))
    for at_once in (1, 7, STEPS):
        found, calls = guessed(guessing, tokens(LIKE_LLAMA, 1, PROMPT), STEPS, at_once)
        assert found.equal(expected)
        assert sum(calls) == STEPS
        assert all(count >= min(at_once, STEPS) for count in calls[:-1])
    assert guessing.tally.accepted == guessing.tally.guessed
    assert guessing.tally.tokens == 3 * STEPS


def looping(program: Program, period: Sequence[int]) -> Program:
    """With a head that makes each token of `period` follow the one before it, whatever the layers say."""
    width = program.width
    embedding, head = torch.zeros(2, program.vocabulary, width)
    for place, token in enumerate(period):
        embedding[token, place] = 100.0
        head[period[(place + 1) % len(period)], place] = 100.0
    tables = [pack(table, None, "bf16", 0) for table in (embedding, head)]
    return replace(program, embedding=tables[0], head=tables[1], positions=None)


@pytest.mark.parametrize("period", cases([7, 1, 2, 3, 20]))
def test_text_that_repeats_takes_few_passes(period: int) -> None:
    program = looping(random_program(LIKE_GPT2._replace(blocks=8), "bf16"), range(40, 40 + period))
    decoder = CpuDecoder(program)
    prompt = torch.arange(40, 40 + period).repeat(1, 2)[:, : period + 1]
    steps = CONTEXT - prompt.shape[1] - 1
    guessing = GuessingDecoder(decoder, 3, 5)
    found = guessed(guessing, prompt, steps)[0]
    assert found.equal(plainly(decoder, prompt, steps))
    assert found[0, :period].tolist() == [40 + (1 + index) % period for index in range(period)]
    assert guessing.tally.accepted == guessing.tally.guessed > 0
    assert guessing.tally.passes < guessing.tally.tokens


def test_a_draft_with_a_shorter_context_guesses_no_more_after_it() -> None:
    program = random_program(LIKE_LLAMA, "w8")
    decoder = CpuDecoder(program)
    for context in (4, 9, 15):
        draft = CpuDecoder(replace(program, context=context), beside=decoder)
        guessing = GuessingDecoder(decoder, 3, 5, draft)
        expected = plainly(decoder, tokens(LIKE_LLAMA, 1, PROMPT), STEPS)
        assert guessed(guessing, tokens(LIKE_LLAMA, 1, PROMPT), STEPS)[0].equal(expected)


def test_guesses_that_make_no_sense_are_refused() -> None:
    program = random_program(SMALL, "w8")
    decoder = CpuDecoder(program)
    for ngram, lookahead in ((0, 5), (3, 0)):
        with pytest.raises(ValueError, match="at least one token to look at and one to guess"):
            GuessingDecoder(decoder, ngram, lookahead)
    with pytest.raises(ValueError, match="needs the vocabulary of the decoder"):
        GuessingDecoder(decoder, 3, 5, CpuDecoder(random_program(LIKE_GPT2, "w8"), beside=decoder))
    guessing = GuessingDecoder(decoder, 3, 5)
    with pytest.raises(ReplicateError, match="is out of range"):
        guessed(guessing, tokens(SMALL, 1, 5), CONTEXT)


def test_a_decoder_beside_another_starts_no_threads() -> None:
    def count() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    program = random_program(SMALL, "w8")
    decoder = CpuDecoder(program, threads=3)
    before = count()
    other = CpuDecoder(program, threads=3, beside=decoder)
    assert count() == before
    del decoder
    other.begin(1, 5)
    assert other.extend(tokens(SMALL, 1, 2)).isfinite().all()
    del other
    assert count() == before - 2
