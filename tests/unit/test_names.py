"""The names, of techniques or of settings, that somebody may have meant."""

import pytest

from optigpu.documents.fields import closest
from optigpu.variables import KNOWN, unknown_variables

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


def test_a_misspelled_setting_is_named_with_the_one_that_was_meant() -> None:
    assert unknown_variables(["OPTIGPU_LAESE_S", "PATH"]) == [
        "OPTIGPU_LAESE_S is not a setting and changes nothing; did you mean OPTIGPU_LEASE_S?"
    ]


def test_what_is_known_is_not_named_in_whatever_case() -> None:
    assert unknown_variables([*KNOWN, "optigpu_port", "OTHER_SETTING"]) == []
