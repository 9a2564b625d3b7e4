"""The services that `make up` writes for the GPUs of a host, from what `nvidia-smi -L` prints."""

import ast
from typing import Any

import pytest

from tests.deploy.compose import ONE_HOST, ROOT, WORKERS, parse_compose, read_compose
from tests.deploy.gpu_host import OUTPUTS
from tools.gpu_services import RefusedError, chosen, compose_file, parse

NEEDED = {
    ONE_HOST: {"POSTGRES_PASSWORD": "secret", "OPTIGPU_API_KEY": "key"},
    WORKERS: {
        "OPTIGPU_DATABASE_URL": "postgresql://elsewhere/o",
        "OPTIGPU_REDIS_URL": "rediss://elsewhere/0",
    },
}


def listed(name: str) -> str:
    return (OUTPUTS / f"{name}.txt").read_text()


def test_one_gpu() -> None:
    (gpu,) = parse(listed("one"))
    assert (gpu.service, gpu.name) == ("worker-gpu-0", "NVIDIA H200")
    assert gpu.uuid == "GPU-5f1c8a52-3c1e-9b1d-7d0e-1f2a3b4c5d6e"


def test_eight_gpus_each_by_its_uuid() -> None:
    gpus = parse(listed("eight"))
    assert [gpu.service for gpu in gpus] == [f"worker-gpu-{number}" for number in range(8)]
    assert len({gpu.uuid for gpu in gpus}) == 8


def test_models_in_one_host_are_told_apart() -> None:
    names = [gpu.name for gpu in parse(listed("mixed"))]
    assert names == ["NVIDIA GeForce RTX 4090", "NVIDIA RTX 6000 Ada Generation", "Tesla T4"]


def test_slices_stand_in_place_of_their_gpu() -> None:
    gpus = {gpu.service: (gpu.name, gpu.uuid[:8]) for gpu in parse(listed("slices"))}
    assert gpus == {
        "worker-gpu-0-mig-0": ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "MIG-1111"),
        "worker-gpu-0-mig-1": ("NVIDIA A100-SXM4-80GB MIG 2g.20gb", "MIG-2222"),
        "worker-gpu-0-mig-2": ("NVIDIA A100-SXM4-80GB MIG 1c.2g.20gb", "MIG-3333"),
        "worker-gpu-1": ("NVIDIA A100-SXM4-80GB", "GPU-bbbb"),
        "worker-gpu-2-mig-0": ("NVIDIA A100-SXM4-80GB MIG 7g.80gb", "MIG-4444"),
    }


def test_slices_of_an_older_driver() -> None:
    first, second = parse(listed("old_slices"))
    assert first.uuid == "MIG-GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f/1/0"
    assert second.service == "worker-gpu-0-mig-1"


def test_a_gpu_with_mig_and_no_slice_is_left_out() -> None:
    whole = "GPU-bbbb1111-2222-3333-4444-555566667777"
    services = [gpu.service for gpu in parse(listed("slices"), frozenset({whole, "GPU-aaaa1111-2222"}))]
    assert "worker-gpu-1" not in services
    assert len(services) == 4


@pytest.mark.parametrize(
    "text", ["", "No devices were found\n", "Some other program\nGPU 0: without a UUID\n"]
)
def test_nothing_is_read_from_anything_else(text: str) -> None:
    assert parse(text) == []


def test_gpus_are_chosen_by_the_beginnings_of_their_uuids() -> None:
    gpus = parse(listed("mixed"))
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
        chosen(parse(listed("mixed")), word)
    assert str(refused.value).startswith(sentence)
    assert "NVIDIA GeForce RTX 4090" in str(refused.value)


def generated(base: str, name: str) -> dict[str, Any]:
    text = compose_file((ROOT / base).read_text(), parse(listed(name)))
    return parse_compose(text, NEEDED[base])


@pytest.mark.parametrize("base", [ONE_HOST, WORKERS])
@pytest.mark.parametrize("name", ["one", "eight", "mixed", "slices"])
def test_a_worker_for_a_gpu_differs_from_the_one_for_the_cpu_in_its_device_alone(
    base: str, name: str
) -> None:
    here = read_compose(NEEDED[base], base)
    document = generated(base, name)
    assert set(document["services"]) == {gpu.service for gpu in parse(listed(name))}
    for gpu in parse(listed(name)):
        service = document["services"][gpu.service]
        assert service.pop("command") == ["python", "-m", "worker", "--device", "cuda", "--gpu", gpu.uuid]
        reserved = {"driver": "nvidia", "device_ids": [gpu.uuid], "capabilities": ["gpu"]}
        assert service.pop("deploy") == {"resources": {"reservations": {"devices": [reserved]}}}
        on_the_cpu = dict(here["services"]["worker-cpu"])
        assert on_the_cpu.pop("command") == ["python", "-m", "worker", "--device", "cpu"]
        assert service == on_the_cpu


@pytest.mark.parametrize("base", [ONE_HOST, WORKERS])
def test_the_file_with_the_base_file_is_what_compose_takes(base: str) -> None:
    """As compose merges them: services and volumes of both."""
    here, document = read_compose(NEEDED[base], base), generated(base, "slices")
    assert document["name"] == here["name"]


def test_without_a_gpu_the_file_adds_nothing() -> None:
    assert parse_compose(compose_file("", []), {}) == {"services": {}}


def test_a_base_file_without_workers_is_refused() -> None:
    with pytest.raises(RefusedError, match="x-worker"):
        compose_file("services:\n  api: {}\n", parse(listed("one")))


def test_the_host_s_python_may_be_old() -> None:
    text = (ROOT / "tools" / "gpu_services.py").read_text()
    tree = ast.parse(text, feature_version=(3, 9))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "from __future__ import annotations" in text
    assert imported <= {"__future__", "collections.abc", "dataclasses", "pathlib"}
