"""Whose models may be downloaded from the hub."""

import pytest

from optigpu.hub_organisations import ORGANISATIONS, hub_refusal
from optigpu.quality.hub import read_hub
from optigpu.vocabulary import OptiGPUError


@pytest.mark.parametrize("named", [None, "", " , "])
def test_without_a_list_all_are_allowed(monkeypatch: pytest.MonkeyPatch, named: str | None) -> None:
    monkeypatch.delenv(ORGANISATIONS, raising=False)
    if named is not None:
        monkeypatch.setenv(ORGANISATIONS, named)
    assert hub_refusal("anybody/model") is None


@pytest.mark.parametrize(
    ("repository", "why"),
    [
        ("other/gpt2", "belongs to other"),
        ("gpt2", "names no organisation"),
        ("Qwen2/model", "belongs to Qwen2"),
        ("Qwen", "names no organisation"),
    ],
)
def test_others_are_refused_with_the_list(monkeypatch: pytest.MonkeyPatch, repository: str, why: str) -> None:
    monkeypatch.setenv(ORGANISATIONS, "openai-community, Qwen")
    assert hub_refusal(repository) == (
        f"hub:{repository} {why}, and {ORGANISATIONS} allows openai-community, Qwen alone; ask for a model of theirs."
    )


def test_datasets_are_refused_as_models_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ORGANISATIONS, "Qwen")
    with pytest.raises(
        OptiGPUError, match=r"Salesforce/wikitext belongs to Salesforce.*set OPTIGPU_DATASETS_DIR"
    ):
        read_hub("wikitext-2", "wikitext-2/test.txt")
