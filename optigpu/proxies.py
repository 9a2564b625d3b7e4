"""Which proxy of the environment leads to a host: HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY, in either case.

NO_PROXY lists names, each with its subdomains, addresses and networks such as 10.0.0.0/8 or fd00::/8, each with or
without a port; * stands for every host. No proxy leads to this machine itself, whatever the variables say.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.request import getproxies

LOOPBACK = ("localhost", "127.0.0.1", "::1")
VARIABLES = frozenset({"http_proxy", "https_proxy", "all_proxy", "no_proxy"})
"""Lower case; each may be written in upper case as well."""
Address = IPv4Address | IPv6Address
_PORTS = {"http": 80, "https": 443}
_ENTRY = re.compile(r"(?:[a-z]+://)?(?P<host>[^:[]*:[^:]*:.*|\[[^]]*\]|[^:]*)(?::(?P<port>\d+))?")
"""An address of IPv6 has no port unless it stands in brackets."""
_COMMON_ENTRY = re.compile(r"[\w.*-]+(:\d+)?(/\d+)?", re.ASCII)


@dataclass(frozen=True)
class Proxy:
    """A proxy's address, which may hold a password, and the variable that names it."""

    variable: str
    url: str

    @property
    def shown(self) -> str:
        """The address without a name and a password."""
        scheme, slashes, place = self.url.rpartition("://")
        return scheme + slashes + place.rpartition("@")[2]


def proxy_to(scheme: str, host: str, port: int | None) -> Proxy | None:
    """The proxy that leads to a host, or None where the host is reached without one."""
    found = getproxies()
    which = next((name for name in (scheme, "all") if found.get(name)), None)
    if which is None or _is_here(host) or is_excepted(host, port or _PORTS.get(scheme), found.get("no", "")):
        return None
    variable = f"{which}_proxy"
    named = variable if os.environ.get(variable) else variable.upper()
    return Proxy(named, found[which] if "://" in found[which] else f"http://{found[which]}")


def is_excepted(host: str, port: int | None, no_proxy: str) -> bool:
    """Whether NO_PROXY has an entry for the host; `port` is the one that it is asked at."""
    return any(_excepts(entry, host.lower(), port) for entry in _entries(no_proxy))


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own and no other's."""
    address = _address(host)
    return host.lower() == "localhost" or (address is not None and address.is_loopback)


def common_exceptions(variables: Mapping[str, str]) -> dict[str, str]:
    """NO_PROXY as every library reads it, with this machine itself; nothing where `variables` name no proxy. httpx, by
    which models are downloaded, raises an error for networks of IPv6."""
    if not VARIABLES & {name.lower() for name in variables}:
        return {}
    listed = _entries(variables.get("no_proxy") or variables.get("NO_PROXY", ""))
    common = [each for each in listed if _COMMON_ENTRY.fullmatch(each) or _address(each) is not None]
    understood = ",".join(dict.fromkeys((*LOOPBACK, *common)))
    return {"no_proxy": understood, "NO_PROXY": understood}


def _entries(no_proxy: str) -> list[str]:
    return [entry.strip().lower() for entry in no_proxy.split(",") if entry.strip()]


def _is_here(host: str) -> bool:
    address = _address(host)
    return (
        is_loopback(host)
        or host.lower().endswith(".localhost")
        or (address is not None and address.is_unspecified)
    )


def _excepts(entry: str, host: str, port: int | None) -> bool:
    if entry == "*":
        return True
    parts = _ENTRY.fullmatch(entry)
    if parts is None or (parts["port"] and int(parts["port"]) != port):
        return False
    named, address = parts["host"].strip("[]"), _address(host)
    if address is not None:
        try:
            return address in ip_network(named, strict=False)
        except ValueError:
            return False
    name = named.lstrip("*").lstrip(".")
    return bool(name) and (host == name or host.endswith(f".{name}"))


def _address(host: str) -> Address | None:
    """None for a name. One of IPv6 that stands for one of IPv4 is that one."""
    try:
        found = ip_address(host.strip("[]"))
    except ValueError:
        return None
    return found.ipv4_mapped or found if isinstance(found, IPv6Address) else found
