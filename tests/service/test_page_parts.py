"""Parts of the pages by themselves: bars, code, badges, prices, what a browser asks for."""

import ast
from typing import Any

import pytest

from api.pages.badge import short_hardware
from api.pages.bars import bars
from api.pages.pareto import Prices
from api.pages.result import again
from api.rendering import wants_page
from api.tags import is_known
from optigpu.documents.views import LeaderboardRow
from optigpu.job.spec import JobSpec
from tests.service.records import a_metric, a_result
from tests.service.serving import MATMUL, Served


def test_bars_are_on_one_scale_from_zero() -> None:
    found = bars([a_metric("tokens_per_s", 80.0, (70.0, 100.0)), a_metric("tokens_per_s", 40.0)])
    assert [(bar.end, bar.low, bar.high, bar.sure) for bar in found] == [
        (80, 70, 100, True),
        (40, 0, 0, False),
    ]


@pytest.mark.parametrize("value", [None, 0.0, -3.0])
def test_a_bar_of_nothing_is_empty(value: float | None) -> None:
    (bar,) = bars([a_metric("tokens_per_s", value)])
    assert bar.end == 0


def a_document(**variant: Any) -> dict[str, Any]:
    document = a_result(stack=("bf16",)).model_dump(mode="json")
    workload = {"kind": "generate", "prompt_tokens": 8, "new_tokens": 8, "batch_size": 2}
    document["variant"] |= {"workload": workload, "model": "preset:gpt2"} | variant
    return document


def test_the_code_of_a_stack_is_its_request() -> None:
    stack = ({"name": "bf16"}, {"name": "torch_compile", "mode": "reduce-overhead"})
    spec = {"measure": {"replicates": 5}, "limits": {}}
    found = again(a_document(stack=stack), spec)
    _, assigned, _ = ast.parse(found.python).body
    assert isinstance(assigned, ast.Assign)
    assert isinstance(assigned.value, ast.Call)
    workload, model = map(ast.literal_eval, assigned.value.args)
    named = {each.arg or "": ast.literal_eval(each.value) for each in assigned.value.keywords}
    assert (workload["batch_size"], model) == (2, "preset:gpt2")
    assert named["stack"] == ["bf16", stack[1]]
    assert named["measure"]["replicates"] == 5
    assert "limits" not in named
    written = [each if isinstance(each, dict) else {"name": each} for each in named.pop("stack")]
    posted = JobSpec.model_validate({"workload": workload, "model": model, "stack": written} | named)
    assert posted == JobSpec.model_validate_json(found.json)


def test_a_technique_of_another_version_has_no_code_but_a_reason() -> None:
    found = again(a_document(stack=({"name": "int9"},)), None)
    assert found.request is None
    assert "int9" in found.reason


@pytest.mark.parametrize(
    ("hardware", "words"),
    [
        ("1x AMD EPYC 9654 96-Core Processor", "EPYC 9654"),
        ("1x Intel(R) Xeon(R) Platinum 8480+ CPU @ 2.00GHz", "Xeon Platinum 8480+"),
        ("1x NVIDIA GeForce RTX 5090", "GeForce RTX 5090"),
        ("CPU", "CPU"),
    ],
)
def test_hardware_on_a_badge_is_its_model_alone(hardware: str, words: str) -> None:
    assert short_hardware(hardware) == words


def a_row(j_per_token: float | None, speed: float = 1000.0) -> LeaderboardRow:
    result = a_result()
    return LeaderboardRow(
        result_id=result.id,
        job_id=None,
        source="worker",
        measured_at=result.created_at,
        workload={},
        workload_digest="a",
        variant_digest="b",
        model=None,
        label="bf16",
        techniques=("bf16",),
        backend="torch",
        device=result.variant.device,
        hardware="1x Test CPU",
        j_per_token=j_per_token,
        rank=1,
        metric="tokens_per_s",
        value=a_metric("tokens_per_s", speed),
    )


def test_a_million_tokens_cost_their_share_of_the_hardware_and_their_energy() -> None:
    """A second of hardware for 3 a year costs 3 / 31,557,600; a million tokens take 1,000 of them."""
    hardware = Prices(hardware_price=3.0, years=1.0)
    assert hardware.per_million(a_row(None)) == pytest.approx(1000 * 3 / 31_557_600)
    energy = Prices(kwh=0.36)
    assert energy.per_million(a_row(0.5)) == pytest.approx(1e6 * 0.5 * 1e-7)
    assert energy.per_million(a_row(None)) is None
    assert Prices(kwh=0.36, watts=500.0).per_million(a_row(None)) == pytest.approx(1e6 * 0.5 * 1e-7)
    assert Prices().per_million(a_row(0.5)) is None


@pytest.mark.parametrize(
    ("path", "accept", "page"),
    [
        ("/", "text/html,*/*;q=0.8", True),
        ("/", "*/*", False),
        ("/v1/jobs", "text/html", False),
        ("/optigpu/v1/jobs", "text/html", False),
        ("/optigpu/", "text/html", True),
    ],
)
def test_errors_are_pages_for_browsers_outside_of_the_json_api(path: str, accept: str, page: bool) -> None:
    prefix = "/optigpu" if path.startswith("/optigpu") else ""
    headers = [(b"accept", accept.encode())]
    assert wants_page({"type": "http", "path": path, "root_path": prefix, "headers": headers}) is page


def test_a_tag_is_known_weak_or_strong() -> None:
    assert is_known('W/"a"', '"b", W/"a"')
    assert is_known('"a"', "*")
    assert not is_known('"a"', '"b"')
    assert not is_known(None, '"a"')
    assert not is_known('"a"', None)


def test_no_text_of_others_changes_the_direction_of_a_page(any_service: Served) -> None:
    job = any_service.submit(MATMUL | {"name": "quick\u202efox\u2066", "note": "a\u202eb<i>"})
    for address in ("/jobs", f"/jobs/{job['id']}"):
        page = any_service.client.get(address, headers={"Accept": "text/html"}).text
        assert "quickfox" in page
        assert not {"\u202e", "\u2066"} & set(page)
