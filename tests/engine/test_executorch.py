"""ExecuTorch in an environment of its own: tokens and logits as transformers has them."""

from pathlib import Path

import numpy as np
import pytest

from optigpu.backends.base import Order
from optigpu.backends.executorch.program import program_of
from optigpu.hardware import probe
from optigpu.techniques.quantization.vllm_bf16 import VllmBf16
from optigpu.vocabulary import DeviceKind, UnsupportedError
from optigpu.workloads.generate import Generate
from tests.engine.own_environments import PREFILL, Answers, answers_of, expected_logits, expected_tokens

TINY = "bundled:tiny"
EXPORTS_SLOWLY = pytest.mark.timeout(1800)


def order(*stack: VllmBf16) -> Order:
    return Order(TINY, stack, Generate(), DeviceKind.CPU, 3, 2, Path("/nowhere"), probe())


def test_a_program_is_for_so_many_sequences_and_tokens() -> None:
    program = program_of(order(), 2, 64)
    assert program.form == "float32-2x64"
    assert program.arguments == (
        *("--model", TINY, "--seed", "3"),
        *("--rows", "2", "--length", "64", "--threads", "2"),
    )
    with pytest.raises(UnsupportedError, match="exports float32 alone"):
        program_of(order(VllmBf16()), 2, 64)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return answers_of("executorch", TINY, tmp_path_factory.mktemp("executorch"))


@pytest.mark.slow
@pytest.mark.executorch
@EXPORTS_SLOWLY
def test_greedy_tokens_are_transformers_tokens(answers: Answers) -> None:
    assert answers.tokens == answers.again == expected_tokens(TINY)
    assert min(answers.gaps_s) > 0
    assert answers.facts.versions["executorch"]


@pytest.mark.slow
@pytest.mark.executorch
@EXPORTS_SLOWLY
def test_logits_are_transformers_logits(answers: Answers) -> None:
    expected = expected_logits(TINY)
    bound = 1e-4 * np.abs(expected).max()
    assert np.abs(answers.logits - expected[:, PREFILL:]).max() < bound
    assert np.abs(answers.from_nothing - expected[:, :6]).max() < bound
    assert np.abs(answers.last - expected[:, -1]).max() < bound
