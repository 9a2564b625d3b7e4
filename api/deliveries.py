"""Sends what waits in the outbox of webhooks. Each process of the API does; one at a time takes a delivery.

A delivery is signed and goes to addresses that were checked, with every redirect checked as well.

Webhooks lead to public addresses by https, and to the hosts that the settings allow. A name is resolved here, every
address of it is checked, and the connection goes to an address that was checked: a second look-up could give another
one (DNS rebinding).
"""

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from functools import cached_property

import httpx
import structlog

from optigpu import __version__
from optigpu.http_clients import certificates, direct_http_client, none_trusted
from optigpu.store import webhooks
from optigpu.store.database import Database
from optigpu.store.webhooks import SECRET_PREFIX, Delivery
from optigpu.vocabulary import OptiGPUError, UnsupportedError, utc_now

LONGEST_URL = 2000
MOST_PORT = 65535
SETTING = "OPTIGPU_WEBHOOK_ALLOWED_HOSTS"

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a name. Raises OSError when it has none."""

_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class DestinationError(OptiGPUError):
    """Nothing may be sent there."""


async def resolve(host: str, port: int) -> Sequence[str]:
    """The addresses of a name or of an address written as text. Raises OSError when there are none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(address[4][0]) for address in found))


def checked_url(text: str, allowed: Collection[str]) -> httpx.URL:
    """The URL, as far as it can be judged without a look-up. Raises DestinationError."""
    try:
        url = httpx.URL(text)
        host = url.raw_host.decode("ascii")
    except (httpx.InvalidURL, UnicodeError, ValueError):
        raise DestinationError("The address cannot be read; write https://HOST/PATH.") from None
    if len(text) > LONGEST_URL or not host or url.scheme not in ("http", "https"):
        raise DestinationError(f"Write an address as https://HOST/PATH, of at most {LONGEST_URL} characters.")
    if url.userinfo or url.fragment:
        raise DestinationError("The address must have no user, password or fragment; leave them out.")
    if url.port is not None and not 1 <= url.port <= MOST_PORT:
        raise DestinationError(f"A port is a number from 1 to {MOST_PORT}.")
    if host in allowed:
        return url
    if url.scheme != "https":
        raise DestinationError(f"Use https, or add {host} to {SETTING}.")
    if _is_literal(host):
        _require_public(host, [host])
    return url


async def addresses_of(url: httpx.URL, allowed: Collection[str], find: Resolve = resolve) -> Sequence[str]:
    """The addresses of a URL's host, all of them checked. Raises DestinationError."""
    host = url.raw_host.decode("ascii")
    try:
        found = await find(host, url.port or (443 if url.scheme == "https" else 80))
    except (OSError, UnicodeError) as error:
        raise DestinationError(f"The name {host} cannot be resolved ({error}).") from None
    if host not in allowed:
        _require_public(host, found)
    return found


def is_public(text: str) -> bool:
    """Whether an address is one of the internet's. One that leads to another address, as NAT64 does, is as that one."""
    return all(_is_global(address) for address in _meant(ipaddress.ip_address(text.partition("%")[0])))


def _require_public(host: str, addresses: Sequence[str]) -> None:
    private = [address for address in addresses if not is_public(address)]
    if private or not addresses:
        where = f"{host} leads to {private[0]}" if private else f"{host} has no address"
        raise DestinationError(f"{where}, which is not a public address; add {host} to {SETTING} if it may.")


def _is_global(address: Address) -> bool:
    site_local = isinstance(address, ipaddress.IPv6Address) and address.is_site_local
    return address.is_global and not (address.is_multicast or address.is_reserved or site_local)


def _meant(address: Address) -> Sequence[Address]:
    """The addresses of IPv4 that are meant by one of IPv6, besides itself unless it only stands for them."""
    if isinstance(address, ipaddress.IPv4Address):
        return (address,)
    if address.ipv4_mapped:
        return (address.ipv4_mapped,)
    if address in _NAT64:
        return (ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF),)
    inner = (address.sixtofour, *(address.teredo or ()))
    return (address, *(each for each in inner if each is not None))


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


LOOK_EVERY_S = 2.0
AFTER_AN_ERROR_S = 30.0
FORGET_EVERY_S = 3600.0
AT_ONCE = 8
"""Deliveries that are sent side by side, so that a slow receiver does not hold up the others."""
logger = structlog.stdlib.get_logger("api.deliveries")
WITHIN_S = 10.0
"""For the whole delivery, its redirects included."""
MOST_REDIRECTS = 3
KEEPS_THE_POST = (307, 308)
"""The other redirects ask for a GET, which would deliver nothing."""


