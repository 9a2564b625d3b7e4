"""Links between calls in the OpenAPI document: which field of an answer is which parameter of another call.

A client that follows them comes from a posted job to its results, and from a row of the leaderboard to raw samples.
"""

from collections.abc import Mapping
from dataclasses import dataclass

ID = "$response.body#/id"
SAME_ID = "$request.path.id"
NEW_JOB = ("submit_job", 202), ("import_run", 201)


@dataclass(frozen=True)
class Link:
    """From an answer of one call to another call, by the ids that both have."""

    source: str
    status: int
    target: str
    parameters: Mapping[str, str]

    def document(self) -> dict[str, object]:
        """The link object of the OpenAPI specification."""
        return {"operationId": self.target, "parameters": dict(self.parameters)}


def _links(source: str, status: int, parameters: Mapping[str, str], *targets: str) -> tuple[Link, ...]:
    """Links to several calls that take the same parameters."""
    return tuple(Link(source, status, target, parameters) for target in targets)


OF_A_JOB = "get_job", "follow_job", "get_job_results", "cancel_job", "withdraw_job"
OF_A_RESULT = "get_result", "get_samples", "list_artifacts", "withdraw_result"
LINKS = (
    *(link for source, status in NEW_JOB for link in _links(source, status, {"id": ID}, *OF_A_JOB)),
    *_links("list_jobs", 200, {"id": "$response.body#/jobs/0/id"}, *OF_A_JOB),
    *_links("get_job", 200, {"id": SAME_ID}, *OF_A_JOB[1:]),
    *_links("get_job", 200, {"id": "$response.body#/variants/0/result_id"}, *OF_A_RESULT),
    *_links("cancel_job", 200, {"id": ID}, "get_job", "get_job_results"),
    *_links("get_job_results", 200, {"id": "$response.body#/results/0/id"}, *OF_A_RESULT),
    Link(
        "get_job_results",
        200,
        "compare_results",
        {"baseline": "$response.body#/results/0/id", "candidate": "$response.body#/results/1/id"},
    ),
    *_links("get_result", 200, {"id": SAME_ID}, *OF_A_RESULT[1:]),
    *_links("get_result", 200, {"id": "$response.body#/job_id"}, "get_job", "get_job_results"),
    Link(
        "list_artifacts",
        200,
        "get_artifact",
        {"id": SAME_ID, "name": "$response.body#/artifacts/0/name"},
    ),
    *_links("get_leaderboard", 200, {"id": "$response.body#/boards/0/rows/0/result_id"}, *OF_A_RESULT),
    *_links("get_leaderboard", 200, {"id": "$response.body#/boards/0/rows/0/job_id"}, "get_job"),
    Link(
        "get_leaderboard",
        200,
        "compare_results",
        {
            "baseline": "$response.body#/boards/0/rows/0/result_id",
            "candidate": "$response.body#/boards/0/rows/1/result_id",
        },
    ),
    *_links("list_devices", 200, {"id": "$response.body#/devices/0/id"}, "get_device", "list_device_reports"),
    *_links("get_device", 200, {"id": SAME_ID}, "list_device_reports"),
)


def links_of(operation: str, status: str) -> dict[str, object]:
    """The links from one answer of a call, by the call that they lead to."""
    return {
        link.target: link.document()
        for link in LINKS
        if (link.source, str(link.status)) == (operation, status)
    }
