"""python -m optigpu.child.selftest: the process that runs checks of the self-test, one after the other.

It reads `ListChecks` and `RunCheck` from stdin, and answers `Checks`, `Checked`, `Refused` or `Broken`, as
`optigpu.child.connection` says.
"""

import gc
import math
from pathlib import Path
from typing import NoReturn, assert_never

from optigpu.backends import BACKENDS
from optigpu.child.connection import broken, connect
from optigpu.child.messages import (
    SELF_TEST_COMMAND,
    Answer,
    AnySelfTestCommand,
    Checked,
    Checks,
    ListChecks,
    Refused,
    RunCheck,
)
from optigpu.programs import ResidentProgram, programs_run_by
from optigpu.selftest.checks import all_checks, run_check
from optigpu.selftest.setting import PLAIN_BACKEND, Setting
from optigpu.vocabulary import UnsupportedError


def main() -> NoReturn:
    """Answers each command, for ever: the thread that reads stdin ends the process."""
    lines, tell = connect("optigpu.child.selftest", "Checks techniques, kernels and meters on this machine.")
    # A model is small here: each converter would take longer to start than to write it.
    with programs_run_by(ResidentProgram().run):
        while True:
            line = lines.get()
            try:
                tell(_answer(SELF_TEST_COMMAND.validate_json(line)))
            except UnsupportedError as error:
                tell(Refused(reason=str(error)))
            except Exception as error:
                tell(broken(error))


def _answer(command: AnySelfTestCommand) -> Answer:
    match command:
        case ListChecks():
            return Checks(checks=all_checks())
        case RunCheck():
            return checked(command)
        case _:
            assert_never(command)


def checked(command: RunCheck) -> Checked:
    """Runs one check. Raises what it raises."""
    for engine in filter(None, (command.check.backend, PLAIN_BACKEND)):
        BACKENDS[engine].use_threads(command.threads)
    setting = Setting(command.environment, command.check.device, command.threads, Path(command.folder))
    found = run_check(command.check, setting)
    gc.collect()  # the models of this check, before the next one loads its own
    error = found.error if math.isfinite(found.error) else None
    return Checked(error=error, bound=found.bound, of=found.of, how=found.how)


if __name__ == "__main__":
    main()
