"""A client of the service over HTTP.

    with Client("http://127.0.0.1:8000") as client:
        job = client.submit({"workload": {"kind": "matmul"}})
        client.wait(job.id)
        results = client.results(job.id)

Results come as plain JSON, as they were stored; all else as the models of `optigpu.documents.views`, without the fields
that only a newer service knows.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
import stamina
from httpx_sse import connect_sse
from pydantic import BaseModel, RootModel, ValidationError

from optigpu.documents.devices import DeviceReportPage, DeviceReportView, EdgeBoard, EdgeModelView, EdgePage
from optigpu.documents.fields import line
from optigpu.documents.gates import GateOutcome, GatePage, GateRequest, GateView
from optigpu.documents.others import OthersFile, OthersView
from optigpu.documents.views import (
    ArtifactsView,
    Comparison,
    EventView,
    JobPage,
    JobView,
    LeaderboardPage,
    LeaderboardRow,
    SamplesView,
    WithdrawalView,
    WorkerView,
)
from optigpu.http_clients import http_client, proxy_at_fault
from optigpu.job.spec import JobSpec
from optigpu.vocabulary import Frozen, OptiGPUError, ServiceError, SpecError, UnreachableError, new_id

TIMEOUT = httpx.Timeout(10.0, read=30.0)
STREAM_TIMEOUT = httpx.Timeout(10.0, read=60.0)
"""The service sends comments even if nothing happens, so a longer silence means a broken connection."""

ATTEMPTS = 5
LARGEST_PAGE = 200
RECONNECT_S = 1.0

_AGAIN_STATUS = {429, 502, 503, 504}

View = TypeVar("View", bound=BaseModel)
Page = TypeVar("Page", EdgePage, DeviceReportPage)


class _Workers(Frozen):
    workers: tuple[WorkerView, ...]


_Document = RootModel[dict[str, Any]]


class Client:
    """Calls one service; retries a few times if the connection or the service fails for a moment.

    Raises SpecError for what is no address or no key, UnsupportedError for a proxy or certificates of the environment
    that cannot be used. Methods raise ServiceError when the service answers with a
    problem, UnreachableError when none answers.
    """

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise SpecError("The API key has characters that no key has; copy it again.")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        url = (base_url if "://" in base_url else f"http://{base_url}").rstrip("/")
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL:
            parsed = httpx.URL()
        if parsed.scheme not in ("http", "https") or not parsed.host or any(map(str.isspace, base_url)):
            raise SpecError(f"{base_url!r} is not the address of a service; write it as http://HOST:PORT.")
        self.base_url = url
        self._http = http_client(self.base_url, headers=headers, timeout=TIMEOUT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def submit(self, spec: JobSpec | Mapping[str, Any], *, idempotency_key: str | None = None) -> JobView:
        """Posts a job. The same key again gives the same job; without one, the client makes its own. Raises
        ServiceError, whose `problem` names each field that is wrong."""
        body = spec.model_dump(mode="json") if isinstance(spec, JobSpec) else dict(spec)
        headers = {"Idempotency-Key": idempotency_key or new_id()}
        return _view(JobView, self._call("POST", "/v1/jobs", json=body, headers=headers))

    def import_run(self, document: Mapping[str, Any]) -> JobView:
        """Enters a run that was kept elsewhere as a job that has ended."""
        return _view(JobView, self._call("POST", "/v1/imports", json=dict(document)))

    def add_gate(self, series: str, outcome: GateOutcome) -> GateView:
        """Keeps what a gate found in a series."""
        document = GateRequest(series=series, outcome=outcome).model_dump(mode="json")
        return _view(GateView, self._call("POST", "/v1/gates", json=document))

    def gates(
        self, series: str | None = None, limit: int | None = None, cursor: str | None = None
    ) -> GatePage:
        """A page of gates, newest first."""
        return self._get(GatePage, "gates", series=series, limit=limit, cursor=cursor)

    def import_others(self, file: OthersFile) -> OthersView:
        """Enters what another tool measured; the same again changes nothing."""
        return _view(OthersView, self._call("POST", "/v1/imports/others", json=file.model_dump(mode="json")))

    def job(self, job_id: str) -> JobView:
        """One job with its attempts and variants."""
        return self._get(JobView, "jobs", job_id)

    def jobs(
        self,
        *,
        state: str | None = None,
        tag: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> JobPage:
        """A page of jobs, newest first."""
        return self._get(JobPage, "jobs", state=state, tag=tag, limit=limit, cursor=cursor)

    def cancel(self, job_id: str) -> JobView:
        """Asks for a job to stop; changes nothing if it has ended."""
        return _view(JobView, self._call("POST", _path("jobs", job_id, "cancel")))

    def events(self, job_id: str, after: int = 0) -> Iterator[EventView]:
        """The job's events from sequence `after` + 1 on, as they happen, until the job has ended. A broken connection
        is made again, and resumes behind the last event that came."""
        while True:
            ended = self.job(job_id).state.is_final
            try:
                for event in self._stream(job_id, after):
                    after = event.sequence
                    yield event
            except (httpx.HTTPStatusError, httpx.TransportError) as error:
                if not _worth_another_try(error):
                    raise _as_ours(error, self.base_url) from error
                time.sleep(RECONNECT_S)
                continue
            if ended:
                return

    def wait(self, job_id: str, on_event: Callable[[EventView], None] | None = None) -> JobView:
        """Follows a job to its end, handing each event to `on_event`, and returns the job."""
        for event in self.events(job_id):
            if on_event:
                on_event(event)
        return self.job(job_id)

    def report(self, job_id: str) -> dict[str, Any]:
        """`{"spec", "results", "attribution"}`, the object that `optigpu run --format json` prints. It holds the
        results so far; the attribution is null until the job has ended."""
        return self._get(_Document, "jobs", job_id, "results").root

    def results(self, job_id: str) -> list[dict[str, Any]]:
        """The results of a job's variants so far."""
        results: list[dict[str, Any]] = self.report(job_id)["results"]
        return results

    def result(self, result_id: str) -> dict[str, Any]:
        """One result."""
        return self._get(_Document, "results", result_id).root

    def samples(self, result_id: str) -> SamplesView:
        """The raw samples of a result."""
        return self._get(SamplesView, "results", result_id, "samples")

    def artifacts(self, result_id: str) -> ArtifactsView:
        """The files that were kept with a result."""
        return self._get(ArtifactsView, "results", result_id, "artifacts")

    def artifact(self, result_id: str, name: str) -> bytes:
        """One of these files."""
        return self._call("GET", _path("results", result_id, "artifacts", name)).content

    def compare(self, baseline: str, candidate: str, *, anyway: bool = False) -> Comparison:
        """One result against another, each by its id. With `anyway` also where workload or hardware differ."""
        return self._get(Comparison, "compare", baseline=baseline, candidate=candidate, anyway=anyway)

    def leaderboard(self, **query: str | float | bool | None) -> LeaderboardPage:
        """A page of boards with their rows; `workload` with a board's digest gives all of its rows.

        `query`: metric, workload, model, hardware, technique, backend, min_top1, max_kld, clean, include_invalid,
        include_history, others, source, limit, cursor.
        """
        return self._get(LeaderboardPage, "leaderboard", **query)

    def leaderboard_rows(self, **query: str | float | bool | None) -> Iterator[LeaderboardRow]:
        """Every row of every board, page by page; `query` as for `leaderboard`, without limit and cursor."""
        cursors: list[str | None] = [None]
        while cursors:
            page = self.leaderboard(**query, limit=LARGEST_PAGE, cursor=cursors.pop())
            for board in page.boards:
                yield from board.rows
            following = (page.next_cursor, *(board.next_cursor for board in page.boards))
            cursors += [cursor for cursor in following if cursor]

    def edge_leaderboard(self, **query: str | float | bool | None) -> EdgePage:
        """A page of boards of edge devices; `model`, `input` and `runner` together give all rows of one.

        `query`: metric, model, board, input, runner, include_unranked, price, price_per_kwh, lifetime_years, limit,
        cursor.
        """
        return self._get(EdgePage, "edge", "leaderboard", **query)

    def edge_text(self, form: str, **query: str | float | bool | None) -> str:
        """The same page as the service writes it, `csv` or, with `md`, Markdown."""
        asked = {name: value for name, value in query.items() if value is not None} | {"format": form}
        return self._call("GET", "/v1/edge/leaderboard", params=asked).text

    def edge_boards(self, **query: str | float | bool | None) -> Iterator[EdgeBoard]:
        """Every board, page by page, each with its first rows; `query` as for `edge_leaderboard`, without cursor."""
        for page in _pages(lambda cursor: self.edge_leaderboard(**query, cursor=cursor)):
            yield from page.boards

    def withdraw_result(self, result_id: str, reason: str) -> WithdrawalView:
        """Removes a result; the next best one takes its place on the leaderboard. Needs the scope admin."""
        return self._withdraw(_path("results", result_id), reason)

    def withdraw_job(self, job_id: str, reason: str) -> WithdrawalView:
        """Removes a job that is not running, with all of its results. Needs the scope admin."""
        return self._withdraw(_path("jobs", job_id), reason)

    def workers(self) -> list[WorkerView]:
        """The workers and what they can run."""
        return list(self._get(_Workers, "workers").workers)

    def add_edge_model(self, manifest: Mapping[str, Any]) -> EdgeModelView:
        """Enters the manifest of a model for edge devices; the same one again changes nothing."""
        return _view(EdgeModelView, self._call("POST", "/v1/edge/models", json=dict(manifest)))

    def device_reports(self, device_id: str) -> Iterator[DeviceReportView]:
        """Every stored report of an edge device, the newest first."""
        path = ("devices", device_id, "reports")
        for page in _pages(lambda at: self._get(DeviceReportPage, *path, limit=LARGEST_PAGE, cursor=at)):
            yield from page.reports

    def _withdraw(self, path: str, reason: str) -> WithdrawalView:
        return _view(WithdrawalView, self._call("DELETE", path, params={"reason": reason}))

    def _get(self, kind: type[View], *parts: str, **query: str | float | bool | None) -> View:
        asked = {name: value for name, value in query.items() if value is not None}
        return _view(kind, self._call("GET", _path(*parts), params=asked))

    def _stream(self, job_id: str, after: int) -> Iterator[EventView]:
        headers = {"Last-Event-ID": str(after)} if after else {}
        path = _path("jobs", job_id, "events")
        with connect_sse(self._http, "GET", path, headers=headers, timeout=STREAM_TIMEOUT) as source:
            if source.response.is_error:
                source.response.read()
                source.response.raise_for_status()
            for message in source.iter_sse():
                if message.data:  # a comment that keeps the connection alive comes as a message without data
                    yield EventView.model_validate_json(message.data, extra="ignore")

    def _call(self, method: str, path: str, **request: Any) -> httpx.Response:
        """Sends a request that may safely be sent again."""
        try:
            return _RETRY(lambda: self._http.request(method, path, **request).raise_for_status())
        except (httpx.HTTPStatusError, httpx.TransportError) as error:
            raise _as_ours(error, self.base_url) from error


