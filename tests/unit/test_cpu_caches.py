"""The size of the last cache, as the kernel writes it."""

from pathlib import Path

import pytest

from optigpu.hardware.cpu_caches import last_level_cache_bytes


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
