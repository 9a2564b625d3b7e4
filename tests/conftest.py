"""Fixtures and selection for all tests: real servers, the datasets, no GPU test without a GPU, the quick tests."""

import gc
import os
import shutil
from collections.abc import Generator, Iterator, Mapping, Set
from contextlib import suppress
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType

import pynvml
import pytest
from hypothesis import HealthCheck, settings

from optigpu.engines.environments import environment_of
from optigpu.models.bring import is_brought
from optigpu.models.held import models_dir
from optigpu.models.reference import TRAINED
from tests.docker.host import INSIDE
from tests.durations import Durations, by_duration, kept_seconds
from tests.engine.llama_server import program as llama_server
from tests.engine.native.record import compiler, recorded
from tests.servers.databases import POSTGRES, REDIS
from tests.servers.process import this_machine
from tests.servers.rule import PROGRAMS, Kind, advice, is_possible, may_have
from tests.servers.slurm import SLURM

pytest_plugins = ["pytester", "tests.servers.fixtures"]

QUICK_PROFILE = "quick"
"""Of Hypothesis: `make check` tries a fifth of the examples."""

# A test must not read the packed weights or the quality reference of another one.
os.environ["OPTIGPU_DECODE_CACHE_GB"] = os.environ["OPTIGPU_REFERENCES_GB"] = "0"
# torch.compile would find out in each new cache, by seconds of compiling, what the CPU's own flags say.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
# A developer's own meter is not what the tests read.
os.environ.pop("OPTIGPU_WALL_METER", None)

# How long an example takes says nothing on a machine that is busy with other work.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(QUICK_PROFILE, settings.get_profile("unhurried"), max_examples=20)
settings.load_profile("unhurried")

TESTS = Path(__file__).resolve().parent
OWN_TEXT = TESTS / "text"
"""Drawn by tools/draw_text.py."""

ALONE = ("gpu/",)
"""Beginnings of the ids of tests that need the machine for themselves.

All other tests use their own processes, folders, databases and a CPU of their own, and so can run in parallel.
"""

OWN_ENVIRONMENT = MappingProxyType({"ik": "ik_llama_cpp", "vllm": "vllm"})
"""The backend of each marker that needs an environment which `optigpu engines install` makes."""
QUICK = ("unit/", "contract/", "engine/", "service/")
"""Folders of `make check`: all cases of the contract's tests, and one case of each of the others."""
LASTING = ("slow", "long", "real_model")
"""Markers of what `make check` leaves out; `make test` leaves out the second."""
REAL_MODEL = TRAINED["smollm2-135m"]
MODELS = models_dir().resolve()
"""As it is before a test changes OPTIGPU_MODELS_DIR."""
SERVERS: Mapping[Kind, frozenset[str]] = MappingProxyType(
    {
        POSTGRES: frozenset({"postgres_server_url", "postgres_url", "postgresql_database", "postgresql"}),
        REDIS: frozenset({"redis_url"}),
        SLURM: frozenset({"slurm"}),
    }
)
"""For each server the fixtures that start it, and the cases that run on it; `make check` runs no such test."""


def pytest_configure(config: pytest.Config) -> None:
    """A worker of a parallel run, and every process that its tests start, stays on one CPU.

    Threads that wait for each other by spinning would take the other workers' CPUs from them, and what is measured
    would be disturbed: the engine looks only at the CPUs that it may use.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker and hasattr(os, "sched_setaffinity"):
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpus[int(worker.removeprefix("gw")) % len(cpus)]})
    if not worker:
        config.pluginmanager.register(Durations())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: to look through all of it for garbage again and again takes a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest looks at -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seen: set[str] = set()
    unmet, lacking = unmet_markers(), missing_programs().union(*(SERVERS[kind] for kind in impossible()))
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        markers = {marker.name for marker in item.iter_markers()}
        place = item.nodeid.removeprefix("tests/")
        if item.path.is_relative_to(TESTS) and not place.startswith(ALONE):
            item.add_marker("together")
            if markers.isdisjoint(LASTING) and is_quick(item, place, seen):
                item.add_marker("quick")
        (kept if unmet.isdisjoint(markers) and not uses(item, lacking) else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = by_duration(kept, kept_seconds())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The summary's line of a test whose time was over says where it waited."""
    report = yield
    crash = getattr(report.longrepr, "reprcrash", None)
    if call.excinfo and crash and crash.message.startswith("Failed: Timeout"):
        calls = [(Path(each.path).name, each.lineno + 1) for each in call.excinfo.traceback.cut(item.path)]
        waited = takewhile(lambda each: each[0] != "pytest_timeout.py", calls)
        crash.message += f" It waited in {' > '.join(f'{name}:{line}' for name, line in waited)}."
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for kind in impossible():
        terminalreporter.write_line(f"Tests that need {kind.name} were left out: {advice(kind)}")
    for name in sorted(missing_programs()):
        terminalreporter.write_line(f"Tests that need {name} were left out: install {PROGRAMS[name]}.")
    if not has_node():
        terminalreporter.write_line(
            "Tests that need Node.js were left out: install node 18 or newer, and npm."
        )
    if compiler() != recorded().compiler:
        terminalreporter.write_line(
            f"Tests of the decoder's counts were left out: they were recorded with {recorded().compiler}."
        )
    if not is_brought(REAL_MODEL):
        terminalreporter.write_line(
            f"Tests of a real model were left out: bring it with `optigpu models get {REAL_MODEL.name}`."
        )


