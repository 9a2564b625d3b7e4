"""GuessingDecoder: the tokens of plain decoding, in fewer passes where guesses are right."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from optigpu.ops.decode.cpu.decoder import CpuDecoder
from optigpu.ops.decode.cpu.packing import pack
from optigpu.ops.decode.cpu.speculation import GuessingDecoder
from optigpu.ops.decode.program import Program, WeightKind
from optigpu.vocabulary import ReplicateError
from tests.engine.random_programs import CONTEXT, LIKE_GPT2, LIKE_LLAMA, random_program, tokens
from tests.engine.test_ops_decode_cpu import KINDS, SHAPES, SMALL, instruction_sets

pytestmark = pytest.mark.usefixtures("one_torch_thread")  # the operator has its own threads

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


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize(("kind", "group"), KINDS, ids=str)
def test_the_tokens_are_those_of_plain_decoding(kind: WeightKind, group: int, family: str) -> None:
    shape = SHAPES[family]
    program = random_program(shape, kind, group)
    draft_program = random_program(shape._replace(blocks=1), "w8", group)
    for name in instruction_sets():
        decoder = CpuDecoder(program, threads=2, instruction_set=name)
        drafts = [None, *(CpuDecoder(each, beside=decoder) for each in (draft_program, program))]
        expected = plainly(decoder, tokens(shape, 1, PROMPT), STEPS)
        for draft in drafts:
            guessing = GuessingDecoder(decoder, 3, 5, draft)
            for _ in range(2):
                assert guessed(guessing, tokens(shape, 1, PROMPT), STEPS)[0].equal(expected), name


@pytest.mark.parametrize("lookahead", range(1, 18))
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


def test_a_draft_that_is_right_gives_several_tokens_a_pass() -> None:
    program = random_program(LIKE_LLAMA._replace(blocks=8), "w4")
    decoder = CpuDecoder(program)
    guessing = GuessingDecoder(decoder, 3, 5, CpuDecoder(program, beside=decoder))
    for _ in range(10):  # it costs as much as it saves, so it is not asked always
        guessed(guessing, tokens(LIKE_LLAMA, 1, PROMPT), STEPS)
    assert 0 < guessing.tally.passes < guessing.tally.tokens


def looping(program: Program, period: Sequence[int]) -> Program:
    """With a head that makes each token of `period` follow the one before it, whatever the layers say."""
    width = program.width
    embedding, head = torch.zeros(2, program.vocabulary, width)
    for place, token in enumerate(period):
        embedding[token, place] = 100.0
        head[period[(place + 1) % len(period)], place] = 100.0
    tables = [pack(table, None, "bf16", 0) for table in (embedding, head)]
    return replace(program, embedding=tables[0], head=tables[1], positions=None)


@pytest.mark.parametrize("period", [1, 2, 3, 7, 20])
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


def test_text_after_text_knows_nothing_of_it() -> None:
    program = random_program(LIKE_LLAMA, "w4")
    decoder = CpuDecoder(program, threads=2)
    once = GuessingDecoder(decoder, 3, 5, CpuDecoder(program, beside=decoder))
    for seed in range(5):
        prompt = tokens(LIKE_LLAMA, 1, 5 + 7 * seed, seed)
        expected = plainly(decoder, prompt, 20)
        assert guessed(once, prompt, 20)[0].equal(expected)


def test_a_draft_with_a_shorter_context_guesses_no_more_after_it() -> None:
    program = random_program(LIKE_LLAMA, "w8")
    decoder = CpuDecoder(program)
    for context in (4, 9, 15):
        draft = CpuDecoder(replace(program, context=context), beside=decoder)
        guessing = GuessingDecoder(decoder, 3, 5, draft)
        expected = plainly(decoder, tokens(LIKE_LLAMA, 1, PROMPT), STEPS)
        assert guessed(guessing, tokens(LIKE_LLAMA, 1, PROMPT), STEPS)[0].equal(expected)


def test_what_makes_no_sense_is_refused() -> None:
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
