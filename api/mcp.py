"""The endpoint for programs that talk (Model Context Protocol), at /mcp: what the routes under /v1 do, as tools. Loaded
only where the extra mcp is installed.

Each request is served by itself, with the key of its header, as the calls under /v1 are. No session is kept between
requests, so that any process of the API answers any of them, and a restart ends none. The docstring of a tool is what
such a program reads of it.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Annotated

from fastapi import Request
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.transport_security import TransportSecuritySettings
from mcp.types import ToolAnnotations
from pydantic import Field, JsonValue
from starlette import types

from api.auth import address_of
from api.gate import Call, Caller, bearer_key
from api.inputs import PostedJob, job_of
from api.problems import ProblemError, from_store, problem_response, request_id
from api.routes.jobs import Posting
from api.routes.leaderboard import check_filters
from api.service import Service
from optigpu import __version__
from optigpu.documents.fields import line
from optigpu.documents.queries import LeaderboardQuery
from optigpu.documents.views import WorkerView
from optigpu.fit.advice import Evidence, best_measured, evidence_of
from optigpu.job.spec import JobSpec
from optigpu.store import events, jobs, leaderboard, results, workers
from optigpu.store.database import Session
from optigpu.store.keys import Scope
from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import Layer, StoreError

PATH = "/mcp"
CALLER = "mcp_caller"
"""Where the state of a request has who calls."""
INSTRUCTIONS = (
    "OptiGPU measures what each optimization layer buys for a model on real hardware. Ask `leaderboard` for the best "
    "measured stacks and `advise` for one; `submit_job` measures others, and `follow_job` waits for them. Every figure "
    "has a 95% interval: two figures whose intervals overlap are not different. `compare` decides."
)


class Endpoint:
    """The ASGI application of the endpoint."""

    def __init__(self, service: Service) -> None:
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

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
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


def _server(service: Service) -> MCPServer:
    server: MCPServer = MCPServer(
        "optigpu", title="OptiGPU", version=__version__, instructions=INSTRUCTIONS, subscriptions=False
    )
    tools = Tools(service)
    for name, notes in TOOLS.items():
        server.add_tool(getattr(tools, name), annotations=notes)
    return server


LONGEST_WAIT_S = 60.0
ROWS = 20
READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
POSTS = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=False)
TOOLS = {
    "list_techniques": READS,
    "leaderboard": READS,
    "compare": READS,
    "advise": READS,
    "get_job": READS,
    "follow_job": READS,
    "preview_job": READS,
    "submit_job": POSTS,
}
"""The tools by their names; only the last one changes anything."""

Answer = dict[str, JsonValue]
Job = Annotated[
    Answer, Field(description="The body of POST /v1/jobs: workload, model, stack, plan, device ...")
]
JobId = Annotated[str, Field(description="The id of a job, as submit_job returned it.")]
ResultId = Annotated[str, Field(description="The id of a result, as leaderboard and get_job show it.")]
WHERE = "this service"


class Tools:
    """What a program may ask of the service. Every method raises ToolError, with the API's own words."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def list_techniques(self, context: Context, layer: Layer | None = None) -> Answer:
        """The techniques that a stack can be made of, of one layer or of all: what each does, its parameters, what it
        requires and excludes, and what it is expected to buy."""
        from optigpu.report.catalog import technique_fact

        with self._allowed(context, Scope.READ):
            facts = (technique_fact(kind) for kind in TECHNIQUES.values() if layer in (None, kind.layer))
            return {"techniques": list(facts)}

    def leaderboard(
        self,
        context: Context,
        workload: Annotated[str | None, Field(description="A kind such as generate, or a digest.")] = None,
        model: str | None = None,
        hardware: Annotated[str | None, Field(description="Part of a hardware class.")] = None,
        technique: str | None = None,
        metric: Annotated[str | None, Field(description="Default: each board's own.")] = None,
        min_top1: Annotated[float | None, Field(ge=0, le=1, description="Least agreement with fp32.")] = None,
        clean: Annotated[bool, Field(description="Leave out results with warnings.")] = False,
    ) -> Answer:
        """The best measured stacks: boards of comparable results, best first, each with its 95% interval. Rows whose
        intervals overlap share a rank."""
        asked = {"workload": workload, "model": model, "hardware": hardware, "technique": technique}
        query = LeaderboardQuery(**asked, metric=metric, min_top1=min_top1, clean=clean, limit=ROWS)
        with self._allowed(context, Scope.READ), self._service.database.read() as session:
            check_filters(session, query)
            return leaderboard.query(session, query).model_dump(mode="json")

    def compare(self, context: Context, baseline: ResultId, candidate: ResultId) -> Answer:
        """Two results: the ratio of each metric with its 95% interval, and whether the difference is real."""
        from optigpu.statistics.compare import NotComparableError, compare  # here, because it loads numpy

        with self._allowed(context, Scope.READ):
            with self._service.database.read() as session:
                pair = [results.get(session, each) for each in (baseline, candidate)]
            try:
                return compare(*pair).model_dump(mode="json")
            except NotComparableError as error:
                raise ToolError(str(error)) from None

    def advise(
        self,
        context: Context,
        model: Annotated[str, Field(description="preset:NAME, bundled:tiny, path:DIR or a hub name.")],
        hardware: Annotated[
            str | None, Field(description="Part of a hardware class. Default: a worker's.")
        ] = None,
        max_kld: Annotated[
            float | None, Field(ge=0, description="Most divergence from fp32, in nats.")
        ] = None,
        prompt_tokens: Annotated[int, Field(ge=1)] = 128,
        new_tokens: Annotated[int, Field(ge=2)] = 128,
        batch_size: Annotated[int, Field(ge=1)] = 1,
    ) -> Answer:
        """The stack to use for a model that generates text: the best that was measured here, with its evidence and the
        code that measures it; or, where nothing was, the job to post."""
        shapes = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "batch_size": batch_size}
        with self._allowed(context, Scope.READ):
            posted = job_of({"workload": {"kind": "generate", **shapes}, "model": model})
            with self._service.database.read() as session:
                return advice_for(session, posted.spec, hardware, max_kld)

    def get_job(self, context: Context, id: JobId) -> Answer:
        """A job: its state, progress, variants with the ids of their results, and why it waits or failed."""
        with self._allowed(context, Scope.READ):
            return self._job(id)

    async def follow_job(
        self,
        context: Context,
        id: JobId,
        wait_s: Annotated[
            float, Field(ge=0, le=LONGEST_WAIT_S, description="How long to wait at most.")
        ] = 30,
    ) -> Answer:
        """Waits until a job has ended, or for so many seconds, and returns it. Call it again while it has not."""
        with self._allowed(context, Scope.READ):
            newest = (await asyncio.to_thread(self._head, id)).sequence
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    async for _ in self._service.feeds.follow(id, newest):
                        pass
            return await asyncio.to_thread(self._job, id)

    def preview_job(self, context: Context, job: Job) -> Answer:
        """Validates a job without posting it: its variants, and about how long they take."""
        with self._allowed(context, Scope.READ):
            return job_of(job).preview().model_dump(mode="json")

    async def submit_job(self, context: Context, job: Job) -> Answer:
        """Posts a job; a worker measures it. Needs a key with the scope submit. A measurement that was made before is
        answered with its results, unless the job is `fresh`."""
        with self._allowed(context, Scope.SUBMIT) as who:
            posted: PostedJob = job_of(job)
            return (await Posting(self._service, who).submit(posted.spec)).model_dump(mode="json")

    def _head(self, job_id: str) -> events.Head:
        with self._service.database.read() as session:
            return events.head(session, job_id)

    def _job(self, job_id: str) -> Answer:
        with self._service.database.read() as session:
            found = jobs.get(session, job_id, lease_s=self._service.settings.lease_s)
        return found.model_dump(mode="json")

    @contextmanager
    def _allowed(self, context: Context, scope: Scope) -> Iterator[Caller]:
        """Who calls. Raises ToolError unless the caller may, and for what the block finds wrong."""
        who = _caller(context)
        if not who.may(scope):
            raise ToolError(
                f"This needs a key with the scope {scope}, in the header Authorization: Bearer KEY."
            )
        try:
            yield who
        except ProblemError as problem:
            raise ToolError(_sentences(problem)) from None
        except StoreError as error:
            raise ToolError(_sentences(from_store(error))) from None


