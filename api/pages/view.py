"""What a page is asked with: the request, the service, whether it is to be kept as a file; and what a form of ours
sends: its fields, after its seal was looked at, and who sent them."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated
from urllib.parse import parse_qsl

from fastapi import Depends, Query, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import model_validator

from api import rendering
from api.auth import Administrator, Reader, Seal, call_of, keep_seal, require, seal_of
from api.gate import Caller
from api.inputs import body_of, media_type_of
from api.job_form import Values
from api.problems import ProblemError
from api.rendering import Look
from api.service import Service, ServiceDep
from optigpu.store.keys import Scope
from optigpu.vocabulary import Frozen


class Asked(Frozen):
    """Parameters of every page. A form sends its empty fields, which are the same as none."""

    export: Annotated[bool, Query(description="The page as one HTML file that opens offline.")] = False

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value not in ("", [""])}


@dataclass(frozen=True)
class Account:
    """What a page knows of the browser: with which key it is signed in, and what seals its forms. Where there are no
    keys nobody can sign in."""

    seal: Seal
    name: str | None = None
    may_submit: bool = False
    may_administer: bool = False
    may_sign_in: bool = True

    @classmethod
    def of(cls, request: Request, who: Caller | None, *, export: bool) -> "Account":
        """Of who asks for the page. One that is kept as a file has no form that could be sent."""
        if export:
            return cls(Seal(""))
        name = who.key.name if who and who.key else None
        may_submit, may_administer = (bool(who and who.may(scope)) for scope in (Scope.SUBMIT, Scope.ADMIN))
        may_sign_in = who is None or who.key is not None or who.reads_only
        return cls(seal_of(request), name, may_submit, may_administer, may_sign_in)


@dataclass(frozen=True)
class PageView:
    """One request for a page."""

    request: Request
    service: Service
    look: Look
    who: Caller | None = None
    """Who asks; None where the page is for everybody."""

    @property
    def origin(self) -> str:
        """The address of the service as the client calls it, with its prefix."""
        return str(self.request.base_url).rstrip("/")

    def page(
        self,
        template: str,
        status: int = 200,
        more_headers: Mapping[str, str] | None = None,
        **shown: object,
    ) -> Response:
        """The template as an answer. Every template has `look` and `account`."""
        account = Account.of(self.request, self.who, export=self.look.export)
        look, shown = self.look, shown | {"account": account}
        answer = rendering.page(self.request, template, look, status, more_headers, **shown)
        if account.seal.token.encode() in answer.body:  # the page has a form
            keep_seal(answer, self.request, self.service.settings, account.seal)
        return answer

    def sent_to(self, path: str) -> Response:
        """Leads the browser to another page, after what it has sent was done."""
        return RedirectResponse(self.look.root + path, 303)


async def _view(request: Request, service: ServiceDep) -> PageView:
    export = request.query_params.get("export", "") in ("1", "true")
    return PageView(request, service, rendering.look(request, service.settings.prefix, export=export))


View = Annotated[PageView, Depends(_view)]
"""A page for everybody, which shows nothing that is stored."""


async def _reading(view: View, who: Reader) -> PageView:
    return replace(view, who=who)


async def _administering(view: View, who: Administrator) -> PageView:
    return replace(view, who=who)


ReaderView = Annotated[PageView, Depends(_reading)]
"""A page for those who may read."""

AdministratorView = Annotated[PageView, Depends(_administering)]
"""A page for administrators."""

Plain = Annotated[Asked, Query()]
"""The parameters of a page that has none of its own."""


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
