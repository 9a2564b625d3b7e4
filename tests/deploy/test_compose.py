"""The two compose files agree with each other, with their examples of .env and with the table of settings.

What they start runs in tests/docker.
"""

import re
from typing import Any

import pytest
from dotenv import dotenv_values

from optigpu.variables import KNOWN
from tests.deploy.compose import ONE_HOST, REFERENCE, ROOT, WORKERS, read_compose
from tests.pages import SETTINGS

SECRETS = {"POSTGRES_PASSWORD": "secret", "OPTIGPU_API_KEY": "key"}
ADDRESSES = {"OPTIGPU_DATABASE_URL": "postgresql://elsewhere/o", "OPTIGPU_REDIS_URL": "rediss://elsewhere/0"}
FILES = ((ONE_HOST, ".env.example", SECRETS), (WORKERS, ".env.worker.example", ADDRESSES))
EACH_FILE = pytest.mark.parametrize(("file", "example", "needed"), FILES, ids=[file for file, *_ in FILES])
FIXED = {
    *("OPTIGPU_DATABASE_URL", "OPTIGPU_REDIS_URL", "OPTIGPU_DATA_DIR", "OPTIGPU_LOCK_DIR"),
    "OPTIGPU_HEARTBEAT_FILE",
    *("OPTIGPU_HOST", "OPTIGPU_PORT"),  # by the command; PUBLISH_HOST and PUBLISH_PORT are the host's
    *("OPTIGPU_IMAGE", "OPTIGPU_REVISION"),  # by the image
    *("OPTIGPU_MODELS_DIR", "OPTIGPU_DATASETS_DIR"),  # mounted
}
NOT_IN_A_CONTAINER = {"OPTIGPU_URL", *(name for name in KNOWN if name.startswith("OPTIGPU_TEST_"))}
"""Settings of the command line and of the tests."""


@pytest.fixture
def compose() -> dict[str, Any]:
    return read_compose(SECRETS)


@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_has_no_default(secret: str) -> None:
    with pytest.raises(ValueError, match=secret):
        read_compose(SECRETS | {secret: ""})


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_has_no_default_on_a_host_with_workers_alone(address: str) -> None:
    with pytest.raises(ValueError, match=rf"{address}: .*\.env\.worker\.example"):
        read_compose(ADDRESSES | {address: ""}, WORKERS)


def documented_settings() -> list[str]:
    """The variables of the table of settings."""
    return re.findall(r"^\| `(OPTIGPU_\w+)` \|", SETTINGS.read_text(), re.MULTILINE)


@EACH_FILE
def test_the_example_of_env_names_what_the_file_asks_for_and_holds_no_secret(
    file: str, example: str, needed: dict[str, str]
) -> None:
    shown = dotenv_values(ROOT / example)
    asked = {reference["name"] for reference in REFERENCE.finditer((ROOT / file).read_text())} - {None}
    assert asked <= set(shown)
    assert set(shown) - asked <= {"COMPOSE_FILE", "HF_TOKEN", "HF_HUB_OFFLINE", *documented_settings()}
    assert shown["COMPOSE_FILE"] == f"{file}:docker-compose.gpus.yml"
    assert not any(shown.get(secret) for secret in (*SECRETS, "HF_TOKEN"))


@EACH_FILE
def test_every_setting_reaches_its_program_or_is_fixed(
    file: str, example: str, needed: dict[str, str]
) -> None:
    """What the table of settings lists; of the API where the file has one, and of the worker."""
    services = read_compose(needed, file)["services"]
    for name in ("api", "worker-cpu"):
        if name not in services:
            continue
        for setting in set(documented_settings()) - FIXED - NOT_IN_A_CONTAINER - {"OPTIGPU_API_KEY"}:
            given = read_compose(needed | {setting: "given"}, file)["services"][name]["environment"]
            assert given[setting] == "given", f"{setting} does not reach {name}"
    assert set(documented_settings()) >= FIXED | NOT_IN_A_CONTAINER


@EACH_FILE
def test_folders_of_the_host_are_mounted_read_only_if_they_are_named(
    file: str, example: str, needed: dict[str, str]
) -> None:
    named = {"OPTIGPU_MODELS_DIR": "/data/models", "OPTIGPU_DATASETS_DIR": "/data/texts"}
    worker = read_compose(needed | named, file)["services"]["worker-cpu"]
    assert {"/data/models:/srv/models:ro", "/data/texts:/srv/datasets:ro"} <= set(worker["volumes"])
    assert worker["environment"]["OPTIGPU_MODELS_DIR"] == "/srv/models"
    assert worker["environment"]["OPTIGPU_DATASETS_DIR"] == "/srv/datasets"
    unnamed = read_compose(needed, file)["services"]["worker-cpu"]
    assert {"models:/srv/models:ro", "datasets:/srv/datasets:ro"} <= set(unnamed["volumes"])
    assert (
        unnamed["environment"]["OPTIGPU_MODELS_DIR"] == unnamed["environment"]["OPTIGPU_DATASETS_DIR"] == ""
    )


def test_workers_differ_between_the_files_in_where_the_servers_are_alone(compose: dict[str, Any]) -> None:
    here = dict(compose["services"]["worker-cpu"])
    there = dict(read_compose(ADDRESSES, WORKERS)["services"]["worker-cpu"])
    assert set(there["volumes"]) - set(here["volumes"]) == {"certificates:/etc/optigpu/certificates:ro"}
    assert set(here.pop("depends_on")) == {"migrate", "redis"}
    for worker in (here, there):
        worker["volumes"] = [each for each in worker["volumes"] if "certificates" not in each]
        worker["environment"] = set(worker["environment"]) - {*SECRETS, *ADDRESSES}
    assert here == there


@EACH_FILE
def test_logs_are_rotated(file: str, example: str, needed: dict[str, str]) -> None:
    for name, service in read_compose(needed, file)["services"].items():
        assert service["logging"]["driver"] == "json-file", name
        assert set(service["logging"]["options"]) == {"max-size", "max-file"}, name
        assert all(isinstance(value, str) for value in service["logging"]["options"].values()), name
