"""Which memory node each CPU belongs to, from files that other machines would show."""

from pathlib import Path

from optigpu.hardware.cpu import allowed_cpus, node_of_each_cpu
from tests.engine.trees import tree

NODES = "sys__devices__system__node"


def machine(root: Path, online: str, with_memory: str, **cpulists: str) -> Path:
    lists = {f"{NODES}__{node}__cpulist": f"{cpus}\n" for node, cpus in cpulists.items()}
    return tree(
        root, **{f"{NODES}__online": f"{online}\n", f"{NODES}__has_memory": f"{with_memory}\n"}, **lists
    )


def test_two_nodes_of_four_cpus(tmp_path: Path) -> None:
    root = machine(tmp_path, "0-1", "0-1", node0="0-3", node1="4-7")
    assert node_of_each_cpu(root) == {0: 0, 1: 0, 2: 0, 3: 0, 4: 1, 5: 1, 6: 1, 7: 1}


def test_cpus_whose_numbers_alternate_between_nodes(tmp_path: Path) -> None:
    root = machine(tmp_path, "0-1", "0-1", node0="0,2,8-9", node1="1,3")
    assert node_of_each_cpu(root) == {0: 0, 2: 0, 8: 0, 9: 0, 1: 1, 3: 1}


def test_a_node_that_is_offline_or_has_no_memory_is_of_no_cpu(tmp_path: Path) -> None:
    root = machine(tmp_path, "0,2-3", "0,2", node0="0-1", node1="2-3", node2="4", node3="5")
    assert node_of_each_cpu(root) == {0: 0, 1: 0, 4: 2}


def test_a_node_without_cpus_is_of_none(tmp_path: Path) -> None:
    root = machine(tmp_path, "0-1", "0-1", node0="0-1", node1="")
    assert node_of_each_cpu(root) == {0: 0, 1: 0}


def test_a_kernel_that_knows_of_no_nodes(tmp_path: Path) -> None:
    assert node_of_each_cpu(tmp_path) == {}


def test_every_cpu_of_this_machine_is_of_a_node() -> None:
    found = node_of_each_cpu()
    assert not found or allowed_cpus() <= found.keys()
