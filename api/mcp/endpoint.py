"""Serves the tools over HTTP: each request by itself, with the key of its header, as the calls under /v1 are.

No session is kept between requests, so that any process of the API answers any of them, and a restart ends none.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from api.auth import address_of
from api.gate import Call, bearer_key
from api.problems import ProblemError, from_store, problem_response, request_id
from api.service import Service
from optigpu.vocabulary import StoreError

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

PATH = "/mcp"
CALLER = "mcp_caller"
"""Where the state of a request has who calls."""
INSTRUCTIONS = (
    "OptiGPU measures what each optimization layer buys for a model on real hardware. Ask `leaderboard` for the best "
    "measured stacks and `advise` for one; `submit_job` measures others, and `follow_job` waits for them. Every figure "
    "has a 95% interval: two figures whose intervals overlap are not different. `compare` decides."
)


def is_installed() -> bool:
    """Whether the extra mcp is."""
    return find_spec("mcp") is not None


class Endpoint:
    """The ASGI application of the endpoint."""

    def __init__(self, service: Service) -> None:
        from mcp.server.transport_security import TransportSecuritySettings

        self._service = service
        self._server = _server(service)
        # Host and Origin are checked for the whole service, and bodies have its limit.
        self._server.streamable_http_app(
            streamable_http_path=PATH,
            json_response=True,
            stateless_http=True,
            max_request_body_size=service.settings.max_body_bytes,
            transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Requests are answered while the block lasts."""
        async with self._server.session_manager.run():
            yield

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        key = bearer_key(request.headers.get("authorization"))
        try:
            admitted = await self._service.gate.admit(Call(key, address_of(request), request_id(scope)))
        except ProblemError as problem:
            await problem_response(scope, problem)(scope, receive, send)
            return
        except StoreError as error:
            await problem_response(scope, from_store(error))(scope, receive, send)
            return
        scope["state"][CALLER] = admitted.caller
        await self._server.session_manager.handle_request(scope, receive, send)


def mount(app: FastAPI, service: Service) -> Endpoint | None:
    """Adds the endpoint, unless the settings say no or the extra is missing."""
    if not service.settings.mcp or not is_installed():
        return None
    endpoint = Endpoint(service)
    app.router.routes.append(Route(PATH, endpoint, include_in_schema=False))
    return endpoint


def _server(service: Service) -> "MCPServer":
    from mcp.server.mcpserver import MCPServer

    from api.mcp.tools import TOOLS, Tools
    from optigpu import __version__

    server: MCPServer = MCPServer(
        "optigpu", title="OptiGPU", version=__version__, instructions=INSTRUCTIONS, subscriptions=False
    )
    tools = Tools(service)
    for name, notes in TOOLS.items():
        server.add_tool(getattr(tools, name), annotations=notes)
    return server
