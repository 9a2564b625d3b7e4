"""What every test can rely on: real servers, the datasets, and no GPU test where there is no GPU."""

import os
from importlib.util import find_spec
from pathlib import Path

import pynvml
import pytest

pytest_plugins = [
    "pytester",
    "tests.engine.tiny_models",
    "tests.engine.biased_models",
    "tests.engine.normed_models",
    "tests.engine.trained_model",
    "tests.servers.fixtures",
]

TESTS = Path(__file__).resolve().parent
SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
DATASETS = ("books", "hellaswag", "wikitext-2")


_FILES = (
    *("caches", "generate", "matmul", "models", "ops", "peers", "quality", "techniques", "tiny_training"),
    *("torch_backend", "weights", "work", "workload", "every"),
)
_SERVICE = (
    *(
        "api_bad_input",
        "api_compare",
        "api_hardware",
        "api_health",
        "api_jobs",
        "api_keys",
        "api_leaderboard",
    ),
    *("api_openapi", "artifacts", "store_"),
)
TOGETHER = (
    *("unit/", "contract/"),
    *(f"engine/test_{name}{end}" for name in _FILES for end in ("_", ".py")),
    *(f"service/test_{name}" for name in _SERVICE),
)
"""Where the tests are that have a process and a database of their own, and so may run side by side."""


@pytest.hookimpl(tryfirst=True)  # before pytest looks at -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(TESTS) and item.path.relative_to(TESTS).as_posix().startswith(TOGETHER):
            item.add_marker("together")
    if gpu_count() == 0:
        leave_out("gpu", config, items)
    if not has_gptqmodel():
        leave_out("gptq", config, items)


def leave_out(marker: str, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the tests of a marker."""
    unmet = [item for item in items if item.get_closest_marker(marker)]
    config.hook.pytest_deselected(items=unmet)
    items[:] = [item for item in items if item not in unmet]


def has_gptqmodel() -> bool:
    """Whether the extra gptq is installed."""
    return find_spec("gptqmodel") is not None


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
