"""Dashboard, alerts and Prometheus's configuration speak of what /metrics serves, and of nothing else.

Prometheus's own promtool reads the configuration with its rules. What the names in an expression are is asked of
promql-parser, the parser of GreptimeDB, which follows the same grammar.
"""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.compose import ONE_HOST, ROOT, read_compose
from tests.service.records import a_metric, a_result
from tests.service.serving import serving

DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "optigpu.json").read_text())
RULES = [
    rule for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"] for rule in group["rules"]
]
PROMETHEUS = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
PAGE = (ROOT / "docs" / "monitoring.md").read_text()
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
