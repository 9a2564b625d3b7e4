"""The pages for people. Each module has a router; what it reads comes from the functions that the JSON API calls."""

from fastapi import APIRouter

from api.pages import (
    alerts,
    badge,
    board,
    claims,
    compare,
    devices,
    docs,
    history,
    image,
    job,
    jobs,
    keys,
    ladder,
    machines,
    new_job,
    result,
    sign_in,
    static,
    techniques,
    webhooks,
)

PAGES = (
    board,
    board,
    result,
    image,
    compare,
    ladder,
    history,
    claims,
    machines,
    devices,
    techniques,
    badge,
    board,
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
