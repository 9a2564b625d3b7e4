"""The table of a machine says what is known, what is not, and what each thing is in."""

from optigpu.documents.result import CpuSetup, Environment
from optigpu.report import environment_grid
from tests.unit.made_results import ENVIRONMENT


def cells(environment: Environment) -> dict[str, str]:
    return {str(what): str(value) for what, value in environment_grid(environment).rows}


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
