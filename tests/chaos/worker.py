"""`python -m tests.chaos.worker`: the worker with the engine of the chaos test, on a clock that may be hours off."""

import os
import sys
import time
from datetime import datetime, timedelta, tzinfo

import optigpu.vocabulary
import worker.context
import worker.execute
from tests.chaos import engine
from worker import __main__ as program

HOURS = "CHAOS_CLOCK_HOURS"


def main() -> int:
    """Runs the worker; returns the process's exit status."""
    _set_clock(timedelta(hours=float(os.environ.get(HOURS, "0"))))
    for module, name, other in (
        (worker.execute, "run", engine.run),
        (worker.context, "prove", lambda *_, **__: None),
    ):
        setattr(module, name, other)
    return program.main()


def _set_clock(off: timedelta) -> None:
    """What the machine's clock says to everything that asks Python for the time of day."""
    right = time.time

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + off

    time.time = lambda: right() + off.total_seconds()
    optigpu.vocabulary.datetime = Clock  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
