"""ExecuTorch in an environment of its own: tokens and logits as transformers has them."""

import numpy as np
import pytest

from tests.engine.own_environments import PREFILL, Answers, answers_of, expected_logits, expected_tokens

TINY = "bundled:tiny"
EXPORTS_SLOWLY = pytest.mark.timeout(1800)


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
