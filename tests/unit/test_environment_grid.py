"""The table of a machine says what is known, what is not, and what each thing is in."""

from optigpu.documents.result import Accelerator, CpuSetup, Environment, HostIdSource
from optigpu.report import environment_grid
from tests.unit.made_results import ENVIRONMENT


def cells(environment: Environment) -> dict[str, str]:
    return {str(what): str(value) for what, value in environment_grid(environment).rows}


def test_what_is_known_is_shown_with_its_unit() -> None:
    gpu = Accelerator(
        name="NVIDIA H200",
        memory_bytes=140 * 2**30,
        uuid="GPU-a",
        clock_max_hz=1_980_000_000,
        memory_clock_max_hz=3_201_000_000,
        power_limit_w=700.0,
        persistence_mode=True,
    )
    setup = CpuSetup(
        base_hz=2_600_000_000,
        max_hz=3_500_000_000,
        limit_hz=3_000_000_000,
        governor="performance",
        boost=False,
        smt=True,
        numa_nodes=2,
        hypervisor=False,
    )
    changes = {
        "host_id_source": HostIdSource.MACHINE_ID,
        "hardware_fingerprint": "0123456789abcdef",
        "cpu_setup": setup,
        "accelerators": (gpu,),
        "driver": "570.1",
        "cuda": "12.8",
        "container": "docker",
        "image": "optigpu:0.1.0",
        "git_revision": "c" * 40,
        "git_dirty": True,
    }
    shown = cells(ENVIRONMENT.model_copy(update=changes))
    assert shown["host id"] == "made-up (from the machine id)"
    assert shown["hardware fingerprint"] == "0123456789abcdef"
    assert shown["CPU setup"] == (
        "base 2.60 GHz, maximum 3.50 GHz, limit 3.00 GHz, governor performance, boost off, SMT on, NUMA nodes 2, "
        "hypervisor no"
    )
    assert shown["GPUs"] == (
        "NVIDIA H200, 140 GiB, SM clock up to 1.98 GHz, memory clock up to 3.20 GHz, power limit 700 W, "
        "persistence mode on"
    )
    assert shown["GPU driver"] == "570.1, CUDA up to 12.8"
    assert shown["container"] == "docker, image optigpu:0.1.0"
    assert shown["code"] == "commit cccccccccccc, changed since"


def test_what_is_unknown_is_said_to_be_and_never_off_or_zero() -> None:
    shown = cells(ENVIRONMENT)
    assert shown["CPU setup"] == (
        "unknown: base, maximum, limit, governor, boost, SMT, NUMA nodes, hypervisor"
    )
    assert shown["hardware fingerprint"] == shown["software fingerprint"] == "unknown"
    assert (shown["GPUs"], shown["GPU driver"]) == ("none", "none")
    assert shown["container"] == "none detected"
    assert shown["code"] == "commit unknown"
    partly = ENVIRONMENT.model_copy(update={"cpu_setup": CpuSetup(smt=False, numa_nodes=1)})
    assert cells(partly)["CPU setup"].startswith("SMT off, NUMA nodes 1; unknown: base, ")


def test_a_gpu_shows_only_what_its_driver_says() -> None:
    gpu = Accelerator(name="Tesla K80", memory_bytes=12 * 2**30, uuid="GPU-a")
    assert cells(ENVIRONMENT.model_copy(update={"accelerators": (gpu,)}))["GPUs"] == "Tesla K80, 12 GiB"
