"""Where webhooks may lead: addresses are checked after the look-up and after each redirect, and then connected to."""

import asyncio
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from api.deliveries import DeliveryError, Sender, is_public
from optigpu.store.webhooks import Delivery
from optigpu.vocabulary import utc_now
from tests.service.receiver import Receiver, own_certificate, receiving

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
NAME = "hooks.test"


class Names:
    """A name server: the answers for any name, one after the other, the last one for ever. It notes who was asked."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.asked: list[str] = []
        self._answers = list(answers)

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as found:
        yield found


def send(sender: Sender, url: str) -> None:
    delivery = Delivery(id="msg", url=url, secret=SECRET, body='{"type": "test"}', attempt=1)
    asyncio.run(sender.send(delivery, utc_now()))


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *("224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1"),
        *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fec0::1", "ff02::1", "2001:db8::1"),
        # IPv4 inside of IPv6: mapped, 6to4, NAT64, Teredo.
        *("::ffff:127.0.0.1", "2002:7f00:1::", "64:ff9b::a00:1", "2001:0:7f00:1::"),
    ],
)
def test_an_address_of_ones_own_network_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.215.14", "2606:4700::1111", "64:ff9b::101:101"])
def test_an_address_of_the_internet_is_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("host", ["localhost", "127.1", "2130706433", "0x7f.1"])
def test_a_name_that_leads_to_a_private_address_is_refused_after_the_look_up(
    receiver: Receiver, host: str
) -> None:
    with pytest.raises(DeliveryError, match="not a public address"):
        send(Sender(()), receiver.url(host, "https"))
    assert receiver.received == []


def test_one_private_address_among_several_is_enough() -> None:
    with pytest.raises(DeliveryError, match=r"leads to 10\.0\.0\.1, which is not a public address"):
        send(Sender((), Names(("1.1.1.1", "10.0.0.1"))), f"https://{NAME}/")


def test_a_name_is_looked_up_once_and_what_was_checked_is_connected_to(receiver: Receiver) -> None:
    """A second look-up would give an address where nothing listens."""
    names = Names(("127.0.0.1",), ("192.0.2.1",))
    send(Sender((NAME,), names), receiver.url(NAME))
    assert names.asked == [NAME]
    assert receiver.received[0].headers["host"] == f"{NAME}:{receiver.port}"


def test_the_next_address_is_tried_where_one_cannot_be_reached(receiver: Receiver) -> None:
    send(Sender((NAME,), Names(("::1", "127.0.0.1"))), receiver.url(NAME))
    assert len(receiver.received) == 1


def test_certificates_that_cannot_be_read_are_named_where_they_are_needed(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere.pem")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    send(Sender((NAME,), Names(("127.0.0.1",))), receiver.url(NAME))
    with pytest.raises(DeliveryError, match=r"SSL_CERT_FILE is '/nowhere\.pem', which cannot be read"):
        send(Sender((NAME,), Names(("127.0.0.1",))), receiver.url(NAME, "https"))


def test_a_redirect_is_followed_to_where_it_may_lead(receiver: Receiver) -> None:
    receiver.answers, receiver.location = [307], "/moved"
    send(Sender(("127.0.0.1",)), receiver.url())
    assert [request.path for request in receiver.received] == ["/hook", "/moved"]
    first, second = receiver.received
    assert first.body == second.body
    assert first.headers["webhook-signature"] == second.headers["webhook-signature"]


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("https://10.0.0.1/", "not a public address"),
        ("https://localhost/", "not a public address"),
        ("http://hooks.example.org/", "Use https"),
        ("file:///etc/passwd", "Write an address"),
    ],
)
def test_a_redirect_is_checked_as_the_first_address_is(receiver: Receiver, location: str, words: str) -> None:
    receiver.answers, receiver.location = [308], location
    with pytest.raises(DeliveryError, match=words):
        send(Sender(("127.0.0.1",)), receiver.url())
    assert len(receiver.received) == 1


def test_redirects_end_somewhere_and_none_turns_into_a_get(receiver: Receiver) -> None:
    receiver.answers, receiver.location = [307] * 9, "/again"
    with pytest.raises(DeliveryError, match="redirected more than 3 times"):
        send(Sender(("127.0.0.1",)), receiver.url())
    receiver.answers = [302]
    with pytest.raises(DeliveryError, match="status 302"):
        send(Sender(("127.0.0.1",)), receiver.url())


def test_who_does_not_listen_or_is_not_there_is_said() -> None:
    with pytest.raises(DeliveryError, match="ConnectError"):
        send(Sender(("127.0.0.1",)), "http://127.0.0.1:1/")
    with pytest.raises(DeliveryError, match="cannot be resolved"):
        send(Sender(()), f"https://{'x' * 70}.invalid/")


def test_the_certificate_must_be_that_of_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the connection goes to an address."""
    certificate, key = own_certificate(NAME, tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with receiving(context) as receiver:
        local = Names(("127.0.0.1",))
        send(Sender((NAME,), local), receiver.url(NAME, "https"))
        with pytest.raises(DeliveryError, match="CERTIFICATE_VERIFY_FAILED"):
            send(Sender(("other.test",), local), receiver.url("other.test", "https"))
    assert len(receiver.received) == 1
