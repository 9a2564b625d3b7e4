"""What every test can rely on: real servers, the datasets, and no GPU test where there is no GPU."""

import os
from pathlib import Path

import pynvml
import pytest

pytest_plugins = [
    "pytester",
    "tests.engine.tiny_models",
    "tests.engine.trained_model",
    "tests.servers.fixtures",
]

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
DATASETS = ("books", "hellaswag", "wikitext-2")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if gpu_count() > 0:
        return
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=needs_gpu)
    items[:] = [item for item in items if item not in needs_gpu]


def gpu_count() -> int:
    """NVIDIA GPUs on this machine, asked of the driver: loading torch to know would slow every run."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    count: int = pynvml.nvmlDeviceGetCount()
    pynvml.nvmlShutdown()
    return count


@pytest.fixture(scope="session")
def datasets_dir() -> Path:
    """The folder that holds `wikitext-2`, `hellaswag` and `books`."""
    folder = find_datasets([SHARED_DATA, Path(os.environ.get("OPTIGPU_DATASETS_DIR", os.devnull))])
    if folder is None:
        pytest.fail(
            "This test reads public datasets: set OPTIGPU_DATASETS_DIR to a folder that holds "
            f"{', '.join(DATASETS)}.",
            pytrace=False,
        )
    return folder


def find_datasets(folders: list[Path]) -> Path | None:
    """The first folder that holds them all."""
    for folder in folders:
        if all((folder / name).is_dir() for name in DATASETS):
            return folder
    return None
