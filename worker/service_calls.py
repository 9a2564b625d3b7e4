"""Calls to the service by HTTP, with the token of one job."""

import httpx
from pydantic import BaseModel

from optigpu.http_clients import http_client, proxy_at_fault
from optigpu.proxies import is_loopback
from optigpu.store.errors import StoreUnavailableError
from optigpu.vocabulary import LeaseLostError, OptiGPUError

TIMEOUT = httpx.Timeout(10.0, read=30.0, write=60.0)
GONE = (401, 404, 409, 410)
"""The token, the job or the lease has ended."""


class ServiceCalls:
    """Raises OptiGPUError for an address that would show the token to the network, or a proxy that cannot be used."""

    def __init__(self, url: str, token: str) -> None:
        self._url = confidential(url)
        headers = {"Authorization": f"Bearer {token}"}
        self._http = http_client(self._url, headers=headers, timeout=TIMEOUT)

    def close(self) -> None:
        self._http.close()

    def call(self, method: str, path: str, body: BaseModel | None = None) -> bytes:
        """The answer's body.

        Raises StoreUnavailableError if the same call may succeed later, LeaseLostError if the job is no longer this
        pilot's, OptiGPUError if the service refuses what was sent.
        """
        content = None if body is None else body.model_dump_json()
        headers = {} if content is None else {"Content-Type": "application/json"}
        try:
            answer = self._http.request(method, f"/v1/pilot/{path}", content=content, headers=headers)
        except httpx.TransportError as error:
            at_fault = proxy_at_fault(self._url, error)
            raise StoreUnavailableError(
                f"The service at {self._url} cannot be reached: {at_fault}."
                if at_fault
                else f"The service at {self._url} does not answer ({error})."
            ) from error
        if answer.is_success:
            return answer.content
        detail = _detail(answer)
        if answer.status_code in GONE:
            raise LeaseLostError(detail)
        if answer.status_code >= 500 or answer.status_code in (408, 429):
            raise StoreUnavailableError(detail)
        raise OptiGPUError(detail)


def confidential(url: str) -> str:
    """The address, if it is https or on this machine. Raises OptiGPUError for another one."""
    try:
        parsed = httpx.URL(url.rstrip("/"))
    except httpx.InvalidURL:
        parsed = httpx.URL()
    if parsed.host and (parsed.scheme == "https" or (parsed.scheme == "http" and is_loopback(parsed.host))):
        return str(parsed)
    raise OptiGPUError(
        f"Pilots send their tokens to OPTIGPU_URL, which is {url!r}; set it to https://HOST. "
        "Only a service on the same machine may have http://."
    )


def _detail(answer: httpx.Response) -> str:
    """The sentence of a problem document."""
    try:
        problem = answer.json()
    except ValueError:
        problem = None
    said = problem.get("detail") if isinstance(problem, dict) else None
    return str(said or f"The service answered {answer.status_code}.")
