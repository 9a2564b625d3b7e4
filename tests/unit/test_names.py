"""The names that somebody may have meant."""

import pytest

from optigpu.documents.names import closest, did_you_mean

NAMES = ("int8_weight_only", "int8_dynamic", "llm_int8", "torch_compile", "bf16", "GPT-2")


@pytest.mark.parametrize(
    ("given", "close"),
    [
        ("int8", ["int8_dynamic", "int8_weight_only", "llm_int8"]),
        ("torch_compil", ["torch_compile"]),
        ("TORCH_COMPILE", ["torch_compile"]),
        ("gpt2", ["GPT-2"]),
        ("weight", ["int8_weight_only"]),
        ("zzz", []),
        ("bf8", []),
        ("bf", ["bf16"]),
        ("mp", []),
        ("", []),
    ],
)
def test_what_begins_so_comes_before_what_contains_it_and_what_is_alike(given: str, close: list[str]) -> None:
    assert closest(given, NAMES) == close


def test_the_question_names_them_all() -> None:
    assert did_you_mean([]) == ""
    assert did_you_mean(["a"]) == " Did you mean a?"
    assert did_you_mean(["a", "b", "c"]) == " Did you mean a, b or c?"
