"""The GitHub action: its inputs, and the shell of its main step in a repository."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.gate.test_gate import commit, is_tidy, project

__all__ = ["project"]
pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
STEPS = ACTION["runs"]["steps"]
NEW_BRANCH = "0" * 40
"""What GitHub says was there before the first push to a branch."""
NOT_STARTED = "a broken installation"
IMPORTED = """
import sys, optigpu.cli.gate, optigpu.gate.comment, optigpu.gate.bisect, optigpu.report.progress
print(*{name.partition(".")[0] for name in sys.modules})
"""


def test_each_input_is_used_and_none_is_written_into_the_shell() -> None:
    assert ACTION["runs"]["using"] == "composite"
    assert all(step["shell"] == "bash" and "${{" not in step["run"] for step in STEPS)
    values = [value for step in STEPS for value in step["env"].values()]
    assert {name for value in values for name in re.findall(r"inputs\.([\w-]+)", value)} == set(
        ACTION["inputs"]
    )


def needed(names: Iterable[str]) -> set[str]:
    """These packages and what they need, as far as it is installed."""
    found, ahead = set[str](), [*names]
    while ahead:
        name = ahead.pop().lower().replace("_", "-")
        if name not in found:
            found.add(name)
            with suppress(PackageNotFoundError):
                lines = [line for line in requires(name) or () if "extra ==" not in line]
                ahead += [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines]
    return found


def test_the_gate_loads_no_package_that_the_action_leaves_out() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True, cwd=ROOT
    )
    (listed,) = re.findall(r"^ +(filelock .*) \$\{URL", STEPS[0]["run"], re.MULTILINE)
    installed, of = needed(listed.split()), packages_distributions()
    loaded = {
        name: of[name] for name in done.stdout.split() if name in of and name != "optigpu" and name[0] != "_"
    }
    assert len(loaded) > 5
    assert not {
        name
        for name, owners in loaded.items()
        if not {each.lower().replace("_", "-") for each in owners} & installed
    }


@pytest.mark.parametrize(
    ("script", "status", "verdict"),
    [
        ("echo 100", 0, "no worse"),
        ("echo 80", 1, "worse"),
        ("sleep 2; echo 80", 0, "cannot say"),
        ("", 3, ""),
        (NEW_BRANCH, 3, ""),
        (NOT_STARTED, 3, ""),
    ],
)
def test_the_main_step_is_red_for_worse_and_for_errors(
    project: Path, tmp_path: Path, script: str, status: int, verdict: str
) -> None:
    base = commit(project, "echo 100", "base") if script != NEW_BRANCH else NEW_BRANCH
    commit(project, script, "head")
    program = tmp_path / "optigpu" / "bin" / "optigpu"
    program.parent.mkdir(parents=True)
    module = "optigpu" if script != NOT_STARTED else "no_such_module"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
    program.chmod(0o755)
    summary, outputs = tmp_path / "summary.md", tmp_path / "outputs"
    given = {"BASE": base, "HEAD": "HEAD", "COMMAND": "sh speed", "METRIC": "tokens/s", "WORSE_THAN": "3%"}
    files = {"RUNNER_TEMP": tmp_path, "GITHUB_STEP_SUMMARY": summary, "GITHUB_OUTPUT": outputs}
    variables = {
        "BETTER": "",
        "SETUP": "",
        "URL": "",
        "SERIES": "",
        "MINUTES": "0.2",
        **given,
        **{name: str(path) for name, path in files.items()},
    }
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", STEPS[-1]["run"]]
    done = subprocess.run(
        shell, cwd=project, env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stderr
    said = f"### Gate: {verdict}. tokens/s" if verdict else "The gate could not compare"
    assert summary.read_text().startswith(said)
    assert not verdict or f"verdict={verdict}\n" in outputs.read_text()
    assert ("::warning::" in done.stdout) is (verdict == "cannot say")
    assert is_tidy(project)
