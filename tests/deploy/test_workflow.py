"""The workflows of the repository's host start programs and targets that are there."""

import os
import re

import yaml

from tests.deploy.compose import ROOT

WORKFLOWS = [yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")]
STEPS = [step for workflow in WORKFLOWS for job in workflow["jobs"].values() for step in job["steps"]]
MAKEFILE = (ROOT / "Makefile").read_text()


def test_each_command_of_a_workflow_is_a_target_or_a_program_whose_targets_are_there() -> None:
    assert all(("uses" in step) is not ("run" in step) for step in STEPS)
    commands = {step["run"] for step in STEPS if "run" in step}
    assert commands == {".ci/run", "make test-all"}
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    lines = "\n".join([*commands, (ROOT / ".ci" / "run").read_text()])
    targets = re.findall(r"^make ([\w-]+)", lines, re.MULTILINE)
    for target in targets:
        assert re.search(rf"^{target}:.*", MAKEFILE, re.MULTILINE), target


def test_a_variable_of_a_step_is_one_of_the_makefile() -> None:
    given = {name for step in STEPS for name in step.get("env", {})}
    assert given == set(re.findall(r"^(PYTHON) \?=", MAKEFILE, re.MULTILINE))
