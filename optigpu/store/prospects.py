"""Who can take a job that is posted, remembered for a moment: many jobs ask for the same of a worker."""

import time
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy.orm import Session

from optigpu.job.needs import Need
from optigpu.store import unserved, workers
from optigpu.store.database import moment
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
    change while it lives. For one thread."""

    _known: dict[Demand, tuple[RollCall, float, Prospects]] = field(default_factory=dict)

    def look(self, session: Session, lease_s: float) -> "Look":
        """Who is there now, for the jobs of one transaction."""
        return Look(session, lease_s, workers.roll_call(session, lease_s, moment(session)), self._known)


@dataclass(frozen=True)
class Look:
    """The prospects at one moment."""

    session: Session
    lease_s: float
    present: RollCall
    known: dict[Demand, tuple[RollCall, float, Prospects]]

    def of(self, job_id: str, demand: Demand) -> Prospects:
        """The prospects of a queued job that makes this demand."""
        then, until, prospects = self.known.get(demand, (None, 0.0, None))
        if prospects is not None and then == self.present and time.monotonic() < until:
            return prospects
        prospects = unserved.look(self.session, [job_id], self.lease_s)[job_id]
        if len(self.known) >= MOST:
            self.known.clear()
        self.known[demand] = self.present, time.monotonic() + REMEMBERED_S, prospects
        return prospects
