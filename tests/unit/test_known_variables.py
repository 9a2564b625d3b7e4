"""A setting that nobody reads is named, with the one that was meant."""

from optigpu.variables import KNOWN, unknown_variables


def test_a_misspelled_setting_is_named_with_the_one_that_was_meant() -> None:
    assert unknown_variables(["OPTIGPU_LAESE_S", "PATH"]) == [
        "OPTIGPU_LAESE_S is not a setting and changes nothing; did you mean OPTIGPU_LEASE_S?"
    ]


def test_a_name_that_is_like_no_other_leads_to_the_list() -> None:
    (sentence,) = unknown_variables(["OPTIGPU_XYZZY_QUUX_PLUGH"])
    assert sentence.endswith("docs/settings.md lists those that there are.")


def test_what_is_known_is_not_named_in_whatever_case() -> None:
    assert unknown_variables([*KNOWN, "optigpu_port", "OTHER_SETTING"]) == []
