"""The GitHub action: its shape, and the shell of its main step in a repository."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.gate.test_gate import commit, git, project

__all__ = ["project"]

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
INSTALL, GATE = ACTION["runs"]["steps"]


def test_each_input_is_used_and_none_is_written_into_the_shell() -> None:
    steps = ACTION["runs"]["steps"]
    assert ACTION["runs"]["using"] == "composite"
    assert all(step["shell"] == "bash" and "${{" not in step["run"] for step in steps)
    used = {
        name
        for step in steps
        for value in step["env"].values()
        for name in re.findall(r"inputs\.([\w-]+)", value)
    }
    assert used == set(ACTION["inputs"])


def test_the_gate_imports_no_more_than_the_action_installs() -> None:
    program = (
        "import sys, optigpu.cli.gate, optigpu.gate.comment, optigpu.gate.bisect, optigpu.report.progress\n"
        "print(*{name.partition('.')[0] for name, module in sys.modules.items()"
        " if 'site-packages' in (getattr(module, '__file__', None) or '')})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    heavy = {"torch", "transformers", "sqlalchemy", "httpx", "accelerate"}
    assert heavy.isdisjoint(done.stdout.split())


@pytest.mark.parametrize(
    ("head", "status", "verdict"),
    [("100", 0, "no worse"), ("80", 1, "worse"), ("$RANDOM", 0, "cannot say"), ("nan", 3, None)],
)
def test_the_main_step_ends_red_for_worse_alone(
    project: Path, tmp_path: Path, head: str, status: int, verdict: str | None
) -> None:
    base = commit(project, "echo tokens/s: 100", "base")
    commit(project, f"echo tokens/s: {head}", "head")
    program = tmp_path / "optigpu" / "bin" / "optigpu"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m optigpu "$@"\n')
    program.chmod(0o755)
    summary, outputs = tmp_path / "summary.md", tmp_path / "outputs"
    variables = dict.fromkeys(GATE["env"], "") | {
        "BASE": base, "HEAD": "HEAD", "COMMAND": "bash speed", "METRIC": "tokens/s", "WORSE_THAN": "3%",
        "MINUTES": "0.05", "RUNNER_TEMP": str(tmp_path), "GITHUB_STEP_SUMMARY": str(summary), "GITHUB_OUTPUT": str(outputs),
    }  # fmt: skip
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", GATE["run"]]
    done = subprocess.run(
        shell, cwd=project, env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stderr
    if verdict is None:
        assert "could not compare" in summary.read_text()
        return
    assert f"verdict={verdict}\n" in outputs.read_text()
    assert summary.read_text().startswith(f"### Gate: {verdict}. tokens/s")
    assert ("::warning::" in done.stdout) is (verdict == "cannot say")
    assert git(project, "worktree", "list").count("\n") == 0
