"""`python -m tools.gpu_quarter --minutes 10 --output DIR`: a quarter of an hour on a card, the most valuable first.

Each step writes into DIR/STEP; DIR/summary.md and summary.json say after each how it ended. With --resume DIR the steps
that have not ended well yet go on. With --device cpu every step runs on tiny shapes: a rehearsal, whose figures say
nothing. With --wheels DIR --have FILE wheels are brought for a machine without a network, which has the names of FILE.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from optigpu.hardware import probe
from optigpu.report import console
from optigpu.vocabulary import OptiGPUError
from tools.gpu_quarter import caches, summary, wheels
from tools.gpu_quarter.runner import ROOT, plan, run_step

PLANS = {"cuda": "card.toml", "cpu": "rehearsal.toml"}
PACKING_S = 10.0
"""Kept back for writing the caches."""
INDUCTOR, TRITON = CACHES = ("data/inductor", "cache/optigpu/triton")
"""Where the engine's processes keep compiled kernels, inside the folder `work`; all others are told to."""
IMPORTS = "import torch, transformers, triton; import torch._dynamo"
"""Reads from the disk, beside the first steps, what all need."""


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where every step that was asked for ended well, 1 where one did not, 2 for a wrong request."""
    options = _options(arguments)
    try:
        if options.wheels:
            found = wheels.bring(options.wheels, options.have)
            console().print(f"{found / 2**20:.1f} MiB of wheels in {options.wheels}", markup=False)
            return 0
        return quarter(options)
    except OptiGPUError as error:
        console(stderr=True).print(str(error), markup=False)
        return 2


def quarter(options: argparse.Namespace) -> int:
    """Runs the steps that are asked for and have not ended well in an earlier run."""
    ends = time.monotonic() + 60 * options.minutes - (PACKING_S if options.caches else 0)
    folder = (options.resume or options.output).resolve()
    records = summary.read(folder) if options.resume else {}
    steps = plan(options.plan or Path(__file__).with_name(PLANS[options.device]))
    if unknown := {*options.skip, *options.only} - {step.name for step in steps}:
        names = ", ".join(step.name for step in steps)
        raise OptiGPUError(f"There is no step {', '.join(sorted(unknown))}; the steps are {names}.")
    work = folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    variables = _variables(work)
    signal.signal(
        signal.SIGTERM, lambda number, _: sys.exit(128 + number)
    )  # as an exception: the step ends too
    reading = subprocess.Popen([sys.executable, "-c", IMPORTS], env=variables, stderr=subprocess.DEVNULL)
    if options.caches:
        caches.unpack(options.caches, work)
    machine = probe()
    chosen = [
        step for step in steps if step.name not in options.skip and step.name in (options.only or [step.name])
    ]
    try:
        for step in chosen:
            if step.name in records and records[step.name].ending == "ended":
                continue
            record = records[step.name] = run_step(step, folder, options.device, ends, variables)
            summary.write(folder, machine, records.values())
            console().print(
                f"{record.name}: {record.ending} after {record.seconds} s", *record.error[:1], markup=False
            )
    finally:
        reading.kill()
        if options.caches:
            caches.pack(work, CACHES, options.caches)
    return 0 if all(records[step.name].ending == "ended" for step in chosen) else 1


def _variables(work: Path) -> dict[str, str]:
    """Of every step: data and caches of its own, in one place for the engine's processes and for the benchmarks."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OPTIGPU_DATA_DIR": str(work / "data"),
        "OPTIGPU_DATASETS_DIR": str(ROOT / "tests" / "text"),
        "XDG_CACHE_HOME": str(work / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(work / INDUCTOR),
        "TRITON_CACHE_DIR": str(work / TRITON),
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_quarter", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--output", type=Path, metavar="DIR", help="where everything goes")
    what.add_argument(
        "--resume", type=Path, metavar="DIR", help="of an earlier run: what has not ended well goes on"
    )
    what.add_argument("--wheels", type=Path, metavar="DIR", help="bring wheels there, and run nothing")
    parser.add_argument(
        "--have", type=Path, metavar="FILE", help="the packages of the machine, a name each line"
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="when all has ended (default: 10)")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal on tiny shapes"
    )
    parser.add_argument("--plan", type=Path, metavar="FILE", help="other steps than those of the device")
    parser.add_argument("--skip", nargs="+", default=[], metavar="STEP")
    parser.add_argument("--only", nargs="+", default=[], metavar="STEP")
    parser.add_argument(
        "--caches", type=Path, metavar="DIR", help="compiled kernels, read from there and written back"
    )
    options = parser.parse_args(arguments)
    if bool(options.wheels) != bool(options.have):
        parser.error("--wheels and --have go together")
    return options


if __name__ == "__main__":
    sys.exit(main())
