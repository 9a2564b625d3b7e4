"""The other pages of a server: its version, its models, its metrics. None of them is needed, so none may do harm."""

import asyncio
from typing import TypeVar

import httpx
from pydantic import AliasChoices, BaseModel, Field, ValidationError

from optigpu.vocabulary import Frozen

MOST_BYTES = 4 * 2**20
TIME_LIMIT_S = 5.0
Page = TypeVar("Page", bound=BaseModel)


class ServerAbout(Frozen):
    """What a server says of itself; null where it does not. `models` are those that it lists."""

    software: str | None = None
    version: str | None = None
    models: tuple[str, ...] = ()


class _Model(BaseModel):
    id: str
    owned_by: str | None = None


class _Models(BaseModel):
    data: tuple[_Model, ...] = ()


class _Version(BaseModel):
    version: str = Field(validation_alias=AliasChoices("version", "build_info"))


async def about(http: httpx.AsyncClient, url: str, origin: str) -> ServerAbout:
    """Asks /v1/models, /version, TGI's /info, Ollama's /api/version and llama-server's /props."""
    listed = await _read(http, f"{url}/models", _Models)
    models = listed.data if listed else ()
    owner = next((model.owned_by for model in models if model.owned_by), None)
    version = None
    for path in ("/version", "/info", "/api/version", "/props"):
        found = await _read(http, origin + path, _Version)
        if found:
            version = found.version[:100]
            break
    return ServerAbout(software=owner, version=version, models=tuple(model.id for model in models))


async def _read(http: httpx.AsyncClient, address: str, kind: type[Page]) -> Page | None:
    text = await page_of(http, address)
    try:
        return kind.model_validate_json(text) if text else None
    except ValidationError:
        return None


async def page_of(http: httpx.AsyncClient, address: str) -> str | None:
    """The text of a page, None for one that is not there, too long or too slow. Redirects are not followed."""
    try:
        async with asyncio.timeout(TIME_LIMIT_S), http.stream("GET", address) as response:
            if not response.is_success:
                return None
            found = b""
            async for piece in response.aiter_bytes():
                found += piece
                if len(found) > MOST_BYTES:
                    return None
            return found.decode(errors="replace")
    except (httpx.HTTPError, TimeoutError):
        return None
