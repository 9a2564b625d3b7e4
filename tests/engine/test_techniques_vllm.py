"""vllm_bf16: what vLLM is told with it, and what its weights are said to take. test_vllm.py runs it."""

from pathlib import Path

import pytest

from optigpu.backends.vllm.settings import settings_of
from optigpu.documents.shapes import ModelFacts
from optigpu.models.facts import facts_of
from optigpu.models.reference import parse_reference
from optigpu.techniques.base import LoadOptions
from optigpu.techniques.quantization.vllm_bf16 import VllmBf16
from tests.engine.converted_engines import ordered
from tests.engine.tiny_models import assert_needs_hook

MODEL = "preset:tiny-llama-test"
TECHNIQUE = VllmBf16()


def facts() -> ModelFacts:
    found = facts_of(parse_reference(MODEL))
    assert found is not None
    return found


def claim_engine() -> None:
    order = ordered(Path("/nowhere"), TECHNIQUE, model=MODEL)
    assert settings_of(order, Path("/models"), facts()).dtype == "bfloat16"


def claim_load() -> None:
    assert TECHNIQUE.load(LoadOptions()).dtype == "bfloat16"


@pytest.mark.parametrize(("hook", "claim"), [("engine", claim_engine), ("load", claim_load)])
def test_it_asks_for_bfloat16(hook: str, claim: object) -> None:
    assert callable(claim)
    assert_needs_hook(TECHNIQUE, hook, claim)
