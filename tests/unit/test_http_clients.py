"""Which proxy and whose certificates our clients of HTTP use, and what is said of those that cannot be used."""

import asyncio
import os
import re
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import stamina
from huggingface_hub import constants

from optigpu.client import Client
from optigpu.conductor.processes.confinement import child_variables
from optigpu.http_clients import (
    direct_http_client,
    http_client,
    proxy_at_fault,
    trusted_for,
)
from optigpu.models import bring
from optigpu.models.bring import why_no_hub
from optigpu.proxies import VARIABLES, is_excepted, is_loopback
from optigpu.quality.text import read_hub
from optigpu.store.database import StoreUnavailableError
from optigpu.variables import ORGANISATIONS, hub_refusal
from optigpu.vocabulary import OptiGPUError, UnreachableError, UnsupportedError
from tests.unit.scripted_service import Answer, scripted_service
from worker.pilot import ServiceCalls

ROOT = Path(__file__).resolve().parents[2]
DEAD = "http://127.0.0.1:1"
"""Nothing listens there."""


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower() in VARIABLES or name.startswith(("SSL_CERT", "HF_HUB_OFFLINE")):
            monkeypatch.delenv(name)


def test_every_client_is_made_in_one_place() -> None:
    made = re.compile(r"httpx\.(Client|AsyncClient|get|post|put|delete|request|stream)\(|urlopen\(")
    folders = ("optigpu", "api", "worker", "esp32_agent", "examples", "benchmarks", "migrations", "tools")
    files = [
        file for folder in folders for file in (ROOT / folder).rglob("*.py") if made.search(file.read_text())
    ]
    assert files == [ROOT / "optigpu" / "http_clients.py"]


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "ALL_PROXY"])
def test_a_proxy_of_the_environment_leads_to_other_hosts(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with scripted_service(lambda _: Answer(200, {"workers": []})) as (proxy, calls):
        monkeypatch.setenv(name, proxy.removeprefix("http://"))
        with Client("http://service.invalid") as client:
            assert client.workers() == []
    assert [call.path for call in calls] == ["http://service.invalid/v1/workers"]


@pytest.mark.parametrize("excepted", [None, "", "fd00::/8", "localhost,fd00::/8, [::1]:8000,*.example.org"])
def test_no_proxy_leads_to_this_machine(monkeypatch: pytest.MonkeyPatch, excepted: str | None) -> None:
    for name in ("HTTP_PROXY", "ALL_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "socks5://127.0.0.1:1" if name == "HTTPS_PROXY" else DEAD)
    if excepted is not None:
        monkeypatch.setenv("NO_PROXY", excepted)
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere.pem")
    with scripted_service(lambda _: Answer(200, {"workers": []})) as (url, calls):
        for address in (url, url.replace("127.0.0.1", "localhost")):
            with Client(address) as client:
                assert client.workers() == []
        calling = ServiceCalls(url, "token")
        assert calling.call("GET", "job") == b'{"workers": []}'
        calling.close()
        assert asyncio.run(asked_directly(url)) == 200
    assert len(calls) == 4


async def asked_directly(url: str) -> int:
    async with direct_http_client(trusted_for(url), timeout=10) as http:
        return (await http.get(url)).status_code


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "LOCALHOST", "::ffff:127.0.0.1"])
def test_addresses_of_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "localhost.example.org", "a.localhost", ""])
def test_addresses_that_others_may_reach(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("entry", "host", "port", "excepted"),
    [
        ("*", "example.org", 80, True),
        ("example.org", "example.org", 80, True),
        ("*.example.org", "a.example.org", 80, True),
        ("example.org", "anexample.org", 80, False),
        ("http://example.org", "example.org", 80, True),
        ("example.org:8000", "example.org", 8000, True),
        ("example.org:8000", "example.org", 80, False),
        ("10.0.0.0/8", "10.1.2.3", 80, True),
        ("10.1.2.3:80", "10.1.2.3", 80, True),
        ("fd00::/8", "fd12::1", 80, True),
        ("[fd00::/8]", "fd12::1", 80, True),
        ("[fd12::1]:80", "fd12::1", 80, True),
        ("[fd12::1]:80", "fd12::1", 81, False),
        ("fd12::1:80", "fd12::1", 80, False),
        ("0.1", "10.1.0.1", 80, False),
        (":80", "example.org", 80, False),
        ("10.0.0.0/99", "10.0.0.1", 80, False),
    ],
)
def test_what_no_proxy_excepts(entry: str, host: str, port: int, excepted: bool) -> None:
    assert is_excepted(host, port, entry) is excepted
    assert is_excepted(host, port, f"other.org , {entry},fe00::/16") is excepted


