"""MLPerf's scenarios in a job's table."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from optigpu.documents.older import facts_of
from optigpu.report.numbers import MISSING, short
from optigpu.report.rows import Row, empty_cells


@dataclass(frozen=True)
class Scenario:
    """A scenario of MLPerf Inference (Reddi et al., 2019, arXiv:1911.02549).

    It is judged by `field` of the summary of `metric`, times `scale`, under `heading`; `meaning` goes below the table.
    """

    metric: str
    field: str
    scale: float
    heading: str
    meaning: str

    def figure(self, row: Row) -> str:
        value = (row.metric(self.metric) or {}).get(self.field)
        return MISSING if value is None else short(value * self.scale)

    def notes(self, rows: Sequence[Row]) -> Iterator[str]:
        """Notes on the meaning of the column, and on empty cells."""
        yield f"{self.meaning} The rules of its published results are stricter."
        lacking = [row for row in rows if row.result and self.figure(row) == MISSING]
        reasons = ((row.label, (row.metric(self.metric) or {}).get("reason")) for row in lacking)
        yield from empty_cells(self.heading, reasons)


SCENARIOS = {
    "SingleStream": Scenario(
        "latency_s",
        "p90",
        1e3,
        "p90 latency (ms)",
        "p90 latency: what MLPerf's scenario SingleStream is judged by, one query after the other; of each "
        "process, averaged over the processes.",
    ),
    "Server": Scenario(
        "latency_s",
        "p99",
        1e3,
        "p99 latency (ms)",
        "p99 latency: what MLPerf's scenario Server is judged by, queries that come by chance at a rate; of each "
        "process, averaged over the processes.",
    ),
    "Offline": Scenario(
        "requests_per_s",
        "value",
        1.0,
        "samples/s",
        "samples/s: what MLPerf's scenario Offline is judged by, all queries at once.",
    ),
}


def scenario_of(rows: Sequence[Row]) -> Scenario | None:
    """The scenario of a job's results, if they have the same one and any of them has its figure."""
    names = {facts_of(row.result).get("scenario") for row in rows if row.result}
    found = SCENARIOS.get(str(names.pop())) if len(names) == 1 else None
    return found if found and any(found.figure(row) != MISSING for row in rows) else None
