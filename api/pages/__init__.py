"""The pages for people. Each module has a router; what it reads comes from the functions that the JSON API calls."""

from fastapi import APIRouter, Response

from api.pages import (
    alerts,
    badge,
    board,
    claims,
    compare,
    devices,
    docs,
    feed,
    gates,
    history,
    image,
    job,
    jobs,
    keys,
    ladder,
    machines,
    new_job,
    pareto,
    result,
    sign_in,
    static,
    techniques,
    webhooks,
)

PAGES = (
    board,
    pareto,
    result,
    image,
    compare,
    ladder,
    history,
    gates,
    claims,
    machines,
    devices,
    techniques,
    badge,
    feed,
    new_job,
    jobs,
    job,
    alerts,
    webhooks,
    keys,
    sign_in,
    docs,
    static,
)
"""One module for each page, or for a few that belong together."""

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
