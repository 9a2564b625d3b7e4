"""The compose files agree with each other, with their examples of .env and the settings, and with what `make up` adds.

What they start runs in tests/docker.
And dashboard, alerts and Prometheus's configuration: they speak of what /metrics serves, and of nothing else. promtool
reads the configuration with its rules; what the names in an expression are is asked of promql-parser, the parser of
GreptimeDB, which follows the same grammar.
"""

import ast
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from dotenv import dotenv_values
from prometheus_client.parser import text_string_to_metric_families

from optigpu.variables import KNOWN
from tests.deploy.compose import ONE_HOST, REFERENCE, ROOT, WORKERS, parse_compose, read_compose
from tests.deploy.gpu_host import LISTED
from tests.pages import SERVICE
from tests.service.records import a_metric, a_result
from tests.service.serving import serving
from tools.gpu_services import RefusedError, chosen, compose_file, parse

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
NEEDED = {
    ONE_HOST: {"POSTGRES_PASSWORD": "secret", "OPTIGPU_API_KEY": "key"},
    WORKERS: {
        "OPTIGPU_DATABASE_URL": "postgresql://elsewhere/o",
        "OPTIGPU_REDIS_URL": "rediss://elsewhere/0",
    },
}


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
    return re.findall(r"^\| `(OPTIGPU_\w+)` \|", SERVICE.read_text(), re.MULTILINE)


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


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("one", {"worker-gpu-0": ("NVIDIA H200", "GPU-5f1c")}),
        (
            "mixed",
            {
                "worker-gpu-0": ("NVIDIA GeForce RTX 4090", "GPU-9d02"),
                "worker-gpu-1": ("NVIDIA RTX 6000 Ada Generation", "GPU-1e57"),
                "worker-gpu-2": ("Tesla T4", "GPU-1e57"),
            },
        ),
        (
            "old_slices",
            {
                "worker-gpu-0-mig-0": ("A100-SXM4-40GB MIG 3g.20gb", "MIG-GPU-"),
                "worker-gpu-0-mig-1": ("A100-SXM4-40GB MIG 3g.20gb", "MIG-GPU-"),
            },
        ),
        (
            "slices",
            {
                "worker-gpu-0-mig-0": ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "MIG-1111"),
                "worker-gpu-0-mig-1": ("NVIDIA A100-SXM4-80GB MIG 2g.20gb", "MIG-2222"),
                "worker-gpu-0-mig-2": ("NVIDIA A100-SXM4-80GB MIG 1c.2g.20gb", "MIG-3333"),
                "worker-gpu-1": ("NVIDIA A100-SXM4-80GB", "GPU-bbbb"),
                "worker-gpu-2-mig-0": ("NVIDIA A100-SXM4-80GB MIG 7g.80gb", "MIG-4444"),
            },
        ),
    ],
)
def test_each_gpu_is_a_worker_s_and_slices_stand_in_place_of_theirs(
    name: str, gpus: dict[str, tuple[str, str]]
) -> None:
    assert {gpu.service: (gpu.name, gpu.uuid[:8]) for gpu in parse(LISTED[name])} == gpus


def test_a_gpu_with_mig_and_no_slice_is_left_out() -> None:
    whole = "GPU-bbbb1111-2222-3333-4444-555566667777"
    services = [gpu.service for gpu in parse(LISTED["slices"], frozenset({whole, "GPU-aaaa1111-2222"}))]
    assert "worker-gpu-1" not in services
    assert len(services) == 4


@pytest.mark.parametrize(
    "text", ["", "No devices were found\n", "Some other program\nGPU 0: without a UUID\n"]
)
def test_nothing_is_read_from_anything_else(text: str) -> None:
    assert parse(text) == []


def test_gpus_are_chosen_by_the_beginnings_of_their_uuids() -> None:
    gpus = parse(LISTED["mixed"])
    assert chosen(gpus, "all") == gpus
    assert chosen(gpus, "none") == []
    assert chosen(gpus, "GPU-1e57f, GPU-9d02,GPU-9") == [gpus[2], gpus[0]]


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("GPU-beef", "GPU=GPU-beef: no GPU begins with this UUID. This host has: GPU-9d02"),
        ("GPU-1e57", "GPU=GPU-1e57: several GPUs begin with this UUID."),
        ("0", "GPU=0: no GPU begins with this UUID."),
    ],
)
def test_a_choice_that_is_none_lists_what_there_is(word: str, sentence: str) -> None:
    with pytest.raises(RefusedError) as refused:
        chosen(parse(LISTED["mixed"]), word)
    assert str(refused.value).startswith(sentence)
    assert "NVIDIA GeForce RTX 4090" in str(refused.value)


def generated(base: str, name: str) -> dict[str, Any]:
    text = compose_file((ROOT / base).read_text(), parse(LISTED[name]))
    return parse_compose(text, NEEDED[base])


@pytest.mark.parametrize("base", [ONE_HOST, WORKERS])
@pytest.mark.parametrize("name", ["mixed", "slices"])
def test_a_worker_for_a_gpu_differs_from_the_one_for_the_cpu_in_its_device_alone(
    base: str, name: str
) -> None:
    here = read_compose(NEEDED[base], base)
    document = generated(base, name)
    assert set(document["services"]) == {gpu.service for gpu in parse(LISTED[name])}
    for gpu in parse(LISTED[name]):
        service = document["services"][gpu.service]
        assert service.pop("command") == ["python", "-m", "worker", "--device", "cuda", "--gpu", gpu.uuid]
        reserved = {"driver": "nvidia", "device_ids": [gpu.uuid], "capabilities": ["gpu"]}
        assert service.pop("deploy") == {"resources": {"reservations": {"devices": [reserved]}}}
        on_the_cpu = dict(here["services"]["worker-cpu"])
        assert on_the_cpu.pop("command") == ["python", "-m", "worker", "--device", "cpu"]
        assert service == on_the_cpu


