"""The pages for people. Each module has a router; what it reads comes from the functions that the JSON API calls."""

from fastapi import APIRouter, Response

from api.pages import administration, board, catalog, comparisons, docs, figures, gates, jobs, result
from api.problems import ProblemError
from api.rendering import static_files

PAGES = (board, result, figures, comparisons, gates, catalog, jobs, administration, docs)
"""Modules with pages that belong together."""

FOREVER = "public, max-age=31536000, immutable"

router = APIRouter(include_in_schema=False)
for module in PAGES:
    router.include_router(module.router)


@router.get("/static/{digest}/{name}")
def read_file(digest: str, name: str) -> Response:
    """A file of api/static, which needs no key. Browsers keep it for ever under its own digest; under another version's
    it is sent, and not kept."""
    file = static_files().get(name)
    if file is None:
        raise ProblemError(404, "There is no such file; load the page again.")
    kept = FOREVER if digest == file.digest else "no-cache"
    return Response(file.content, media_type=file.media_type, headers={"Cache-Control": kept})
