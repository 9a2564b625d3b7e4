"""The agent's HTTP client against real sockets, under CPython and under MicroPython."""

import json
import os
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from esp32_agent.port.http import ANSWER_BYTES, split_url
from tests.edge.port.servers import Act, Authority, Connection, answering, make_authority, serving
from tests.edge.tools import micropython

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).with_name("fetch.py")
JSON = b"Content-Type: application/json\r\n"
OK = b"HTTP/1.1 200 OK\r\n" + JSON
LIMIT_S = 20


class Client:
    """The client under one interpreter."""

    def __init__(self, interpreter: str) -> None:
        self._command = (
            [sys.executable] if interpreter == "cpython" else [str(micropython()), "-X", "heapsize=128K"]
        )

    def fetch(
        self,
        port: int,
        authority: Path | None = None,
        body_bytes: int = 0,
        timeout_s: int = 5,
        host: str = "localhost",
    ) -> dict[str, Any]:
        """The answer to a POST: status, headers and body; or error."""
        url = f"{'https' if authority else 'http'}://{host}:{port}"
        arguments = (url, str(authority or "-"), "POST", str(body_bytes), str(timeout_s))
        environment = os.environ | {"MICROPYPATH": str(ROOT), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*self._command, str(SCRIPT), *arguments],
            env=environment, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr + done.stdout
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def asks(self, act: Act, **settings: Any) -> dict[str, Any]:
        """The answer of a server that acts so."""
        with serving(act) as server:
            return self.fetch(server.port, **settings)


@pytest.fixture(params=["cpython", pytest.param("micropython", marks=pytest.mark.long)])
def client(request: pytest.FixtureRequest) -> Client:
    """The client under each interpreter."""
    return Client(request.param)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """An authority that the clients trust."""
    return make_authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def good_server(authority: Authority) -> ssl.SSLContext:
    """A certificate for localhost."""
    return authority.server("good")


def chunked(*chunks: bytes) -> bytes:
    """A body in chunks."""
    return (
        b"".join(b"%x;note=1\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
        + b"0\r\nTrailer: x\r\n\r\n"
    )


@pytest.mark.parametrize(
    "raw",
    [
        OK + b'Content-Length: 7\r\n\r\n{"a":1}',
        OK + b'\r\n{"a":1}',
        OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(b'{"a"', b":1}"),
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b'Content-Length: 7\r\n\r\n{"a":1}',
        OK.replace(b"\r\n", b"\n") + b'content-LENGTH:7\n\n{"a":1}trailing',
    ],
    ids=["length", "close", "chunked", "continue", "bare line feeds"],
)
def test_an_answer_is_read(client: Client, raw: bytes) -> None:
    answer = client.asks(answering(raw))
    assert (answer["status"], answer["body"]) == (200, '{"a":1}')
    assert answer["headers"]["content-type"] == "application/json"


def test_the_request_is_sent_as_it_is(client: Client) -> None:
    with serving(answering(b"HTTP/1.1 204 No Content\r\n\r\n")) as server:
        assert client.fetch(server.port, body_bytes=60_000)["status"] == 204
        head, _, body = server.seen[0].partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /v1/x HTTP/1.1"
    assert f"Host: localhost:{server.port}" in lines
    assert "Authorization: OptiGPU1 key=k" in lines
    assert body == b"b" * 60_000


@pytest.mark.parametrize("status", [b"302 Found", b"307 Temporary Redirect"])
def test_a_redirect_is_not_followed(client: Client, status: bytes) -> None:
    page = (
        b"HTTP/1.1 "
        + status
        + b"\r\nLocation: http://127.0.0.1:1/\r\nContent-Type: text/html\r\n\r\n<p>there"
    )
    answer = client.asks(answering(page))
    assert answer["status"] == int(status[:3])
    assert answer["headers"]["location"] == "http://127.0.0.1:1/"


@pytest.mark.parametrize("status", [b"200 OK", b"403 Forbidden", b"511 Network Authentication Required"])
def test_a_page_is_a_captive_portal(client: Client, status: bytes) -> None:
    page = (
        b"HTTP/1.1 "
        + status
        + b"\r\nContent-Type: text/html; charset=utf-8\r\nContent-Length: 5\r\n\r\n<html"
    )
    assert "text/html and not JSON: a captive portal" in client.asks(answering(page))["error"]


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (OK + b"Content-Length: 16385\r\n\r\n", f"The answer has more than {ANSWER_BYTES} bytes."),
        (OK + b"Content-Length: 99999999999999\r\n\r\n", "The answer has the length 99999999999999."),
        (OK + b"Content-Length: -1\r\n\r\n", "The answer has the length -1."),
        (OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", "The answer has two different lengths."),
        (OK + b"\r\n" + b"x" * 20_000, f"The answer has more than {ANSWER_BYTES} bytes."),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n4001\r\n", f"The answer has more than {ANSWER_BYTES} bytes."),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n", "The answer has a chunk without a length."),
        (
            OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n",
            "The answer has a chunk that is longer than its length.",
        ),
        (OK + b"Transfer-Encoding: gzip\r\n\r\n", "The answer has the transfer encoding gzip; chunked alone is read."),
        (OK + b"Content-Length: 10\r\n\r\nabc", "The connection ended after 3 of 10 bytes."),
        (OK + b"Content-Le", "The connection ended before the answer did."),
        (OK + b"X: " + b"y" * 9000, "The answer has more than 8192 bytes of headers."),
        (OK + b"no colon\r\n\r\n", "The answer has a header line that is not HTTP."),
        (OK + b" folded: x\r\n\r\n", "The answer has a header line that is not HTTP."),
        (OK + b"X: \xff\xfe\r\n\r\n", "The answer has a header that is not UTF-8."),
        (b"SSH-2.0-OpenSSH\r\n", "The answer is not HTTP."),
        (b"HTTP/1.1 2000 OK\r\n\r\n", "The answer is not HTTP."),
        (b"", "The connection ended before the answer did."),
    ],
)  # fmt: skip
def test_an_answer_that_is_wrong_is_an_error(client: Client, raw: bytes, sentence: str) -> None:
    assert client.asks(answering(raw))["error"] == sentence


