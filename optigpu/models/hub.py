"""Whether the hub of models answers, asked once and briefly: its own library tries for half a minute for each file."""

from functools import cache

import httpx

from optigpu.http_clients import http_client, proxy_at_fault
from optigpu.models.held import may_download
from optigpu.vocabulary import UnreachableError, UnsupportedError

WITHIN_S = 5.0


def why_no_hub() -> str | None:
    """Why no file can come from the hub, as the end of a sentence with what to do; None where the hub answers."""
    if not may_download():
        return "HF_HUB_OFFLINE forbids to ask the hub; unset it, or download the model before"
    from huggingface_hub import constants  # only a hub's model needs it

    try:
        _require_answer(constants.ENDPOINT)
    except UnreachableError as error:
        return str(error)
    except UnsupportedError as error:  # a proxy or certificates of the environment
        return str(error).rstrip(".")
    return None


@cache
def _require_answer(address: str) -> None:
    with http_client(address, timeout=WITHIN_S) as http:
        try:
            http.head("/").raise_for_status()
        except httpx.TransportError as error:
            why = proxy_at_fault(address, error) or f"{error or 'no answer in time'}; check the network"
            raise UnreachableError(f"the hub {address} cannot be reached: {why}") from error
        except httpx.HTTPStatusError as error:
            fault = proxy_at_fault(address, error)
            if fault:
                raise UnreachableError(f"the hub {address} cannot be reached: {fault}") from error
