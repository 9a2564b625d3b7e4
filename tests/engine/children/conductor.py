"""Not a child but its parent, as a separate process: runs a job with the program that its arguments name."""

import sys
from pathlib import Path

from optigpu.job.spec import JobSpec
from optigpu.measure import run
from tests.engine.processes import program

SPEC = {
    "workload": {"kind": "generate"},
    "model": "preset:tiny-llama-test",
    "limits": {"wait_for_quiet_s": 0},
}

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    run(
        JobSpec.model_validate(SPEC),
        lambda _: None,
        lock_dir=folder / "locks",
        program=program(sys.argv[2], *sys.argv[3:]),
    )
