"""Where webhooks may lead: to public addresses by https, and to the hosts that the settings allow.

A name is resolved here, every address of it is checked, and the connection goes to an address that was checked. A
second look-up could give another one (DNS rebinding).
"""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence

import httpx

from optigpu.vocabulary import OptiGPUError

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