class Deliveries:
    """Looks for deliveries while the service runs."""

    def __init__(self, database: Database, allowed_hosts: Collection[str]) -> None:
        self._database = database
        self._sender = Sender(allowed_hosts)
        self._forget_at = time.monotonic() + FORGET_EVERY_S

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Delivers while the block lasts. What is being sent at its end is sent again by another process, or later."""
        task = asyncio.create_task(self._look_regularly())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def deliver_due(self) -> int:
        """Sends at most AT_ONCE deliveries that are due; returns how many."""
        due = await asyncio.to_thread(self._take)
        await asyncio.gather(*(self._deliver(each) for each in due))
        return len(due)

    async def _look_regularly(self) -> None:
        while True:
            try:
                sent = await self.deliver_due()
            except Exception as error:  # a database that is away must not end the loop
                logger.warning("deliveries_not_made", reason=str(error))
                await asyncio.sleep(AFTER_AN_ERROR_S)
            else:
                if sent < AT_ONCE:
                    await asyncio.sleep(LOOK_EVERY_S)

    async def _deliver(self, delivery: Delivery) -> None:
        try:
            await self._sender.send(delivery, utc_now())
        except DeliveryError as error:
            logger.warning(
                "webhook_failed", delivery=delivery.id, attempt=delivery.attempt, reason=str(error)
            )
            await asyncio.to_thread(self._failed, delivery, str(error))
        else:
            await asyncio.to_thread(self._delivered, delivery)

    def _take(self) -> list[Delivery]:
        self._forget()
        with self._database.read() as session:
            if not webhooks.is_due(session):
                return []
        with self._database.write() as session:
            return webhooks.take(session, AT_ONCE)

    def _delivered(self, delivery: Delivery) -> None:
        with self._database.write() as session:
            webhooks.delivered(session, delivery)

    def _failed(self, delivery: Delivery, error: str) -> None:
        with self._database.write() as session:
            webhooks.failed(session, delivery, error)

    def _forget(self) -> None:
        if time.monotonic() < self._forget_at:
            return
        self._forget_at = time.monotonic() + FORGET_EVERY_S
        with self._database.write() as session:
            webhooks.forget(session)


class DeliveryError(OptiGPUError):
    """The receiver did not accept the delivery."""


class Sender:
    """Sends deliveries. `allowed` are the hosts that may have private addresses, or no https."""

    def __init__(self, allowed: Collection[str], find: Resolve = resolve) -> None:
        self._allowed = frozenset(name.lower() for name in allowed)
        self._find = find

    async def send(self, delivery: Delivery, at: datetime) -> None:
        """Raises DeliveryError unless the receiver answers with a status of 2xx in time."""
        body = delivery.body.encode()
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"OptiGPU/{__version__}",
            **signature(delivery.id, delivery.secret, at, body),
        }
        try:
            async with asyncio.timeout(WITHIN_S):
                await self._follow(delivery.url, headers, body)
        except TimeoutError:
            raise DeliveryError(f"There was no answer within {WITHIN_S:g} s.") from None
        except (DestinationError, UnsupportedError) as error:
            raise DeliveryError(str(error)) from None
        except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError, OSError) as error:
            raise DeliveryError(f"{type(error).__name__}: {error}"[:500]) from None

    async def _follow(self, start: str, headers: dict[str, str], body: bytes) -> None:
        url = checked_url(start, self._allowed)
        for _ in range(MOST_REDIRECTS + 1):
            answer = await self._post(url, headers, body)
            if answer.is_success:
                return
            target = answer.headers.get("location", "")
            if answer.status_code not in KEEPS_THE_POST or not target:
                raise DeliveryError(f"The receiver answered with status {answer.status_code}.")
            url = checked_url(str(url.join(target)), self._allowed)
        raise DeliveryError(f"The receiver redirected more than {MOST_REDIRECTS} times.")

    async def _post(self, url: httpx.URL, headers: dict[str, str], body: bytes) -> httpx.Response:
        """The answer without its body, which may have no end. The next address is tried where none can be reached."""
        addresses = await addresses_of(url, self._allowed, self._find)
        for number, address in enumerate(addresses, start=1):
            try:
                return await self._post_to(address, url, headers, body)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                if number == len(addresses):
                    raise
        raise DeliveryError(f"{url.host} has no address.")

    async def _post_to(
        self, address: str, url: httpx.URL, headers: dict[str, str], body: bytes
    ) -> httpx.Response:
        """Connects to the address; the certificate must be that of the URL's host."""
        host = url.raw_host.decode("ascii")
        trusted = self._certificates if url.scheme == "https" else none_trusted()
        # No proxy of the environment: it would look the name up again. No connection is kept for another host.
        async with direct_http_client(trusted, timeout=WITHIN_S) as http:
            request = http.build_request(
                "POST",
                url.copy_with(host=address),
                headers={**headers, "Host": url.netloc.decode("ascii")},
                content=body,
                extensions={"sni_hostname": host},
            )
            answer = await http.send(request, stream=True)
            await answer.aclose()
            return answer

    @cached_property
    def _certificates(self) -> ssl.SSLContext:
        """The authorities that this host trusts."""
        return certificates(ssl.create_default_context)


def signature(delivery_id: str, secret: str, at: datetime, body: bytes) -> dict[str, str]:
    """The headers of the Standard Webhooks specification: HMAC-SHA256 over id, time in seconds, and body."""
    stamp = str(int(at.timestamp()))
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    signed = hmac.new(key, f"{delivery_id}.{stamp}.".encode() + body, hashlib.sha256).digest()
    return {
        "webhook-id": delivery_id,
        "webhook-timestamp": stamp,
        "webhook-signature": f"v1,{base64.b64encode(signed).decode()}",
    }
