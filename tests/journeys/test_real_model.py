"""Stories of SmolLM2-135M, which people use: engines beside each other, training, serving, an assistant, a change of
mind. Those that are long are told of a bundled model as well."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from optigpu.client import Client
from optigpu.models.held import MODELS_DIR
from optigpu.vocabulary import Document
from tests.journeys.machine import Station
from tests.journeys.test_posted_jobs import GENERATE, job, value
from tests.service.pages import Browser
from tests.service.test_mcp import tool

pytestmark = pytest.mark.slow
MODEL = "path:smollm2-135m"
ON_BOTH = pytest.mark.parametrize(
    "model", ["bundled:tiny", pytest.param(MODEL, marks=[pytest.mark.real_model, pytest.mark.long])]
)
EIGHT_BITS = {"name": "native_decode", "weights": "w8", "calibration": "none"}


@pytest.fixture(autouse=True)
def models(smollm2: Path, machine: object) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MODELS_DIR, str(smollm2))
        yield


def measured(station: Station, **fields: object) -> dict[str, Document]:
    """The results of a job on the model by their labels; each variant must have one."""
    ended = station.finished(job(**{"model": MODEL, **fields}))
    assert [each.status for each in ended.variants] == ["succeeded"] * len(ended.variants), ended.variants
    found = station.get(f"/v1/jobs/{ended.id}/results")["results"]
    return {each["variant"]["label"]: each for each in found}


@pytest.mark.llama
@pytest.mark.real_model
def test_a_gguf_file_stands_beside_torch_and_native_decode_in_one_job(on_sqlite: Station) -> None:
    gguf = {"backend": "llama_cpp", "stack": [{"name": "gguf", "type": "Q8_0"}], "label": "Q8_0"}
    found = measured(on_sqlite, plan="ladder", stack=[EIGHT_BITS], beside=[gguf])
    torch, native, file = found["baseline"], found["native_decode"], found["Q8_0"]
    assert value(torch, "kld_mean") == pytest.approx(0, abs=1e-6)
    assert 0 < value(native, "kld_mean") < 0.05
    assert 0 < value(file, "kld_mean") < 0.05
    assert value(native, "weight_bytes") < value(torch, "weight_bytes") / 3
    assert value(file, "weight_bytes") < value(torch, "weight_bytes") / 3
    assert {row["result_id"] for row in on_sqlite.rows(model=MODEL).values()} == {
        each["id"] for each in found.values()
    }
    with Browser(on_sqlite.served) as browser:
        assert "smollm2-135m" in browser.read(f"/results/{native['id']}")


@pytest.mark.real_model
def test_a_kept_run_is_imported_and_ranked_beside_the_worker_s(on_sqlite: Station) -> None:
    run = on_sqlite.machine.measured(
        *("run", "--model", MODEL, "--prompt-tokens", "8", "--new-tokens", "5"),
        *("--stack", "native_decode:weights=w8:calibration=none"),
    )
    (result,) = run["results"]
    assert on_sqlite.optigpu("import", run["id"]).strip()
    board = on_sqlite.rows(model=MODEL, workload=result["variant"]["workload_digest"])
    assert [row["result_id"] for row in board.values()] == [result["id"]]


@ON_BOTH
def test_it_is_trained_with_adapters(on_sqlite: Station, model: str) -> None:
    found = measured(
        on_sqlite,
        model=model,
        workload={"kind": "train_step", "batch_size": 1, "sequence_tokens": 16},
        plan="ladder",
        stack=[{"name": "lora"}],
        measure={"replicates": 1, "min_seconds": 0.05, "max_seconds": 0.3, "meters": ["latency", "memory"]},
    )
    assert set(found) == {"baseline", "lora"}
    assert all(value(each, "step_s") > 0 for each in found.values())


@ON_BOTH
def test_it_serves_requests_that_arrive_over_time(on_sqlite: Station, model: str) -> None:
    shapes = {"prompt_tokens": 4, "prompt_tokens_most": 12, "new_tokens": 3, "queries": 6}
    found = measured(
        on_sqlite,
        model=model,
        workload={"kind": "serve", **shapes},
        stack=[EIGHT_BITS],
        measure={"replicates": 1, "min_seconds": 0.05, "max_seconds": 0.3, "meters": ["latency"]},
    )
    (served,) = found.values()
    assert value(served, "ttft_s") > 0


@ON_BOTH
def test_an_assistant_posts_a_job_follows_it_and_reads_the_result(on_sqlite: Station, model: str) -> None:
    request = job(model=model, workload=GENERATE | {"new_tokens": 6}, stack=[EIGHT_BITS])
    refused, posted = tool(on_sqlite.served, "submit_job", job=request)
    assert not refused, posted
    state = posted
    while state["state"] not in ("succeeded", "failed", "cancelled"):
        refused, state = tool(on_sqlite.served, "follow_job", id=posted["id"], wait_s=10)
        assert not refused, state
    assert state["state"] == "succeeded"
    (result,) = on_sqlite.get(f"/v1/jobs/{posted['id']}/results")["results"]
    assert value(result, "top1_agreement") > 0.5


@ON_BOTH
def test_a_job_that_is_being_measured_is_cancelled_and_leaves_the_device_to_the_next(
    on_sqlite: Station, model: str
) -> None:
    measure = {"replicates": 1, "min_seconds": 300, "max_seconds": 600, "meters": ["latency"]}
    shown = []
    with Client(on_sqlite.url) as client, Browser(on_sqlite.served) as browser:
        long = client.submit(job(model=model, measure=measure, workload=GENERATE | {"new_tokens": 7}))
        for event in client.events(long.id):
            if event.kind == "rough":
                shown.append(browser.read(f"/jobs/{long.id}"))
                client.cancel(long.id)
        assert client.wait(long.id).state == "cancelled"
        shown.append(browser.read(f"/jobs/{long.id}"))
    assert all(re.search(r"about [\d.,]+ ±", page) for page in (shown[0], shown[-1])), (
        "its first figures, then and afterwards"
    )
    assert measured(on_sqlite, model=model, workload={"kind": "prefill", "prompt_tokens": 8})
