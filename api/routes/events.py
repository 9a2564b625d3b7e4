"""A job's events as a stream."""

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query
from fastapi.responses import StreamingResponse
from fastapi.sse import format_sse_event

from api.auth import Reader
from api.inputs import JobId
from api.openapi import GUARDED, problems, schema_of
from api.service import Service, ServiceDep
from optigpu.documents.views import EventView
from optigpu.store import events
from optigpu.vocabulary import Frozen

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], responses=GUARDED)

LARGEST_SEQUENCE = 2**63 - 1
RECONNECT_MS = 2000


class From(Frozen):
    """Where a stream begins."""

    after: Annotated[
        int,
        Query(ge=0, le=LARGEST_SEQUENCE, description="The sequence of the last event that the caller has."),
    ] = 0


LastEventId = Annotated[
    int | None,
    Header(
        ge=0,
        le=LARGEST_SEQUENCE,
        description="Sent by a browser that reconnects; it takes precedence over `after`.",
    ),
]
MESSAGE: dict[str, object] = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "description": "The event's sequence."},
        "event": {"type": "string", "description": "The event's kind."},
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": schema_of(EventView),
        },
    },
}
STREAM: dict[str, object] = {
    "description": "One message for each event.",
    "content": {"text/event-stream": {"schema": MESSAGE}},
}


def newest_event(job_id: JobId, service: ServiceDep, _: Reader) -> int:
    """The sequence of the job's newest event. Raises NotFoundError."""
    with service.database.read() as session:
        return events.head(session, job_id).sequence


@router.get(
    "/{id}/events",
    operation_id="follow_job",
    summary="Follow a job",
    response_class=StreamingResponse,
    responses=problems(404, 410) | {200: STREAM},
)
async def follow_job(
    job_id: JobId,
    newest: Annotated[int, Depends(newest_event)],
    service: ServiceDep,
    begin: Annotated[From, Query()],
    last_event_id: LastEventId = None,
) -> StreamingResponse:
    """Server-sent events from the first one, or from the one after `Last-Event-ID`, until the job has ended."""
    after = begin.after if last_event_id is None else last_event_id
    return StreamingResponse(
        _messages(service, job_id, min(after, newest)),
        media_type="text/event-stream",
        headers={"X-Accel-Buffering": "no"},
    )


async def _messages(service: Service, job_id: str, after: int) -> AsyncIterator[bytes]:
    """The first event says when to come back if the stream breaks off, as it does when the service stops."""
    retry: int | None = RECONNECT_MS
    async for event in service.feeds.follow(job_id, after):
        if event is None:
            yield format_sse_event(comment="still here")
        else:
            data = event.model_dump_json()
            yield format_sse_event(data_str=data, event=event.kind, id=str(event.sequence), retry=retry)
            retry = None
