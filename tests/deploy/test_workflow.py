"""The workflow of the repository's host starts programs and targets that are there."""

import os
import re

import yaml

from tests.deploy.compose import ROOT

WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())


def test_each_command_of_the_workflow_is_a_program_whose_targets_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    steps = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
    assert all(("uses" in step) is not ("run" in step) for step in steps)
    commands = [step["run"] for step in steps if "run" in step]
    assert commands
    for command in commands:
        assert os.access(ROOT / command, os.X_OK), command
        targets = re.findall(r"^make (\w+)", (ROOT / command).read_text(), re.MULTILINE)
        assert targets
        for target in targets:
            assert re.search(rf"^{target}:.*", makefile, re.MULTILINE), target


def test_a_variable_of_a_step_is_one_of_the_makefile() -> None:
    given = {
        name for job in WORKFLOW["jobs"].values() for step in job["steps"] for name in step.get("env", {})
    }
    assert given == set(re.findall(r"^(PYTHON) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE))