def _caller(context: Context) -> Caller:
    request = context.request_context.request
    assert isinstance(request, Request), "it came over HTTP"
    who = request.scope["state"][CALLER]
    assert isinstance(who, Caller)
    return who


def _sentences(problem: ProblemError) -> str:
    """Each field that is wrong, or the one sentence of another problem."""
    return "\n".join(map(line, problem.errors)) or problem.detail


def advice_for(
    session: Session, spec: JobSpec, hardware: str | None, max_kld: float | None
) -> dict[str, JsonValue]:
    """The best measured stack on a class of hardware, or what to post where nothing was measured there.

    Without `hardware` it is that of a worker, or else that of the newest result. Versions are those of the class's
    worker, or else those of its newest result.
    """
    evidence = evidence_of(results.of_workload(session, spec.workload.kind, spec.model), spec, WHERE)
    place = _place(workers.list_(session), evidence, hardware)
    if place is not None:
        name, software = place
        advice = best_measured(evidence, spec, name, software, max_kld=max_kld)
        if advice is not None:
            return advice.model_dump(mode="json")
    ladder = {"workload": spec.workload.model_dump(mode="json"), "model": spec.model, "plan": "ladder"}
    where = place[0] if place else hardware or "any hardware"
    return {
        "basis": "none",
        "reason": f"Nothing of this workload was measured on {where} with today's versions; post this job.",
        "job": ladder | {"stack": [{"name": "bf16"}, {"name": "int8_weight_only"}]},
    }


def _place(
    known: list[WorkerView], evidence: list[Evidence], hardware: str | None
) -> tuple[str, dict[str, str]] | None:
    """A class of hardware whose name has that part, and its software."""

    def fits(name: str) -> bool:
        return hardware is None or hardware.lower() in name.lower()

    serving = [worker for worker in known if fits(worker.hardware_class)]
    for worker in sorted(serving, key=lambda each: each.alive, reverse=True):
        if worker.software:
            return worker.hardware_class, worker.software
    return next(((each.hardware, each.versions) for each in evidence if fits(each.hardware)), None)
