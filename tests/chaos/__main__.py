"""`python -m tests.chaos`: 300 jobs through every fault, twice; a table of what was injected and what came of it."""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from rich.table import Table

from optigpu.report.formats import console
from tests.chaos.story import Account, Plan, chaos
from tests.servers.process import NoServerError


def main() -> int:
    """Exit status 0 if nothing is wrong at the end, 1 if something is, 2 if it cannot be played."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--jobs", type=int, default=Plan.jobs)
    parser.add_argument("--rounds", type=int, default=Plan.rounds, help="faults of each kind")
    parser.add_argument("--pause", type=float, default=Plan.pause_s, help="seconds between two faults")
    parser.add_argument("--cut", type=float, default=Plan.cut_s, help="seconds without the network")
    parser.add_argument("--seed", type=int, default=Plan.seed)
    options = parser.parse_args()
    plan = Plan(
        jobs=options.jobs,
        rounds=options.rounds,
        pause_s=options.pause,
        cut_s=options.cut,
        seed=options.seed,
    )
    folder = Path(tempfile.mkdtemp(prefix="optigpu-chaos-"))
    try:
        account = chaos(plan, folder)
    except NoServerError as error:
        print(error, file=sys.stderr)
        return 2
    _show(account)
    if account.wrong:
        console().print(f"The processes' logs are in {folder}.", markup=False)
    else:
        shutil.rmtree(folder)
    return 1 if account.wrong else 0


def _show(account: Account) -> None:
    table = Table(title=f"{len(account.accepted)} jobs in {account.seconds:.0f} s")
    table.add_column("fault")
    table.add_column("times", justify="right")
    for name, times in sorted(account.injected.items()):
        table.add_row(name, str(times))
    screen = console()
    screen.print(table)
    screen.print(f"Jobs: {_counted(account.states)}. Attempts: {_counted(account.attempts)}.", markup=False)
    for sentence in account.wrong:
        screen.print(f"WRONG: {sentence}", markup=False)
    screen.print("Something is wrong." if account.wrong else "Nothing was lost, doubled or left behind.")


def _counted(counts: "dict[str, int]") -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=str)) or "none"


if __name__ == "__main__":
    sys.exit(main())