def is_quick(item: pytest.Item, place: str, seen: set[str]) -> bool:
    """Whether `make check` runs a test that is not lasting. `seen` holds the tests of which a first case was taken."""
    if not place.startswith(QUICK) or any(uses(item, names) for names in SERVERS.values()):
        return False
    function = place.partition("[")[0]
    is_first = function not in seen
    seen.add(function)
    return is_first or place.startswith("contract/")


def unmet_markers() -> frozenset[str]:
    """Markers of tests that need what this machine has not."""
    has = {
        "gpu": gpu_count() > 0,
        "gptq": has_packages("gptqmodel"),
        "llama": has_packages("llama_cpp", "gguf"),
        "llama_server": has_packages("gguf") and llama_server() is not None,
        "serving": has_packages("openai"),
        "onnxruntime": has_packages("onnxruntime", "onnx"),
        "openvino": has_packages("openvino", "nncf"),
        "coreml": has_packages("coremltools"),
        # Others bring OpenTelemetry's API along, which is part of it.
        "otel": has_packages("opentelemetry", "opentelemetry.sdk"),
        "node": has_node(),
        "counts": compiler() == recorded().compiler,
        "docker": INSIDE in os.environ,
        "real_model": is_brought(REAL_MODEL),
        **{marker: environment_of(engine) is not None for marker, engine in OWN_ENVIRONMENT.items()},
    }
    return frozenset(marker for marker, there in has.items() if not there)


def has_packages(*names: str) -> bool:
    """Whether all of them are installed."""
    return all(map(find_spec, names))


def uses(item: pytest.Item, names: Set[str]) -> bool:
    """Whether a test has one of these fixtures, or is one of the cases that are called so."""
    call = getattr(item, "callspec", None)
    values = [value for value in call.params.values() if isinstance(value, str)] if call else []
    return not names.isdisjoint({*values, *getattr(item, "fixturenames", ())})


def impossible() -> list[Kind]:
    """The servers to which this machine has no way."""
    return [kind for kind in SERVERS if not is_possible(kind, this_machine())]


def missing_programs() -> frozenset[str]:
    """The programs to which this machine has no way."""
    return frozenset(name for name in PROGRAMS if not may_have(name, this_machine()))


def has_node() -> bool:
    """Whether MicroPython's WebAssembly build can be had and run."""
    return shutil.which("node") is not None and bool(
        shutil.which("npm") or os.environ.get("OPTIGPU_TEST_WASM")
    )


def gpu_count() -> int:
    """NVIDIA GPUs on this machine, asked of the driver: loading torch to know would slow every run."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    count: int = pynvml.nvmlDeviceGetCount()
    pynvml.nvmlShutdown()
    return count


@pytest.fixture(autouse=True)
def usual_priority() -> Iterator[None]:
    """A test that measures in this process leaves it, and the group of its session, at the highest priority.

    That is not for the tests after it, nor for what the same shell starts after the tests.
    """
    before = os.getpriority(os.PRIO_PROCESS, 0)
    yield
    if os.getpriority(os.PRIO_PROCESS, 0) != before:
        os.setpriority(os.PRIO_PROCESS, 0, before)
    if GROUP_NICE is not None and group_nice() != GROUP_NICE:
        GROUP.write_text(str(GROUP_NICE))


def group_nice() -> int | None:
    """The nice value in "/autogroup-85 nice 0"; None where the kernel has no such groups."""
    with suppress(OSError):
        words = GROUP.read_text().split()
        return int(words[-1]) if words else None
    return None


GROUP = Path("/proc/self/autogroup")
GROUP_NICE = group_nice()
"""Before the first test: tests that run beside each other share the group."""


@pytest.fixture(scope="session")
def datasets_dir() -> Path:
    """The folder with `wikitext-2`, `hellaswag` and `books`: that of OPTIGPU_DATASETS_DIR, else the tests' own text."""
    return Path(os.environ.get("OPTIGPU_DATASETS_DIR") or OWN_TEXT)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """A models folder, as OPTIGPU_MODELS_DIR names one, that holds `smollm2-135m`; for tests marked `real_model`."""
    return MODELS
