"""The other pages of a server: its version, its models, its metrics. None of them is needed, so none may do harm."""

import asyncio

import httpx
from pydantic import BaseModel, ValidationError

from optigpu.vocabulary import Frozen

MOST_BYTES = 4 * 2**20
TIME_LIMIT_S = 5.0


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
    version: str


class _Props(BaseModel):
    build_info: str


async def about(http: httpx.AsyncClient, url: str, origin: str) -> ServerAbout:
    """Asks /v1/models, /version, llama-server's /props, TGI's /info and Ollama's /api/version."""
    models = await _models(http, f"{url}/models")
    owner = next((model.owned_by for model in models if model.owned_by), None)
    version = await _version(http, origin)
    return ServerAbout(software=owner, version=version, models=tuple(model.id for model in models))


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


async def _models(http: httpx.AsyncClient, address: str) -> tuple[_Model, ...]:
    text = await page_of(http, address)
    try:
        return _Models.model_validate_json(text).data if text else ()
    except ValidationError:
        return ()


async def _version(http: httpx.AsyncClient, origin: str) -> str | None:
    for path in ("/version", "/info", "/api/version"):
        text = await page_of(http, origin + path)
        try:
            if text:
                return _Version.model_validate_json(text).version[:100]
        except ValidationError:
            continue
    text = await page_of(http, f"{origin}/props")
    try:
        return _Props.model_validate_json(text).build_info[:100] if text else None
    except ValidationError:
        return None
