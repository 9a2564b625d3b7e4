"""What a form of ours sends: its fields, after its seal was looked at, and who sent them."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Annotated
from urllib.parse import parse_qsl

from fastapi import Depends, Request

from api.auth import call_of, require, seal_of
from api.gate import Caller
from api.inputs import body_of, media_type_of
from api.job_form import Values
from api.pages.view import PageView, View
from api.problems import ProblemError
from api.service import Service
from optigpu.store.keys import Scope

CSRF_FIELD = "csrf"
FORM = "application/x-www-form-urlencoded"
MOST_FIELDS = 2000


@dataclass(frozen=True)
class Posted:
    """A form, the page that answers it, and who sent it."""

    view: PageView
    values: Values
    who: Caller

    @property
    def service(self) -> Service:
        return self.view.service

    def text(self, name: str) -> str:
        """The one value of a field, without blanks around it; empty if it was not sent."""
        return next(iter(self.values.get(name, ())), "").strip()


def _posted(scope: Scope) -> Callable[[Request, View], Awaitable[Posted]]:
    async def read(request: Request, view: View) -> Posted:
        """The seal is looked at first: who has another page's form learns nothing."""
        values = await form_of(request, view.service)
        admitted = await view.service.gate.admit(call_of(request))
        require(admitted.caller, scope)
        return Posted(replace(view, who=admitted.caller), values, admitted.caller)

    return read


async def form_of(request: Request, service: Service) -> Values:
    """The fields of a form of ours. Raises ProblemError 403 for one from elsewhere."""
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise ProblemError(403, "A page from another origin may not change anything here.")
    if media_type_of(request) != FORM:
        raise ProblemError(415, f"Send the form as {FORM}.")
    body = await body_of(request, service.settings.max_body_bytes)
    values: dict[str, list[str]] = {}
    try:
        pairs = parse_qsl(
            body.decode(),
            keep_blank_values=True,
            encoding="utf-8",
            errors="strict",
            max_num_fields=MOST_FIELDS,
        )
    except ValueError:
        raise ProblemError(400, f"The form is not UTF-8, or has more than {MOST_FIELDS} fields.") from None
    for name, value in pairs:
        values.setdefault(name, []).append(value)
    seal_of(request).require(next(iter(values.pop(CSRF_FIELD, ())), None))
    return values


ReaderPosted = Annotated[Posted, Depends(_posted(Scope.READ))]
SubmitterPosted = Annotated[Posted, Depends(_posted(Scope.SUBMIT))]
AdministratorPosted = Annotated[Posted, Depends(_posted(Scope.ADMIN))]