@pytest.mark.parametrize(
    ("proxy", "said"),
    [
        ("socks5://me:secret@proxy:1080", "HTTPS_PROXY names a SOCKS proxy, which needs a package"),
        ("socks4://me:secret@proxy:1080", "HTTPS_PROXY is 'socks4://proxy:1080', which is not the address"),
        ("ftp://me:secret@proxy", "HTTPS_PROXY is 'ftp://proxy', which is not the address of a proxy"),
        ("http://me:secret@proxy:99999", "HTTPS_PROXY is 'http://proxy:99999', which is not the address"),
        ("http://me:secret@[fd00::/8]", "write http://HOST:PORT"),
        ("http://", "write http://HOST:PORT"),
    ],
)
def test_a_proxy_that_cannot_be_used_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch, proxy: str, said: str
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    for make in (
        lambda: Client("https://service.invalid"),
        lambda: ServiceCalls("https://service.invalid", "x"),
    ):
        with pytest.raises(UnsupportedError) as raised:
            make()
        assert said in str(raised.value)
        assert "secret" not in str(raised.value)


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("written", ["http://me:secret@{}", "http://me:sec@ret@{}", "{}"])
@pytest.mark.parametrize("lower", [False, True])
def test_a_proxy_that_does_not_answer_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch, scheme: str, written: str, lower: bool
) -> None:
    variable = f"{scheme}_proxy" if lower else f"{scheme}_proxy".upper()
    monkeypatch.setenv(variable, written.format("127.0.0.1:1"))
    expected = (
        rf"The service at {scheme}://service\.invalid cannot be reached: the proxy http://127\.0\.0\.1:1 of {variable} "
        rf"does not answer \([^@]+\); correct {variable}, or name service\.invalid in NO_PROXY\."
    )
    with stamina.set_testing(True), Client(f"{scheme}://service.invalid") as client:
        with pytest.raises(UnreachableError) as raised:
            client.workers()
        assert re.fullmatch(expected, str(raised.value))
    if scheme == "https":
        calling = ServiceCalls("https://service.invalid", "token")
        with pytest.raises(StoreUnavailableError) as called:
            calling.call("GET", "job")
        calling.close()
        assert re.fullmatch(expected, str(called.value))


def test_a_proxy_that_does_not_connect_says_so_and_a_host_that_is_not_trusted_is_not_its_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with scripted_service(lambda _: Answer(200)) as (proxy, _), stamina.set_testing(True):
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        with Client("https://service.invalid") as client, pytest.raises(UnreachableError) as raised:
            client.workers()
    assert f"the proxy {proxy} of HTTPS_PROXY does not connect to service.invalid (501 " in str(raised.value)
    untrusted = httpx.ConnectError("not trusted")
    untrusted.__context__ = ssl.SSLCertVerificationError("not trusted")
    assert proxy_at_fault("https://service.invalid", untrusted) is None


def test_a_proxy_that_wants_a_password_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_service(lambda _: Answer(407, "no", "text/html")) as (proxy, _):
        monkeypatch.setenv("HTTP_PROXY", proxy)
        with Client("http://service.invalid") as client, pytest.raises(UnreachableError) as raised:
            client.workers()
    assert str(raised.value) == (
        f"The service at http://service.invalid cannot be reached: the proxy {proxy} of HTTP_PROXY wants a name and a "
        "password; write it as http://USER:PASSWORD@HOST:PORT."
    )


@pytest.mark.parametrize("name", ["SSL_CERT_FILE", "SSL_CERT_DIR"])
def test_certificates_that_cannot_be_read_are_named(
    monkeypatch: pytest.MonkeyPatch, name: str, tmp_path: Path
) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    for wrong in (tmp_path / "missing", empty):
        monkeypatch.setenv(name, str(wrong))
        with pytest.raises(
            UnsupportedError, match=f"{name} is .*{wrong.name}.* cannot be read as certificates"
        ):
            http_client("https://service.invalid", timeout=1)
    with http_client("http://service.invalid", timeout=1) as http:
        assert isinstance(http, httpx.Client)


def test_a_measuring_process_gets_exceptions_that_every_library_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_PROXY", "example.org,fd00::/8,[::1]:80,10.0.0.0/8,::2")
    given = child_variables(1)
    assert given["no_proxy"] == given["NO_PROXY"] == "localhost,127.0.0.1,::1,example.org,10.0.0.0/8,::2"
    for name in list(os.environ):
        monkeypatch.delenv(name) if name.lower() in VARIABLES else None
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, given[name])
    with httpx.Client() as http:  # as the hub's own client is
        assert http.trust_env
    monkeypatch.delenv("NO_PROXY")
    monkeypatch.delenv("no_proxy")
    assert not {"NO_PROXY", "no_proxy"} & set(child_variables(1))


# ---- The hub: whether it answers, and whose models may be downloaded from it.


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
    monkeypatch.setattr(bring, "WITHIN_S", 0.1)
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
