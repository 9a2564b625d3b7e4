"""`python -m tools.gpu_quarter --minutes 10 --output DIR`: a quarter of an hour on a card, the most valuable first.

Each step writes into DIR/STEP; summary.md and summary.json say after each how it ended. --resume DIR goes on with those
that have not ended well. --device cpu runs every step on tiny shapes: a rehearsal, whose figures say nothing. --wheels
DIR --have FILE brings wheels for a machine without a network that has the packages of FILE.
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
from optigpu.report.formats import console
from optigpu.vocabulary import OptiGPUError
from tools.gpu_quarter import caches, wheels
from tools.gpu_quarter.runner import ROOT, plan, read_summary, run_step, write_summary

PLANS = {"cuda": "card.toml", "cpu": "rehearsal.toml"}
PACKING_S = 10.0  # to write the caches
INDUCTOR, TRITON = CACHES = ("data/inductor", "cache/optigpu/triton")
"""Where the engine's processes keep compiled kernels, in the folder `work`; the other programs are told to."""
IMPORTS = "import torch._dynamo, transformers, triton"
"""What all need is read from the disk beside the first steps."""


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where every step that was asked for ended well, 1 where one did not, 2 for a wrong request."""
    options = _options(arguments)
    try:
        if options.wheels:
            return wheels.bring(options.wheels, options.have)
        return quarter(options)
    except OptiGPUError as error:
        console(stderr=True).print(str(error), markup=False)
        return 2


def quarter(options: argparse.Namespace) -> int:
    """Runs the steps that are asked for and have not ended well in an earlier run."""
    ends = time.monotonic() + 60 * options.minutes - (PACKING_S if options.caches else 0)
    folder = (options.resume or options.output).resolve()
    records = read_summary(folder) if options.resume else {}
    steps = plan(options.plan or Path(__file__).with_name(PLANS[options.device]))
    names = [step.name for step in steps]
    if unknown := {*options.skip, *options.only} - set(names):
        raise OptiGPUError(f"There is no step {', '.join(unknown)}; the steps are {', '.join(names)}.")
    asked = set(options.only or names) - set(options.skip)
    ended = {name for name, record in records.items() if record.ending == "ended"}
    variables = _variables(work := folder / "work", options.device)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # an exception: the running step ends too
    reading = subprocess.Popen([sys.executable, "-c", IMPORTS], env=variables, stderr=subprocess.DEVNULL)
    if options.caches:
        caches.unpack(options.caches, work)
    machine = probe()
    try:
        for step in (step for step in steps if step.name in asked - ended):
            record = records[step.name] = run_step(step, folder, options.device, ends, variables)
            write_summary(folder, machine, [*records.values()])
            console().print(step.name, record.ending, record.seconds, *record.error[:1], markup=False)
    finally:
        reading.kill()
        if options.caches:
            caches.pack(work, CACHES, options.caches)
    return 0 if all(records[name].ending == "ended" for name in asked) else 1


def _variables(work: Path, device: str) -> dict[str, str]:
    """Data and, on a card, caches of its own; a rehearsal takes what is compiled for this CPU already."""
    work.mkdir(parents=True, exist_ok=True)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OPTIGPU_DATA_DIR": str(work / "data"),
        "OPTIGPU_DATASETS_DIR": str(ROOT / "tests" / "text"),
        "TORCHINDUCTOR_CACHE_DIR": str(work / INDUCTOR),
        "TRITON_CACHE_DIR": str(work / TRITON),
        **({"XDG_CACHE_HOME": str(work / "cache")} if device == "cuda" else {"TRITON_INTERPRET": "1"}),
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_quarter", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--output", type=Path, metavar="DIR", help="where everything goes")
    what.add_argument("--resume", type=Path, metavar="DIR", help="an earlier --output, to go on with")
    what.add_argument("--wheels", type=Path, metavar="DIR", help="bring wheels there, and run nothing")
    parser.add_argument("--have", type=Path, metavar="FILE", help="names of the packages that are installed")
    parser.add_argument("--minutes", type=float, default=10.0, help="when all has ended (default: 10)")
    parser.add_argument("--device", choices=PLANS, default="cuda", help="cpu: a rehearsal on tiny shapes")
    parser.add_argument("--plan", type=Path, metavar="FILE", help="other steps than those of the device")
    parser.add_argument("--skip", nargs="+", default=[], metavar="STEP")
    parser.add_argument("--only", nargs="+", default=[], metavar="STEP")
    parser.add_argument("--caches", type=Path, metavar="DIR", help="of compiled kernels; read and written")
    options = parser.parse_args(arguments)
    if bool(options.wheels) != bool(options.have):
        parser.error("--wheels and --have go together")
    return options


if __name__ == "__main__":
    sys.exit(main())
