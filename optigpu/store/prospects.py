"""Who can take a job that is posted, remembered for a moment: many jobs ask for the same of a worker."""

import time
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy.orm import Session

from optigpu.job.needs import Need
from optigpu.store import unserved, workers
from optigpu.store.unserved import Prospects
from optigpu.vocabulary import DeviceKind

REMEMBERED_S = 1.0
MOST = 256

Demand = tuple[DeviceKind, str | None, int, tuple[Need, ...]]
"""What a job asks for of a worker: device, part of a GPU's name, bytes of its memory, and needs."""
RollCall = tuple[int, datetime | None]


@dataclass
class KnownProspects:
    """The prospects of recent demands, valid while no worker has come or gone, and for a second: a worker's models may
    change while it lives. For many threads."""

    _known: dict[Demand, tuple[RollCall, float, Prospects]] = field(default_factory=dict)

    def of(self, session: Session, job_id: str, demand: Demand, lease_s: float, at: datetime) -> Prospects:
        """The prospects of a queued job that makes this demand."""
        present = workers.roll_call(session, lease_s, at)
        then, until, prospects = self._known.get(demand, (None, 0.0, None))
        if prospects is not None and then == present and time.monotonic() < until:
            return prospects
        prospects = unserved.look(session, [job_id], lease_s)[job_id]
        if len(self._known) >= MOST:
            self._known.clear()
        self._known[demand] = present, time.monotonic() + REMEMBERED_S, prospects
        return prospects