def _worth_another_try(error: Exception) -> bool:
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in _AGAIN_STATUS
    return isinstance(error, httpx.TransportError)


_RETRY = stamina.RetryingCaller(attempts=ATTEMPTS).on(_worth_another_try)


def _as_ours(error: httpx.HTTPStatusError | httpx.TransportError, base_url: str) -> OptiGPUError:
    if at_fault := proxy_at_fault(base_url, error):
        return UnreachableError(f"The service at {base_url} cannot be reached: {at_fault}.")
    if isinstance(error, httpx.HTTPStatusError):
        # The problem document as an error; its text names each field that is wrong.
        try:
            found = error.response.json()
        except ValueError:
            found = None
        problem = found if isinstance(found, dict) else {}
        errors = problem.get("errors")
        entries = errors if isinstance(errors, list) else []
        fields = "\n".join(
            line(each) for each in entries if isinstance(each, dict) and {"field", "message"} <= each.keys()
        )
        text = fields or problem.get("detail") or f"The service answered {error.response.status_code}."
        return ServiceError(text, error.response.status_code, problem)
    return UnreachableError(
        f"No service answers at {base_url} ({error}); start one with `make serve`, or check the address."
    )


def _view(kind: type[View], response: httpx.Response) -> View:
    try:
        return kind.model_validate_json(response.content, extra="ignore")
    except ValidationError as error:
        raise ServiceError(
            f"{response.url} does not look like an OptiGPU service; check the address.",
            response.status_code,
        ) from error


def _pages(read: Callable[[str | None], Page]) -> Iterator[Page]:
    """Every page, from the first on."""
    cursor = None
    while True:
        yield (page := read(cursor))
        if (cursor := page.next_cursor) is None:
            return


def _path(*parts: str) -> str:
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)