@pytest.mark.parametrize("tls", [False, True], ids=["before the answer", "in the TLS handshake"])
def test_a_server_that_hangs_is_left_in_time(client: Client, authority: Authority, tls: bool) -> None:
    answer = client.asks(hang, authority=authority.file if tls else None, timeout_s=1)
    assert answer["error"] == "localhost did not answer in time."


def hang(connection: Connection) -> None:
    """Listens and says nothing until the client goes."""
    while connection.socket.recv(4096):
        pass


def trickle(connection: Connection) -> None:
    """Sends a byte now and then, so that no single read waits for long."""
    connection.read_request()
    connection.socket.sendall(OK + b"Content-Length: 10000\r\n\r\n")
    while True:
        connection.socket.sendall(b"x")
        time.sleep(0.1)


def test_a_server_that_trickles_cannot_hold_the_client(client: Client) -> None:
    assert client.asks(trickle, timeout_s=1)["error"] == "localhost did not answer in time."


def test_a_server_that_never_reads_cannot_hold_the_client(client: Client) -> None:
    def act(connection: Connection) -> None:
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        time.sleep(3)

    assert client.asks(act, body_bytes=60_000, timeout_s=1)["error"] == "localhost did not answer in time."


def test_a_reset_in_the_middle_of_an_upload_is_an_error(client: Client) -> None:
    def act(connection: Connection) -> None:
        connection.read_head()
        connection.reset()

    assert "error" in client.asks(act, body_bytes=60_000)


def test_a_reset_in_the_middle_of_an_answer_is_an_error(client: Client) -> None:
    def act(connection: Connection) -> None:
        connection.read_request()
        connection.socket.sendall(OK + b"Content-Length: 10\r\n\r\nabc")
        time.sleep(0.2)
        connection.reset()

    assert "error" in client.asks(act)


def test_nobody_at_the_address_is_an_error(client: Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    assert client.fetch(port)["error"].startswith("The connection to localhost failed")


def test_a_server_with_a_good_certificate_is_trusted(
    client: Client, authority: Authority, good_server: ssl.SSLContext
) -> None:
    body = b'{"text":"' + b"x" * 16_000 + b'"}'
    act = answering(OK + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    with serving(act, good_server) as server:
        answer = client.fetch(server.port, authority.file, body_bytes=20_000)
        assert (answer["status"], answer["body"]) == (200, body.decode())
        assert server.seen[0].endswith(b"b" * 20_000)


def test_a_certificate_for_another_host_is_refused(client: Client, authority: Authority) -> None:
    with serving(answering(OK + b"\r\n{}"), authority.server("other", "example.org")) as server:
        error = client.fetch(server.port, authority.file)["error"]
    assert "does not match" in error or "not valid for 'localhost'" in error
    assert server.seen == [] or server.seen == [b""]


def test_a_certificate_that_has_expired_is_refused(client: Client, authority: Authority) -> None:
    with serving(answering(OK + b"\r\n{}"), authority.server("old", expired=True)) as server:
        assert "expired" in client.fetch(server.port, authority.file)["error"]


def test_a_certificate_of_an_unknown_authority_is_refused(
    client: Client, good_server: ssl.SSLContext, tmp_path: Path
) -> None:
    stranger = make_authority(tmp_path)
    with serving(answering(OK + b"\r\n{}"), good_server) as server:
        error = client.fetch(server.port, stranger.file)["error"]
    assert "unable to get local issuer" in error or "not correctly signed by the trusted CA" in error


def test_a_server_without_tls_is_refused(client: Client, authority: Authority) -> None:
    with serving(answering(OK + b"\r\n{}")) as server:
        assert "error" in client.fetch(server.port, authority.file, timeout_s=2)


@pytest.mark.parametrize(
    "url",
    [
        "a.org",
        "ftp://a.org",
        "https://",
        "https://a.org:0",
        "https://a.org:x",
        "https://u:p@a.org",
        "https://a.org/?q",
    ],
)
def test_a_url_that_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=":"):
        split_url(url)
