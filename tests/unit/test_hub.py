"""Whether the hub answers is known at once, and whose models may be downloaded from it."""

import os
import socket
from collections.abc import Iterator

import pytest
from huggingface_hub import constants

from optigpu.hub_organisations import ORGANISATIONS, hub_refusal
from optigpu.models import hub
from optigpu.models.hub import why_no_hub
from optigpu.proxies import VARIABLES
from optigpu.quality.text import read_hub
from optigpu.vocabulary import OptiGPUError
from tests.unit.scripted_service import Answer, scripted_service


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower() in VARIABLES or name == "HF_HUB_OFFLINE":
            monkeypatch.delenv(name)


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes calls and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield "http://{}:{}".format(*server.getsockname())


@pytest.mark.parametrize("status", [200, 302, 404, 501])
def test_a_hub_that_answers_whatever_it_says_is_there_and_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    with scripted_service(lambda _: Answer(status)) as (address, _):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        assert why_no_hub() is None
    assert why_no_hub() is None, "it is known by now"


def test_a_hub_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch, silent: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    refused = str(why_no_hub())
    assert refused.startswith("the hub http://127.0.0.1:1 cannot be reached: ")
    assert refused.endswith("; check the network")
    monkeypatch.setattr(constants, "ENDPOINT", silent)
    monkeypatch.setattr(hub, "WITHIN_S", 0.1)
    assert why_no_hub() == f"the hub {silent} cannot be reached: timed out; check the network"


def test_a_hub_that_answers_later_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [Answer(407), Answer(200)]
    with scripted_service(lambda _: answers.pop(0)) as (proxy, _):
        monkeypatch.setenv("HTTP_PROXY", proxy)
        monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
        assert "wants a name and a password" in str(why_no_hub())
        assert why_no_hub() is None


def test_the_proxy_on_the_way_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@127.0.0.1:1")
    said = str(why_no_hub())
    assert (
        "the hub https://hub.invalid cannot be reached: the proxy http://127.0.0.1:1 of HTTPS_PROXY" in said
    )
    monkeypatch.setenv("HTTPS_PROXY", "ftp://me:secret@proxy")
    assert "HTTPS_PROXY is 'ftp://proxy', which is not the address of a proxy" in str(why_no_hub())
    assert "secret" not in f"{said} {why_no_hub()}"


def test_offline_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert why_no_hub() == ("HF_HUB_OFFLINE forbids to ask the hub; unset it, or download the model before")


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
