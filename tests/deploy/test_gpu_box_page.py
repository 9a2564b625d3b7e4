"""docs/gpu-box.md names only what there is: settings, targets of the Makefile, services, options."""

import re

import pytest
import yaml

from optigpu.variables import KNOWN
from tests.deploy.compose import ROOT, read_compose
from tests.deploy.gpu_host import OUTPUTS
from tools.gpu_services import compose_file, parse

PAGE = (ROOT / "docs" / "gpu-box.md").read_text()
BLOCKS = re.findall(r"^```\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = [line.split("#")[0].strip() for block in BLOCKS for line in block.splitlines()]
SERVICES = {
    *read_compose({"POSTGRES_PASSWORD": "secret", "OPTIGPU_API_KEY": "key"})["services"],
    *(gpu.service for gpu in parse((OUTPUTS / "one.txt").read_text())),
}


def test_every_setting_of_the_page_is_one() -> None:
    assert set(re.findall(r"\bOPTIGPU_[A-Z_]*[A-Z]\b", PAGE)) <= set(KNOWN)


def test_every_target_and_variable_of_make_is_one() -> None:
    makefile = (ROOT / "Makefile").read_text()
    lines = [line.split() for line in COMMANDS if line.startswith("make ")]
    assert len(lines) >= 6
    for _, target, *given in lines:
        assert re.search(rf"^{target}:.*## ", makefile, re.MULTILINE), target
        for name in re.findall(r"\b([A-Z]+)=", " ".join(given)):
            assert re.search(rf"^{name} \?= ", makefile, re.MULTILINE), name


@pytest.mark.parametrize(
    "verb", ["logs --follow", "exec -T", "exec", "run --rm", "run --rm --no-deps", "stop"]
)
def test_every_service_that_a_command_names_is_one(verb: str) -> None:
    named = re.findall(rf"docker compose {verb} ([a-z][\w-]*)", PAGE)
    assert named
    assert set(named) <= SERVICES


def test_the_deployment_of_workers_starts_one_with_settings_that_there_are() -> None:
    (text,) = re.findall(r"^<!-- workers in kubernetes -->\n```\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    deployment = yaml.safe_load(text)
    assert (deployment["apiVersion"], deployment["kind"]) == ("apps/v1", "Deployment")
    template = deployment["spec"]["template"]
    assert deployment["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    (container,) = template["spec"]["containers"]
    assert container["command"] == gpu_worker()
    assert {each["name"] for each in container["env"]} <= set(KNOWN)
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
    volumes = {each["name"] for each in template["spec"]["volumes"]}
    assert {each["name"] for each in container["volumeMounts"]} == volumes


def gpu_worker() -> list[str]:
    """What docker-compose.gpus.yml has a worker run, but for the GPU: a pod sees its own alone."""
    gpus = parse((OUTPUTS / "one.txt").read_text())
    (service, *_) = yaml.safe_load(compose_file((ROOT / "docker-compose.worker.yml").read_text(), gpus))[
        "services"
    ].values()
    command: list[str] = service["command"]
    return command[: command.index("--gpu")]
