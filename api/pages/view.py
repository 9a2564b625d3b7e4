"""What a page is asked with: the request, the service, whether it is to be kept as a file."""

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Query, Request, Response
from pydantic import model_validator

from api import rendering
from api.auth import Reader
from api.rendering import Look
from api.service import Service, ServiceDep
from optigpu.vocabulary import Frozen


class Asked(Frozen):
    """Parameters of every page. A form sends its empty fields, which are the same as none."""

    export: Annotated[bool, Query(description="The page as one HTML file that opens offline.")] = False

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value not in ("", [""])}


@dataclass(frozen=True)
class PageView:
    """One request for a page."""

    request: Request
    service: Service
    look: Look

    def page(self, template: str, status: int = 200, **shown: object) -> Response:
        """The template as an answer. Every template has `look`."""
        return rendering.page(self.request, template, self.look, status, **shown)


async def _view(request: Request, service: ServiceDep) -> PageView:
    export = request.query_params.get("export", "") in ("1", "true")
    return PageView(request, service, rendering.look(request, service.settings.prefix, export=export))


View = Annotated[PageView, Depends(_view)]
"""A page for everybody, which shows nothing that is stored."""


async def _reading(view: View, _: Reader) -> PageView:
    return view


ReaderView = Annotated[PageView, Depends(_reading)]
"""A page for those who may read."""

Plain = Annotated[Asked, Query()]
"""The parameters of a page that has none of its own."""
