"""The pages for people. Each module has a router; what it reads comes from the functions that the JSON API calls."""

from fastapi import APIRouter

from api.pages import alerts, badge, board, docs, job, jobs, keys, new_job, result, sign_in, static

PAGES = (board, result, badge, new_job, jobs, job, alerts, keys, sign_in, docs, static)
"""One module for each page, or for a few that belong together."""

router = APIRouter(include_in_schema=False)
for module in PAGES:
    router.include_router(module.router)
