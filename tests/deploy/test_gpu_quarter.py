"""A quarter of an hour on a card, without one: steps that end, fail and hang, what is resumed, and the two plans."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from optigpu.job.spec import JobSpec
from tests.pages import ROOT
from tools.gpu_quarter import __main__ as command
from tools.gpu_quarter import caches
from tools.gpu_quarter.runner import plan

STEPS = r"""
steps = [
  { name = "counts", bound_s = 60, command = '-c "open(\"{out}/runs\", \"a\").write(str(1))"' },
  { name = "needs", bound_s = 60, command = '-c "open(\"{out}/card\")"' },
  { name = "hangs", bound_s = 2, command = '''-c "import subprocess; sleeps = subprocess.Popen(['sleep', '600'])
open('{out}/pid', 'w').write(str(sleeps.pid)); sleeps.wait()"''' },
  { name = "probe", bound_s = 60, command = "-m optigpu probe --format json", prints = "probe.json" },
]
"""


def quarter(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit status, and the records by step."""
    (folder / "plan.toml").write_text(STEPS)
    words = [sys.executable, "-m", "tools.gpu_quarter", "--plan", str(folder / "plan.toml"), *arguments]
    status = subprocess.run(words, cwd=ROOT, check=False, capture_output=True).returncode
    steps = json.loads((folder / "out" / "summary.json").read_text())["steps"]
    return status, {step["name"]: step for step in steps}


def test_what_hangs_is_killed_and_a_later_run_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    status, steps = quarter(tmp_path, "--output", str(out), "--caches", str(tmp_path / "caches"))
    endings = {name: (step["ending"], step["status"]) for name, step in steps.items()}
    assert status == 1
    ended = ("ended", 0)
    assert endings == {"counts": ended, "needs": ("failed", 1), "hangs": ("killed", None), "probe": ended}
    assert steps["needs"]["error"][-1].startswith("FileNotFoundError")
    with pytest.raises(ProcessLookupError):
        os.kill(int((out / "hangs" / "pid").read_text()), 0)
    assert json.loads((out / "probe" / "probe.json").read_text())["cpu_cores"] > 0
    assert "| needs | failed | 1 |" in (out / "summary.md").read_text()
    (out / "needs" / "card").touch()
    status, steps = quarter(tmp_path, "--resume", str(out), "--skip", "hangs")
    assert (status, steps["needs"]["ending"], steps["hangs"]["ending"]) == (0, "ended", "killed")
    assert (out / "counts" / "runs").read_text() == "1"


def test_caches_come_back_within_their_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "PART_BYTES", 2**20)
    for number in range(8):
        file = tmp_path / "work" / "triton" / f"kernel{number}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(os.urandom(2**20))
        os.utime(file, (number, number))
    caches.pack(tmp_path / "work", ("triton", "none"), tmp_path / "caches")
    parts = list((tmp_path / "caches").iterdir())
    assert 1 < len(parts) <= caches.PARTS
    assert all(part.stat().st_size <= caches.PART_BYTES for part in parts)
    caches.unpack(tmp_path / "caches", tmp_path / "again")
    back = {path.name: path.read_bytes() for path in (tmp_path / "again" / "triton").iterdir()}
    assert "kernel0" not in back
    assert back["kernel7"] == (tmp_path / "work" / "triton" / "kernel7").read_bytes()


def test_the_rehearsal_has_the_steps_of_the_card_and_every_job_is_one() -> None:
    card, rehearsal = (plan(Path(command.__file__).with_name(name)) for name in command.PLANS.values())
    assert [step.name for step in card] == [step.name for step in rehearsal]
    for device, steps in (("cuda", card), ("cpu", rehearsal)):
        jobs = [JobSpec.model_validate({**step.job, "device": device}) for step in steps if step.job]
        assert len(jobs) == 5
