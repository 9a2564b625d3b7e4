"""The page at `/docs`: every call, from the OpenAPI document. It needs no network, no script and no key."""

from functools import lru_cache

from fastapi import APIRouter, FastAPI, Request, Response

from api.pages.view import Plain, View
from api.reference import Document, phrase

router = APIRouter()


@router.get("/docs")
def read_docs(request: Request, view: View, _: Plain) -> Response:
    """The calls by their tags, then the schemas."""
    document = _document(request.app)
    return view.page(
        "docs.html",
        url=str(request.base_url).rstrip("/"),
        groups=document.groups(),
        schemas=document.schemas(),
        phrase=phrase,
    )


@lru_cache(maxsize=1)
def _document(app: FastAPI) -> Document:
    """Read once: the document is 300 kB, and the application does not change while it runs."""
    return Document.model_validate(app.openapi())
