"""The pages at `/login` and `/logout`: a key becomes a browser's sign-in, for some hours."""

import asyncio
import re
from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from api.auth import address_of, needs_key, sign_in, sign_out, signed_in_by
from api.gate import Call, Caller
from api.pages.posted import form_of
from api.pages.view import Asked, PageView, View
from api.problems import ProblemError, request_id
from api.service import Service
from optigpu.documents.administration import AuditAction
from optigpu.store import audit, keys

router = APIRouter()
OWN_PATH = r"^/([^/\\\x00-\x20][^\\\x00-\x1f]*)?$"
"""A path of this service; one that begins with two slashes is another server."""
OwnPath = Annotated[str, Field(max_length=2000, pattern=OWN_PATH)]


class LoginAsked(Asked):
    """Where the reader wants to go on."""

    next: OwnPath = "/"


@router.get("/login")
def ask_for_key(view: View, asked: Annotated[LoginAsked, Query()]) -> Response:
    """The form; a service without keys says that it has none."""
    needed = needs_key(view.service.settings, view.service.database)
    return view.page("login.html", next=asked.next, needed=needed, error=None)


@router.post("/login")
async def log_in(request: Request, view: View) -> Response:
    """The gate looks at the key as it does at any call's, so guesses are counted; then the page follows that was asked
    for."""
    values = await form_of(request, view.service)
    key = next(iter(values.get("key", ())), "").strip()
    next_ = next(iter(values.get("next", ())), "") or "/"
    if not re.fullmatch(OWN_PATH, next_):
        raise ProblemError(422, "next: The page to go on to is not one of this service.")
    try:
        who = await _who_has(request, view, key)
    except ProblemError as problem:
        return view.page("login.html", 401, next=next_, needed=True, error=problem.detail)
    secret = await asyncio.to_thread(_begin, view.service, who)
    answer = view.sent_to(next_)
    sign_in(answer, request, view.service.settings, secret)
    return answer


@router.post("/logout")
async def log_out(request: Request, view: View) -> Response:
    """The sign-in ends here and in the database."""
    await form_of(request, view.service)
    if secret := signed_in_by(request):
        await asyncio.to_thread(_end, view.service, secret)
    answer = view.sent_to("/")
    sign_out(answer, view.service.settings)
    return answer


async def _who_has(request: Request, view: PageView, key: str) -> Caller:
    """Raises ProblemError for what is no key of this service."""
    if not key:
        raise ProblemError(401, "Enter a key.")
    admitted = await view.service.gate.admit(Call(key, address_of(request), request_id(request.scope)))
    if admitted.caller.key is None:
        raise ProblemError(401, "This service has no such key.")
    return admitted.caller


def _begin(service: Service, who: Caller) -> str:
    assert who.key is not None, "only a key signs in"
    with service.database.write() as session:
        audit.write(session, who.actor, AuditAction.SIGNED_IN, who.key.id)
        return keys.sign_in(session, who.key.id, timedelta(seconds=service.settings.session_s))


def _end(service: Service, secret: str) -> None:
    with service.database.write() as session:
        keys.sign_out(session, secret)
