"""Fixtures and selection for all tests: real servers, the datasets, no GPU test without a GPU, the quick tests."""

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

# A test must not read the packed weights of another one.
os.environ["OPTIGPU_DECODE_CACHE_GB"] = "0"

TESTS = Path(__file__).resolve().parent
SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
DATASETS = ("books", "hellaswag", "wikitext-2")

ALONE = (
    *("gpu/", "engine/test_detectors.py", "engine/test_meter_energy.py", "engine/test_run.py"),
    "engine/test_bundled.py::test_the_engine_measures_it",
    "engine/test_cli_replay.py::test_a_replay_measures_the_same_variant_and_compares",
    "engine/test_cli_run.py::test_a_ladder_is_a_table_with_the_gains",
    "engine/test_workloads_run.py::test_quality_by_itself_is_a_job",
    "deploy/test_compose.py::test_a_job_goes_through_the_services_as_the_file_runs_them",
    "service/test_demo.py::test_it_shows_the_ladder_and_the_leaderboard_and_ends_with_0",
    "service/test_demo.py::test_a_failed_job_ends_it_with_1_and_the_reason",
    "service/test_embedded.py::test_a_job_is_posted_followed_and_ranked",
    "service/test_readme.py::test_the_library_s_example_works_with_a_smaller_model",
    "service/test_worker_execute.py::test_a_job_goes_from_the_queue_to_the_leaderboard",
    "service/test_worker_execute.py::test_a_ladder_leaves_its_attribution",
)
"""Beginnings of the ids of tests that need the machine for themselves: their measurements must be valid, or they are
timed, or they take many times as long beside other processes, because waiting threads keep the cores busy.

All other tests use their own processes, folders and databases, and so can run in parallel. A job that such a test
measures is disturbed; its verdict is then invalid, which the test does not check.
"""

QUICK = ("unit/", "contract/", "engine/", "service/")
"""Folders of `make check`: all tests of the first two, one case of each test of the others."""
SERVERS = frozenset({"postgres_server_url", "postgres_url", "postgresql_database", "redis_url"})
"""Fixtures that start a server; `make check` runs no test that needs one."""


@pytest.hookimpl(tryfirst=True)  # before pytest looks at -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seen: set[str] = set()
    for item in items:
        if not item.path.is_relative_to(TESTS):
            continue
        if not item.nodeid.removeprefix("tests/").startswith(ALONE):
            item.add_marker("together")
            if is_quick(item, seen):
                item.add_marker("quick")
    if gpu_count() == 0:
        leave_out("gpu", config, items)
    if not has_gptqmodel():
        leave_out("gptq", config, items)
    if not has_llama_cpp():
        leave_out("llama", config, items)


def is_quick(item: pytest.Item, seen: set[str]) -> bool:
    """Whether `make check` runs it. `seen` holds the tests of which a first case was taken."""
    place = item.nodeid.removeprefix("tests/")
    if not place.startswith(QUICK) or item.get_closest_marker("slow") or needs_a_server(item):
        return False
    function = place.partition("[")[0]
    is_first = function not in seen
    seen.add(function)
    return is_first or place.startswith(("unit/", "contract/"))


def needs_a_server(item: pytest.Item) -> bool:
    """Whether it runs on PostgreSQL or Redis, by its fixtures or as one of its cases."""
    call = getattr(item, "callspec", None)
    values = call.params.values() if call else ()
    return "postgresql" in values or not SERVERS.isdisjoint(getattr(item, "fixturenames", ()))


def leave_out(marker: str, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the tests of a marker."""
    unmet = [item for item in items if item.get_closest_marker(marker)]
    config.hook.pytest_deselected(items=unmet)
    items[:] = [item for item in items if item not in unmet]


def has_gptqmodel() -> bool:
    """Whether the extra gptq is installed."""
    return find_spec("gptqmodel") is not None


def has_llama_cpp() -> bool:
    """Whether the extra llama is installed."""
    return find_spec("llama_cpp") is not None and find_spec("gguf") is not None


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
