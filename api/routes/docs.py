"""The page at `/docs`: every call, from the OpenAPI document. It needs no network, no script and no key."""

from functools import lru_cache

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse

from api.reference import Document, phrase
from api.rendering import page
from api.service import ServiceDep
from optigpu import __version__

router = APIRouter(include_in_schema=False)


@router.get("/docs")
def read_docs(request: Request, service: ServiceDep) -> HTMLResponse:
    """The calls by their tags, then the schemas."""
    document = _document(request.app)
    return page(
        "docs.html",
        version=__version__,
        prefix=service.settings.prefix,
        url=str(request.base_url).rstrip("/"),
        groups=document.groups(),
        schemas=document.schemas(),
        phrase=phrase,
    )


@lru_cache(maxsize=1)
def _document(app: FastAPI) -> Document:
    """Read once: the document is 300 kB, and the application does not change while it runs."""
    return Document.model_validate(app.openapi())
