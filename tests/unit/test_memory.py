"""How much host memory is free and how large the last cache is, on made-up files and on this machine."""

from pathlib import Path

import psutil
import pytest

from optigpu.hardware.cgroup import free_host_bytes
from optigpu.hardware.cpu import last_level_cache_bytes

GROUPS = Path("sys/fs/cgroup")


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def group(path: str, limit: str, used: int, cache: int = 0) -> dict[str, str]:
    """The files of one control group of version 2."""
    folder = GROUPS / path
    return {
        f"{folder}/memory.max": limit,
        f"{folder}/memory.current": str(used),
        f"{folder}/memory.stat": f"anon {used - cache}\ninactive_file {cache}",
    }


def test_what_the_control_group_already_uses_is_not_free(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/a"} | group("a", "1000", used=700))
    assert free_host_bytes(tmp_path) == 300


def test_page_cache_that_the_kernel_can_give_back_is_free(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/a"} | group("a", "1000", used=700, cache=200))
    assert free_host_bytes(tmp_path) == 500


def test_a_group_above_may_have_less_left_than_the_one_with_the_smallest_limit(tmp_path: Path) -> None:
    files = group("a/b", "1000", used=100) | group("a", "2000", used=1900) | group("", "max", used=5000)
    write(tmp_path, {"proc/self/cgroup": "0::/a/b"} | files)
    assert free_host_bytes(tmp_path) == 100, "other groups under a use 1800 of its 2000 bytes"


def test_version_1_counts_the_cache_of_child_groups_too(tmp_path: Path) -> None:
    folder = GROUPS / "memory/a"
    files = {
        "proc/self/cgroup": "4:memory:/a\n0::/",
        f"{folder}/memory.limit_in_bytes": "1000",
        f"{folder}/memory.usage_in_bytes": "900",
        f"{folder}/memory.stat": "inactive_file 0\ntotal_inactive_file 150",
    }
    write(tmp_path, files)
    assert free_host_bytes(tmp_path) == 250


@pytest.mark.parametrize("limit", ["max", str(2**62)])
def test_without_a_limit_it_is_what_the_machine_has_available(tmp_path: Path, limit: str) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/a"} | group("a", limit, used=700))
    free, memory = free_host_bytes(tmp_path), psutil.virtual_memory()
    assert 700 < free <= memory.total


def machine(root: Path, *sizes: str) -> Path:
    for index, size in enumerate(sizes):
        folder = root / f"sys/devices/system/cpu/cpu0/cache/index{index}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(f"{size}\n")
    return root


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (("48K", "32K", "2048K", "491520K"), 480 * 2**20),
        (("64M",), 2**26),
        (("", "?", "K"), None),
        ((), None),
    ],
)
def test_the_largest_cache_that_the_kernel_tells_counts(
    tmp_path: Path, sizes: tuple[str, ...], expected: int | None
) -> None:
    assert last_level_cache_bytes(machine(tmp_path, *sizes)) == expected
