"""The clients of HTTP: which proxy they go by, and whose certificates they trust. Every client of ours is made here.

A client has one host, so that what is wrong with the environment is known when it is made, and said in a sentence:
httpx itself raises errors of several kinds, also for settings that the host has no use for.
"""

import os
import ssl
from collections.abc import Callable, Mapping
from http import HTTPStatus
from types import MappingProxyType

import httpx

from optigpu.proxies import Proxy, proxy_to
from optigpu.vocabulary import UnsupportedError

NO_HEADERS: Mapping[str, str] = MappingProxyType({})
NO_LIMITS = httpx.Limits()
MOST_PORT = 65535


def http_client(
    url: str, *, headers: Mapping[str, str] = NO_HEADERS, timeout: httpx.Timeout | float | None
) -> httpx.Client:
    """Calls what is under `url`, by the proxy that the environment names for its host; redirects are not followed.
    Raises UnsupportedError for a proxy or certificates of the environment that cannot be used."""
    host = httpx.URL(url)
    proxy = proxy_to(host.scheme, host.host, host.port)
    trusted = trusted_for(url)
    try:
        by = _usable(proxy) if proxy else None
        return httpx.Client(
            base_url=url, headers=headers, timeout=timeout, verify=trusted, proxy=by, trust_env=False
        )
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        if proxy is None:
            raise
        why = f"is {proxy.shown!r}, which is not the address of a proxy; write http://HOST:PORT."
        if isinstance(error, ImportError):
            why = "names a SOCKS proxy, which needs a package: pip install 'httpx[socks]'."
        raise UnsupportedError(f"{proxy.variable} {why}") from None


def proxy_at_fault(url: str, error: httpx.HTTPError) -> str | None:
    """What a client of `url` may say where the proxy on the way to it is what failed; None where it is not. `error` is
    one of the transport's or of an answer's status."""
    host = httpx.URL(url)
    proxy = proxy_to(host.scheme, host.host, host.port)
    if proxy is None:
        return None
    named = f"the proxy {proxy.shown} of {proxy.variable}"
    advice = f"correct {proxy.variable}, or name {host.host} in NO_PROXY"
    match error:
        case httpx.HTTPStatusError() if (
            error.response.status_code == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED
        ):
            return f"{named} wants a name and a password; write it as http://USER:PASSWORD@HOST:PORT"
        case httpx.ProxyError():
            return f"{named} does not connect to {host.host} ({error}); {advice}"
        case httpx.ConnectTimeout():
            return f"{named} does not answer; {advice}"
        case httpx.ConnectError() if not _is_of_tls(error):
            return f"{named} does not answer ({error}); {advice}"
        case httpx.ReadTimeout():
            return f"nothing comes through {named} in time; {advice}"
    return None


def _is_of_tls(error: BaseException | None) -> bool:
    """Whether an error says that a certificate was not trusted, which is the host's affair."""
    return error is not None and (isinstance(error, ssl.SSLError) or _is_of_tls(error.__context__))


def direct_http_client(
    trusted: ssl.SSLContext,
    *,
    headers: Mapping[str, str] = NO_HEADERS,
    timeout: httpx.Timeout | float | None,
    limits: httpx.Limits = NO_LIMITS,
) -> httpx.AsyncClient:
    """Goes by no proxy, since it is for addresses that were chosen before; redirects are not followed."""
    return httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits, verify=trusted, trust_env=False)


def trusted_for(url: str) -> ssl.SSLContext:
    """Whose certificates a direct client of `url` trusts. Raises UnsupportedError as `certificates` does."""
    return certificates() if url.startswith("https:") else none_trusted()


def certificates(otherwise: Callable[[], ssl.SSLContext] = httpx.create_ssl_context) -> ssl.SSLContext:
    """The authorities of SSL_CERT_FILE, else of SSL_CERT_DIR, else those that `otherwise` makes: by default certifi's.
    Raises UnsupportedError for a file or folder that cannot be read."""
    named = next((name for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if os.environ.get(name)), None)
    if named is None:
        return otherwise()
    try:
        if named == "SSL_CERT_DIR":
            os.listdir(os.environ[named])  # OpenSSL takes a missing folder for an empty one
        return httpx.create_ssl_context()
    except OSError as error:  # also ssl.SSLError
        why = error.strerror or str(error)
        raise UnsupportedError(
            f"{named} is {os.environ[named]!r}, which cannot be read as certificates ({why}); correct it, or unset it."
        ) from None


def none_trusted() -> ssl.SSLContext:
    """For what is not encrypted: loading authorities takes longer than a call."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _usable(proxy: Proxy) -> httpx.Proxy:
    encrypted = proxy.url.startswith("https:")
    made = httpx.Proxy(proxy.url, ssl_context=certificates() if encrypted else None)
    if not made.url.host or (made.url.port or 0) > MOST_PORT:
        raise ValueError(proxy.url)
    return made
