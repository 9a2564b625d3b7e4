"""The launcher: hands the jobs that wait for a scheduler to it, follows them there, and cancels what nobody needs.

All that it knows is in the database and with the scheduler, so that it goes on where an earlier one has died: a launch
is written before the scheduler is asked, and carries a name by which it is found there.
"""

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import structlog

from optigpu.clusters import Task, name_of, options_of
from optigpu.documents.views import LaunchState
from optigpu.store import launches, leases
from optigpu.store.database import Database, Session, StoreUnavailableError
from optigpu.store.launches import Begun, Launch
from optigpu.vocabulary import Scheduler
from worker.context import LauncherSettings, Stopping
from worker.launchers.base import PATIENCE_S, Access, Launcher, SchedulerAwayError, SchedulerError, Seen

UNCONFIRMED = timedelta(seconds=2 * PATIENCE_S)
"""How long a launch may be unknown to the scheduler: a client that gave up, or died, may still have submitted it."""
TO_END = timedelta(seconds=30)
"""How long a pilot may take to end after its job has."""

T = TypeVar("T")
log = structlog.stdlib.get_logger(__name__)


@dataclass
class LaunchLoop:
    """The launcher of one scheduler. Several may run: a job has one launch at a time."""

    scheduler: Scheduler
    launcher: Launcher
    database: Database
    settings: LauncherSettings
    stopping: Stopping = field(default_factory=Stopping)

    def serve(self) -> None:
        """Rounds until the process is asked to stop; what was handed over goes on without it."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self.stopping.ask())
        log.info("launcher.started", scheduler=self.scheduler)
        while not self.stopping.asked:
            try:
                self.round()
            except StoreUnavailableError as error:
                log.warning("database.away", reason=str(error))
            except Exception:  # whatever it was, the next round tries again
                log.exception("round.failed")
            self.stopping.wait(self.settings.launch_poll_s)
        log.info("launcher.stopped", scheduler=self.scheduler)

    def round(self) -> None:
        """Looks at every launch, and hands over what waits. Raises StoreUnavailableError."""
        self._write(leases.sweep)
        try:
            self._follow_all()
            self._launch_all()
        except SchedulerError as error:
            log.warning("scheduler.away", reason=str(error))
            self._say(str(error))
        else:
            self._say(None)

    def _follow_all(self) -> None:
        live = self._live()
        seen = self.launcher.status({each.reference for each in live if each.reference})
        for launch in live:
            self._follow(launch, seen.get(name_of(launch.id)))

    def _follow(self, launch: Launch, seen: Seen | None) -> None:
        if seen is None:
            if launch.reference is not None or launch.now - launch.created_at > UNCONFIRMED:
                self._end(launch.id, f"The scheduler {self.scheduler} does not know this job.")
        elif seen.state is LaunchState.ENDED:
            self._end(launch.id, seen.reason or "It ended.")
        else:
            if (seen.state, seen.reference) != (launch.state, launch.reference):
                self._write(lambda session: launches.note(session, launch.id, seen.state, seen.reference))
            if _is_needless(launch, seen):
                log.info("launch.cancelled", job_id=launch.job_id, reference=seen.reference)
                self._try(lambda: self.launcher.cancel(seen.reference))

    def _launch_all(self) -> None:
        for _ in range(self.settings.launch_at_once - len(self._live())):
            begun = None if self.stopping.asked else self._write(self._begin)
            if begun is None:
                return
            self._submit(begun)

    def _begin(self, session: Session) -> Begun | None:
        return launches.begin(session, self.scheduler)

    def _submit(self, begun: Begun) -> None:
        """Raises SchedulerAwayError if it is unknown whether the job was submitted; a later round finds out."""
        task = Task(
            name=name_of(begun.id),
            job_id=begun.job_id,
            spec=begun.spec,
            options=options_of(self.settings.launch_options or ""),
            setup=self.settings.launch_setup or "",
        )
        try:
            reference = self.launcher.submit(task, Access(url=self.settings.url, token=begun.token))
        except SchedulerAwayError:
            raise
        except SchedulerError as error:
            self._end(begun.id, str(error))
            return
        self._write(lambda session: launches.note(session, begun.id, LaunchState.PENDING, reference))
        log.info("launch.submitted", job_id=begun.job_id, reference=reference)

    def _end(self, launch_id: str, reason: str) -> None:
        self._write(lambda session: launches.end(session, launch_id, reason))
        log.info("launch.ended", launch_id=launch_id, reason=reason)

    def _live(self) -> list[Launch]:
        with self.database.read() as session:
            return list(launches.live(session, self.scheduler))

    def _say(self, problem: str | None) -> None:
        self._write(lambda session: launches.seen(session, self.scheduler, problem))

    def _try(self, call: Callable[[], None]) -> None:
        """One that is refused is tried again in the next round."""
        try:
            call()
        except SchedulerAwayError:
            raise
        except SchedulerError as error:
            log.warning("scheduler.refused", reason=str(error))

    def _write(self, change: Callable[[Session], T]) -> T:
        with self.database.write() as session:
            return change(session)


def _is_needless(launch: Launch, seen: Seen) -> bool:
    """Whether its job has ended without it, or its token has."""
    if launch.job_ended_at is not None and launch.job_state.is_final:
        waits = seen.state is LaunchState.PENDING
        return waits or launch.now - launch.job_ended_at > TO_END
    return launch.expires_at <= launch.now
