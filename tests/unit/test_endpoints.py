"""The address of a server: how a job names it, and where a worker may go."""

import pytest

from optigpu.backends.endpoint.runtime import key_of, metrics_in, require_allowed
from optigpu.cli.options import parse_beside
from optigpu.conductor.session import serving_sessions
from optigpu.documents.endpoints import engine_name, parse_endpoint
from optigpu.job.measured import replay_request
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.vocabulary import SpecError, UnsupportedError
from tests.servers.completions import serving

HERE = "http://127.0.0.1:8000#tiny"
JOB = {"workload": {"kind": "generate"}, "model": "bundled:tiny"}


def job(**changes: object) -> JobSpec:
    return JobSpec.model_validate(JOB | changes)


@pytest.mark.parametrize(
    ("text", "canonical", "place"),
    [
        (HERE, "http://127.0.0.1:8000/v1#tiny", "127.0.0.1:8000"),
        ("HTTP://LocalHost/v1/", "http://localhost:80/v1", "localhost:80"),
        ("https://gpu-box/openai/v1#org/name", "https://gpu-box:443/openai/v1#org/name", "gpu-box:443"),
        ("http://[::1]:9#a", "http://[::1]:9/v1#a", "[::1]:9"),
    ],
)
def test_an_address_has_one_form(text: str, canonical: str, place: str) -> None:
    parsed = parse_endpoint(text)
    assert (str(parsed), parsed.place) == (canonical, place)
    assert str(parse_endpoint(canonical)) == canonical


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("127.0.0.1:8000", "is not the address of a server"),
        ("ftp://host/x", "is not the address of a server"),
        ("http://host:99999", "is not the address of a server"),
        ("http://ho st", "is not the address of a server"),
        ("http:///v1", "is not the address of a server"),
        ("http://user:secret@host", "OPTIGPU_ENDPOINT_KEYS holds the key"),
        ("http://host/v1?key=1", "has a query"),
    ],
)
def test_what_is_no_address_is_refused(text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        parse_endpoint(text)
    with pytest.raises(SpecError, match=said):
        job(backend="endpoint", endpoint=text)


def test_a_key_in_an_address_is_not_repeated() -> None:
    with pytest.raises(SpecError) as error:
        parse_endpoint("http://user:secret@host")
    assert "secret" not in str(error.value)


def test_a_server_belongs_to_its_backend() -> None:
    with pytest.raises(SpecError, match="the backend endpoint asks a server"):
        job(backend="endpoint")
    with pytest.raises(SpecError, match="torch asks no server"):
        job(endpoint=HERE)
    with pytest.raises(SpecError, match=r"beside\.0"):
        job(beside=[{"backend": "endpoint"}])
    with pytest.raises(SpecError, match="does not run the workload quality"):
        job(backend="endpoint", endpoint=HERE, workload={"kind": "quality"})
    with pytest.raises(SpecError, match="leave prompt"):
        job(backend="endpoint", endpoint=HERE, workload={"kind": "generate", "temperature": 1})


def test_each_server_is_a_variant_of_its_own() -> None:
    servers = ["http://127.0.0.1:8000#tiny", "http://127.0.0.1:8001#tiny", "http://127.0.0.1:8001/v1#tiny"]
    spec = job(beside=[{"backend": "endpoint", "endpoint": server} for server in servers])
    variants = variants_of(spec)
    assert [variant.label for variant in variants] == [
        "baseline",
        "endpoint tiny at 127.0.0.1:8000: baseline",
        "endpoint tiny at 127.0.0.1:8001: baseline",
    ]
    assert len({variant.digest for variant in variants}) == 3
    assert len({variant.workload_digest for variant in variants}) == 1
    assert spec.endpoints == ("http://127.0.0.1:8000/v1#tiny", "http://127.0.0.1:8001/v1#tiny")


def test_without_a_server_a_digest_is_what_it_was() -> None:
    (plain,) = variants_of(job())
    assert plain.endpoint is None
    assert "endpoint" not in plain.model_dump(exclude_none=True)
    assert engine_name("torch", None) == "torch"


def test_a_result_of_a_server_is_measured_again_there() -> None:
    (variant,) = variants_of(job(backend="endpoint", endpoint=HERE))
    stored = {
        "variant": variant.model_dump(mode="json"),
        "seed": 0,
        "schema_version": 2,
    }
    request = replay_request(stored, None, {})
    assert variants_of(JobSpec.model_validate(request))[0].digest == variant.digest


def test_the_command_line_names_a_server_beside() -> None:
    assert parse_beside(f"{HERE} as vLLM") == [{"backend": "endpoint", "endpoint": HERE, "label": "vLLM"}]
    assert parse_beside(HERE) == [{"backend": "endpoint", "endpoint": HERE}]


@pytest.mark.parametrize(
    ("hosts", "url", "allowed"),
    [
        (None, "http://127.0.0.1:8000", True),
        (None, "http://localhost:1", True),
        (None, "http://[::1]:1", True),
        (None, "http://10.0.0.5:8000", False),
        (None, "http://localhost.evil.example", False),
        (None, "http://169.254.169.254/latest", False),
        ("gpu-box", "http://gpu-box:8000", True),
        ("gpu-box:8000, 10.0.0.5", "http://gpu-box:8000", True),
        ("gpu-box:8000", "http://gpu-box:8001", False),
        ("gpu-box", "http://127.0.0.1:8000", False),
        ("", "http://127.0.0.1:8000", False),
    ],
)
def test_a_worker_asks_only_the_servers_that_its_settings_allow(
    monkeypatch: pytest.MonkeyPatch, hosts: str | None, url: str, allowed: bool
) -> None:
    monkeypatch.delenv("OPTIGPU_ENDPOINT_HOSTS", raising=False)
    if hosts is not None:
        monkeypatch.setenv("OPTIGPU_ENDPOINT_HOSTS", hosts)
    endpoint = parse_endpoint(url)
    if allowed:
        require_allowed(endpoint)
        return
    with pytest.raises(UnsupportedError, match="OPTIGPU_ENDPOINT_HOSTS"):
        require_allowed(endpoint)


def test_a_key_goes_to_its_server_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTIGPU_ENDPOINT_KEYS", "gpu-box:8000=sk-a=b, 127.0.0.1:9=two, empty:1=")
    assert key_of(parse_endpoint("http://gpu-box:8000")) == "sk-a=b"
    assert key_of(parse_endpoint("http://127.0.0.1:9")) == "two"
    assert key_of(parse_endpoint("http://gpu-box:8001")) is None
    with pytest.raises(UnsupportedError, match="write empty:1=KEY"):
        key_of(parse_endpoint("http://empty:1"))


VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_running{engine="1",model_name="tiny"} 1.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:num_preemptions_total{engine="0",model_name="tiny"} 7.0
python_gc_objects_collected_total{generation="0"} 1.0
broken line
vllm:num_requests_waiting NaN
"""


def test_the_few_numbers_of_a_server_s_metrics_are_found() -> None:
    assert metrics_in(VLLM) == {"running": 4, "waiting": 2, "cache_usage": 0.25, "preemptions": 7}
    llama = "llamacpp:requests_processing 1\nllamacpp:requests_deferred 0\n"
    assert metrics_in(llama) == {"running": 1, "waiting": 0, "cache_usage": None, "preemptions": None}
    assert metrics_in("<html>no metrics</html>") is None


def test_the_process_that_listens_is_found_on_this_machine_alone() -> None:
    import os

    with serving() as server:
        assert os.getsid(0) in serving_sessions([f"{server.url}/v1#tiny"])
    assert serving_sessions([f"{server.url}/v1#tiny"]) == frozenset()
    assert serving_sessions(["http://10.255.0.1:80/v1#tiny"]) == frozenset()
    assert serving_sessions([]) == frozenset()
