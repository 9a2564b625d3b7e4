"""Starts the processes of a fleet, hands them their plan, and collects what they say.

The agents are those of `esp32_agent`, which lies in a checkout and not in the package: they run as own programs.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from optigpu.edge.simulation.documents import FLEET_LINE, DeviceAccount, FleetProgress, SimulatedModel
from optigpu.vocabulary import OptiGPUError, SpecError

PROGRAM = "esp32_agent.port.simulated"
CHECKOUT = Path(__file__).resolve().parents[3]
FAULTS = {
    "lost_answer": 0.02,
    "upload_reset": 0.01,
    "reboot": 0.01,
    "storage_full": 0.01,
    "unsynchronised": 0.1,
    "skew": 0.1,
    "drift": 0.2,
}
"""Every fault with the share that `all` gives it, as the simulator has them."""
LOOK_S = 0.2


class FleetError(OptiGPUError):
    """The fleet's processes cannot run."""


@dataclass(frozen=True)
class FleetPlan:
    """What each device does, and for how long."""

    url: str
    seconds: float
    drain_s: float = 30.0
    period_s: int = 1
    send_every_s: float = 10.0
    windows: int = 12
    seed: int = 0
    faults: dict[str, float] = field(default_factory=dict)
    processes: int = 2


def run_fleet(
    plan: FleetPlan,
    codes: Sequence[str],
    stopped: Callable[[], object] = lambda: None,
    on_progress: Callable[[FleetProgress], None] = lambda _: None,
) -> list[DeviceAccount]:
    """Runs a device for each code until all have ended, or earlier once `stopped()` says so. Raises FleetError."""
    shares = [list(enumerate(codes))[place :: plan.processes] for place in range(plan.processes)]
    children = [_Child(plan, share) for share in shares if share]
    try:
        told = False
        while any(child.is_alive() for child in children):
            if stopped() and not told:
                told = True
                for child in children:
                    child.stop()
            on_progress(_sum([child.progress for child in children]))
        return [account for child in children for account in child.accounts()]
    finally:
        for child in children:
            child.kill()


def simulated_model() -> SimulatedModel:
    """What the simulated devices run. Raises FleetError without a checkout."""
    done = subprocess.run(_command("--model"), env=_environment(), capture_output=True, text=True)
    if done.returncode != 0:
        raise FleetError(f"The simulator cannot run: {_last(done.stderr)}")
    return SimulatedModel.model_validate_json(done.stdout)


def read_faults(text: str) -> dict[str, float]:
    """`none`, `all`, or `reboot=0.05,lost_answer=0.1`. Raises SpecError."""
    if text in ("none", ""):
        return {}
    if text == "all":
        return dict(FAULTS)
    pairs = [item.partition("=") for item in text.split(",")]
    try:
        rates = {name.strip(): float(share) for name, _, share in pairs}
    except ValueError:
        raise SpecError(f"--faults {text}: write none, all, or shares such as reboot=0.05.") from None
    if unknown := sorted(set(rates) - set(FAULTS)):
        raise SpecError(f"--faults: Unknown fault {unknown[0]!r}. Valid: {', '.join(FAULTS)}.")
    if any(not 0 <= rate <= 0.9 for rate in rates.values()):
        raise SpecError("--faults: A share is 0 to 0.9.")
    return rates


def _sum(parts: Sequence[FleetProgress]) -> FleetProgress:
    return FleetProgress(
        kind="progress",
        enrolled=sum(part.enrolled for part in parts),
        made=sum(part.made for part in parts),
        acknowledged=sum(part.acknowledged for part in parts),
    )


class _Child:
    """One process with its share of the devices."""

    def __init__(self, plan: FleetPlan, codes: Sequence[tuple[int, str]]) -> None:
        self.progress = FleetProgress(kind="progress", enrolled=0, made=0, acknowledged=0)
        self._accounts: list[DeviceAccount] = []
        self._errors: list[str] = []
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            _command(),
            env=_environment(),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
            start_new_session=True,  # Ctrl-C is this process's affair: it asks them for their accounts
        )
        self._threads = [threading.Thread(target=read, daemon=True) for read in (self._read, self._complain)]
        for thread in self._threads:
            thread.start()
        asked = {name: value for name, value in asdict(plan).items() if name != "processes"}
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(asked | {"codes": codes}) + "\n")
            self._process.stdin.flush()

    def is_alive(self) -> bool:
        """Whether it still runs; waits a moment for its end."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(LOOK_S)
        return self._process.poll() is None

    def stop(self) -> None:
        """Asks for the account so far."""
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def kill(self) -> None:
        """Ends it, whatever it does."""
        self._process.kill()
        self._process.wait()
        self.stop()
        for thread in self._threads:
            thread.join()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream
            stream.close()

    def accounts(self) -> list[DeviceAccount]:
        """Of every device. Raises FleetError if it failed."""
        for thread in self._threads:
            thread.join()
        if self._process.returncode != 0:
            raise FleetError(f"A simulator's process failed: {_last(''.join(self._errors))}")
        return self._accounts

    def _read(self) -> None:
        assert self._process.stdout
        for text in self._process.stdout:
            line = FLEET_LINE.validate_json(text)
            if isinstance(line, FleetProgress):
                self.progress = line
            else:
                self._accounts.append(line)

    def _complain(self) -> None:
        assert self._process.stderr
        self._errors += self._process.stderr


def _command(*arguments: str) -> list[str]:
    if not (CHECKOUT / "esp32_agent").is_dir():
        raise FleetError(
            "The simulated devices run the agent's code, which is not in the package: use a checkout."
        )
    return [sys.executable, "-m", PROGRAM, *arguments]


def _environment() -> dict[str, str]:
    known = os.environ.get("PYTHONPATH")
    return dict(os.environ) | {"PYTHONPATH": f"{CHECKOUT}{os.pathsep}{known}" if known else str(CHECKOUT)}


def _last(text: str) -> str:
    return (text.strip() or "it said nothing").splitlines()[-1]