def test_the_host_s_python_may_be_old() -> None:
    text = (ROOT / "tools" / "gpu_services.py").read_text()
    tree = ast.parse(text, feature_version=(3, 9))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "from __future__ import annotations" in text
    assert imported <= {"__future__", "collections.abc", "dataclasses", "pathlib"}


DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "optigpu.json").read_text())
RULES = [
    rule for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"] for rule in group["rules"]
]
PROMETHEUS = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
PAGE = SERVICE.read_text()
FILE = "docker-compose.monitoring.yml"


EXPRESSIONS = {rule["alert"]: rule["expr"] for rule in RULES} | {
    f"{panel['title']} {number}": target["expr"]
    for panel in DASHBOARD["panels"]
    for number, target in enumerate(panel["targets"])
}


def selectors(expression: str) -> list[promql_parser.VectorSelector]:
    """Every series that an expression names. Raises ValueError for what Prometheus could not read."""
    found: list[promql_parser.Expr] = []
    promql_parser.walk(promql_parser.parse(expression), pre_visit=found.append)
    return [node for node in found if isinstance(node, promql_parser.VectorSelector)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The labels of each sample of /metrics, of a service in which everything has happened once."""
    folder = tmp_path_factory.mktemp("monitoring")
    with serving(f"sqlite:///{folder / 'optigpu.db'}") as service:
        service.submit()
        service.submit()
        lease = service.claim()
        invalid = a_result({"tflops": a_metric("tflops", 1.0)}, workload="matmul", valid=False)
        service.finish(lease, invalid)
        text = service.client.get("/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        name: {label for sample in samples if sample.name == name for label in sample.labels}
        for name in {sample.name for sample in samples}
    } | {"up": set()}


@pytest.mark.parametrize("expression", EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_an_expression_names_series_and_labels_that_are_served(
    expression: str, served: dict[str, set[str]]
) -> None:
    named = selectors(expression)
    assert named
    for selector in named:
        matched = {matcher.name for matcher in selector.matchers.matchers}
        assert matched <= served[str(selector.name)] | {"instance", "job"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("for: ", "SUCCESS: 9 rules found"),
        ("for: about ", "not a valid duration string"),
    ],
)
def test_prometheus_reads_the_configuration_with_its_alerts(
    words: str, said: str, promtool: str, tmp_path: Path
) -> None:
    """Its files are elsewhere in a container. What is wrong in a rule is noticed."""
    rules, key, configuration = tmp_path / "alerts.yml", tmp_path / "key", tmp_path / "prometheus.yml"
    rules.write_text((DEPLOY / "alerts.yml").read_text().replace("for: ", words, 1))
    key.touch()
    text = (DEPLOY / "prometheus.yml").read_text()
    for inside, here in (("/etc/prometheus/alerts.yml", rules), ("/run/secrets/optigpu_key", key)):
        assert inside in text
        text = text.replace(inside, str(here))
    configuration.write_text(text)
    read = subprocess.run([promtool, "check", "config", configuration], capture_output=True, text=True)
    assert said in read.stdout + read.stderr
    assert (read.returncode == 0) is (words == "for: ")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_says_how_bad_it_is_and_is_on_the_page(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert f"| {rule['alert']} |" in PAGE


def test_the_page_lists_every_metric_and_no_other(served: dict[str, set[str]]) -> None:
    listed = set(re.findall(r"^\| `(optigpu_\w+)` \|", PAGE, re.MULTILINE))
    parts = re.compile(r"_(bucket|count|sum|created)$")
    assert listed == {parts.sub("", name) for name in served if not name.endswith("_created")} - {"up"} - {
        name for name in served if not name.startswith("optigpu_")
    }


def test_the_compose_file_mounts_what_is_there_and_scrapes_the_api() -> None:
    document = read_compose({"GRAFANA_PASSWORD": "secret"}, FILE)
    with pytest.raises(ValueError, match="GRAFANA_PASSWORD"):
        read_compose({}, FILE)
    prometheus, grafana = document["services"]["prometheus"], document["services"]["grafana"]
    inside = {}
    for volume in (*prometheus["volumes"], *grafana["volumes"]):
        source, target, *_ = volume.split(":")
        if source.startswith("."):
            assert (ROOT / source).exists(), source
            inside[target] = ROOT / source
    assert [inside[file] for file in PROMETHEUS["rule_files"]] == [DEPLOY / "alerts.yml"]
    (job,) = PROMETHEUS["scrape_configs"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{prometheus['secrets'][0]}"
    (target,) = job["static_configs"][0]["targets"]
    api = read_compose({"POSTGRES_PASSWORD": "secret", "OPTIGPU_API_KEY": "key"}, ONE_HOST)["services"]["api"]
    assert target == f"api:{api['command'][-1]}"
    assert document["networks"]["optigpu"]["name"] == "optigpu_default", (
        "what compose calls that project's network"
    )
    (provider,) = yaml.safe_load(
        (DEPLOY / "grafana" / "provisioning" / "dashboards" / "optigpu.yml").read_text()
    )["providers"]
    assert any(str(Path(file).parent) == provider["options"]["path"] for file in inside)
