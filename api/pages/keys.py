"""The page at `/keys`, for administrators: who has keys, until when, and when they were last used.

A key can be revoked, and rotated by who shows it again: a browser that is signed in makes no key by itself.
"""

import asyncio
from collections.abc import Sequence
from datetime import timedelta

from fastapi import APIRouter, Response

from api.gate import Call
from api.inputs import Id
from api.pages.posted import AdministratorPosted, Posted
from api.pages.view import AdministratorView, PageView, Plain
from api.problems import ProblemError
from optigpu.documents.administration import AuditAction
from optigpu.store import audit, keys
from optigpu.store.keys import KeyInfo
from optigpu.vocabulary import utc_now

router = APIRouter()
GRACES = {"1 hour": timedelta(hours=1), "1 day": timedelta(days=1), "7 days": timedelta(days=7)}
"""For how long a key that is rotated is still valid."""


@router.get("/keys")
def read_keys(view: AdministratorView, _: Plain) -> Response:
    """Every key that was not revoked."""
    return _page(view)


@router.post("/keys/{id}/revoke")
def revoke_key(key_id: Id, posted: AdministratorPosted) -> Response:
    """The key is invalid at once, and every browser that was signed in with it is signed out."""
    with posted.service.database.write() as session:
        keys.revoke(session, key_id)
        audit.write(session, posted.who.actor, AuditAction.KEY_REVOKED, key_id)
    return posted.view.sent_to("/keys")


@router.post("/keys/{id}/rotate")
async def rotate_key(key_id: Id, posted: AdministratorPosted) -> Response:
    """Makes the key's successor and shows it once. The administrator's own key has to be entered again."""
    if not await _shows_own_key(posted):
        problem = "Enter the key that you are signed in with: without it nothing is rotated."
        return await asyncio.to_thread(_page, posted.view, status=403, problem=problem)
    return await asyncio.to_thread(_rotated, posted, key_id)


def _rotated(posted: Posted, key_id: str) -> Response:
    grace = GRACES.get(posted.text("grace"), GRACES["1 day"])
    with posted.service.database.write() as session:
        plain = keys.rotate(session, key_id, grace=grace)
        successor = keys.verify(session, plain)
        assert successor is not None, "it was created in this transaction"
        details = {"name": successor.name, "scopes": list(successor.scopes)}
        audit.write(session, posted.who.actor, AuditAction.KEY_CREATED, successor.id, details)
        audit.write(session, posted.who.actor, AuditAction.KEY_ROTATED, key_id, {"successor": successor.id})
    return _page(posted.view, made=plain, made_for=successor)


async def _shows_own_key(posted: Posted) -> bool:
    """Counted as a call with that key is, so that nobody guesses here either."""
    who, shown = posted.who, posted.text("key")
    if who.key is None or not shown:
        return False
    try:
        admitted = await posted.service.gate.admit(Call(shown, who.address, who.request_id))
    except ProblemError:
        return False
    return admitted.caller.key is not None and admitted.caller.key.id == who.key.id


def _page(
    view: PageView,
    *,
    status: int = 200,
    made: str | None = None,
    made_for: KeyInfo | None = None,
    problem: str | None = None,
) -> Response:
    with view.service.database.read() as session:
        known: Sequence[KeyInfo] = keys.list_(session)
    own = view.who.key.id if view.who and view.who.key else None
    return view.page(
        "keys.html",
        status,
        more_headers={"Cache-Control": "no-store"},
        keys=known,
        own=own,
        now=utc_now(),
        graces=list(GRACES),
        made=made,
        made_for=made_for,
        problem=problem,
    )
