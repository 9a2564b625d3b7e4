"""Checks the filters of the leaderboard: a name that is unknown is refused with those that are known.

Known is what this version can measure and what the database holds results of.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from api.problems import ProblemError, summary
from optigpu.backends import BACKENDS
from optigpu.documents.fields import Entry, unknown
from optigpu.documents.queries import LeaderboardQuery
from optigpu.models.reference import BUNDLED, IMAGE_PRESETS, PRESETS
from optigpu.store import filters, workers
from optigpu.store.database import Session
from optigpu.techniques import TECHNIQUES
from optigpu.workloads import WORKLOADS

MODELS = (
    *(f"preset:{name}" for name in PRESETS | IMAGE_PRESETS),
    *(f"bundled:{name}" for name in BUNDLED),
)
"""The models that have a name of their own; repositories and folders are known once they have results."""


class Names(NamedTuple):
    """The names that a filter can have: those of this version, those of stored results, and how they are compared."""

    ours: Iterable[str]
    stored: Callable[[Session], list[str]]
    fits: Callable[[str, str], bool] = str.__eq__


def _is_part(wanted: str, name: str) -> bool:
    return wanted.lower() in name.lower()


def _is_same(wanted: str, name: str) -> bool:
    return wanted.lower() == name


NAMES = {
    "workload": Names(WORKLOADS, partial(filters.names, filter_="workload")),
    "model": Names(MODELS, partial(filters.names, filter_="model")),
    "hardware": Names((), workers.hardware_classes, _is_part),
    "technique": Names(TECHNIQUES, partial(filters.names, filter_="technique"), _is_same),
    "backend": Names(BACKENDS, partial(filters.names, filter_="backend")),
    "source": Names(("worker",), partial(filters.names, filter_="source")),
}


def check_filters(session: Session, query: LeaderboardQuery) -> None:
    """Raises ProblemError 422 that names each filter that fits nothing known, with what is known, close names first."""
    given = query.model_dump(include=set(NAMES), exclude_none=True)
    entries = [entry for field, name in given.items() if (entry := _refusal(session, field, name))]
    if entries:
        raise ProblemError(422, summary(entries), entries)


def _refusal(session: Session, field: str, given: str) -> Entry | None:
    names = NAMES[field]
    if any(names.fits(given, name) for name in names.ours):
        return None
    if field == "workload" and filters.has_workload(session, given):
        return None
    known = {*names.ours, *names.stored(session)}
    if any(names.fits(given, name) for name in known):
        return None
    return unknown([field], field, given, known)
