"""vllm_bf16: what vLLM is told with it, and what its weights are said to take. test_vllm.py runs it."""

from pathlib import Path

import pytest

from optigpu.backends.base import Order
from optigpu.backends.vllm.settings import settings_of
from optigpu.documents.shapes import ModelFacts
from optigpu.hardware import probe
from optigpu.models.facts import facts_of
from optigpu.models.reference import parse_reference
from optigpu.techniques.base import LoadOptions
from optigpu.techniques.quantization.vllm_bf16 import VllmBf16
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.generate import Generate
from tests.engine.tiny_models import assert_needs_hook

MODEL = "preset:tiny-llama-test"
TECHNIQUE = VllmBf16()


def facts() -> ModelFacts:
    found = facts_of(parse_reference(MODEL))
    assert found is not None
    return found


def claim_engine() -> None:
    order = Order(MODEL, (TECHNIQUE,), Generate(), DeviceKind.CPU, 0, 1, Path("/nowhere"), probe())
    assert settings_of(order, Path("/models"), facts()).dtype == "bfloat16"


def claim_load() -> None:
    assert TECHNIQUE.load(LoadOptions()).dtype == "bfloat16"


@pytest.mark.parametrize(("hook", "claim"), [("engine", claim_engine), ("load", claim_load)])
def test_it_asks_for_bfloat16(hook: str, claim: object) -> None:
    assert callable(claim)
    assert_needs_hook(TECHNIQUE, hook, claim)
