"""What a page is asked with: the request, the service, whether it is to be kept as a file."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import Depends, Query, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import model_validator

from api import rendering
from api.auth import Administrator, Reader, Seal, keep_seal, seal_of
from api.gate import Caller
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
